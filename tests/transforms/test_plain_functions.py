"""Plain functions: what they take, return and look at that jit does not, and what is held fixed for that."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import functools
import random
import threading
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.catalogue import array

import autopallas
from autopallas import AutopallasWarning
from transforms.test_transforms import attend, optimized, same

T, S, D = 5, 7, 3


@pytest.fixture(scope="module")
def qkv():
    return array(1, 2, T, D, seed=1), array(1, 2, S, D, seed=2), array(1, 2, S, D, seed=3)


def test_strings_none_and_numbers_as_arguments(qkv):
    def function(q, k, v, mode, scale=None, power=1, flag=True):
        scale = 1.0 if scale is None else scale
        out = attend(q * scale**power, k, v)
        return -out if mode == "negated" and flag else out

    wrapped = optimized(function, require={"attention": 1})
    same(wrapped(*qkv, "negated"), function(*qkv, "negated"))
    same(wrapped(*qkv, "plain", power=2, scale=0.5), function(*qkv, "plain", power=2, scale=0.5))
    same(wrapped(*qkv, mode="negated", flag=False), function(*qkv, mode="negated", flag=False))


def test_a_number_that_the_function_looks_at(qkv):
    def function(q, k, v, layers):
        for _ in range(layers):
            q = attend(q, k, v)
        return q

    wrapped = optimized(function)
    for layers in (1, 3):
        same(wrapped(*qkv, layers), function(*qkv, layers))
        assert wrapped.report().counts()["attention"] == layers


def test_zeros_of_both_signs_are_different_numbers_to_look_at(qkv):
    def function(q, scale):
        return q * scale if scale < 1 else q

    wrapped = optimized(function)
    for scale in (0.0, -0.0, float("nan"), 0, False):
        given, wanted = wrapped(qkv[0], scale), function(qkv[0], scale)
        np.testing.assert_array_equal(np.signbit(given), np.signbit(wanted))
        np.testing.assert_array_equal(given, wanted)


@dataclasses.dataclass(frozen=True)
class Settings:
    scale: object
    further: object = dataclasses.field(default=1, compare=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Model:
    settings: Settings
    sizes: tuple[object, ...] = ()


class Named:
    def __init__(self, scale):
        self.scale = scale

    def __eq__(self, other):
        return isinstance(other, Named)

    def __hash__(self):
        return 1


def told_apart(use, things):
    """Calls a function twice with each of some equal things, compares, and returns the optimized function."""
    x = jnp.arange(1, 4)
    wrapped = optimized(use)
    for thing in [*things, *things]:
        given, wanted = wrapped(x, thing), use(x, thing)
        assert given.dtype == wanted.dtype
        np.testing.assert_array_equal(given, wanted)
        np.testing.assert_array_equal(np.signbit(given), np.signbit(wanted))
    return wrapped


@pytest.mark.parametrize(
    ("use", "things"),
    [
        (lambda x, s: x * s.scale, [Settings(n) for n in (1, 1.0, True, 0, 0.0, -0.0, False)]),
        (lambda x, s: x * s.further, [Settings(1, n) for n in (2, 3, 2.0)]),
        (lambda x, m: x * m.settings.scale, [Model(Settings(n)) for n in (1, 1.0, True)]),
        (lambda x, m: x * m.sizes[0], [Model(Settings(1), (n,)) for n in (1, 1.0, True)]),
        (lambda x, s: x * s.scale, [Named(n) for n in (2, 3, 2.0)]),
        (lambda x, s: x * s.scale, [Named(jnp.asarray(n)) for n in (2, 3)]),
    ],
    ids=["field", "not compared", "inner", "tuple", "own rule", "array"],
)
def test_objects_that_are_equal_by_a_rule_of_their_own_are_told_apart_by_what_they_hold(use, things):
    wrapped = told_apart(use, things)
    assert wrapped._fixed._cache_size() == len(things)


class Inner:
    def __init__(self, scale):
        self.scale = scale


class Unit(float):
    def __new__(cls, value, name):
        unit = super().__new__(cls, value)
        unit.name = name
        return unit


class Sizes(tuple):
    """No node of a tree, as JAX sees it."""

    __slots__ = ()


@pytest.mark.parametrize(
    ("use", "things"),
    [
        (lambda x, s: x * s.scale.scale, [Named(Inner(2.0)), Named(Inner(3.0))]),
        (lambda x, s: x * s.scale, [Named(np.full(3, 2.0)), Named(np.full(3, 3.0))]),
        (lambda x, s: x * s.further, [Settings(1, np.full(3, 2.0)), Settings(1, np.full(3, 3.0))]),
        (lambda x, s: x * s * len(s.name), [Unit(2.0, "a"), Unit(2.0, "ab"), Unit(-0.0, "a"), Unit(0.0, "a")]),
        (lambda x, s: x * s[0], [Sizes([1]), Sizes([1.0]), Sizes([True])]),
    ],
    ids=["object", "array", "field", "number with a name", "tuple"],
)
def test_equal_objects_are_told_apart_by_what_their_rule_leaves_out(use, things):
    wrapped = told_apart(use, things)
    assert not wrapped.report().failures


@pytest.mark.filterwarnings("ignore:autopallas runs")
class InSlots:
    """Equal to any other by a rule of its own."""

    __slots__ = ("inner",)

    def __init__(self, inner):
        self.inner = inner

    def __eq__(self, other):
        return isinstance(other, InSlots)

    def __hash__(self):
        return 1


class InDictionary(InSlots):
    def __init__(self, inner):
        super().__init__(1.0)
        self.further = inner


@dataclasses.dataclass(frozen=True)
class InField:
    further: object = dataclasses.field(compare=False)


class Holding:
    def __init__(self, further):
        self.further = further


def _innermost(part):
    """Returns the array that lies in objects and containers."""
    while not isinstance(part, np.ndarray) or part.dtype == object:
        if isinstance(part, (tuple, list, np.ndarray)):
            part = part[-1]
        elif isinstance(part, dict):
            part = part["a"]
        else:
            part = part.further if hasattr(part, "further") else part.inner
    return part


@pytest.mark.parametrize(
    ("make", "is_compiled"),
    [
        (InSlots, True),
        (InDictionary, True),
        (InField, True),
        (lambda array: InSlots([array]), True),
        (lambda array: InDictionary((1, {"a": array})), True),
        (lambda array: InDictionary(Holding(array)), True),
        (lambda array: InDictionary(Holding([array])), True),
        (lambda array: InField([array]), True),
        (lambda array: InDictionary(np.broadcast_to(array[:1], (600, 1000))), False),
        (lambda array: InDictionary(np.array([None, array], dtype=object)), False),
    ],
    ids=[
        "slot",
        "dictionary",
        "field",
        "list",
        "tuple",
        "object",
        "list of an object",
        "list in a field",
        "large",
        "objects",
    ],
)
def test_an_array_that_is_changed_in_an_object_with_a_rule_of_its_own_is_read_again(make, is_compiled):
    calls, x = [], jnp.arange(1.0, 4)

    def use(x, thing):
        calls.append(1)
        return x * _innermost(thing).ravel()[0]

    array = np.full(3, 2.0, np.float32)
    thing, wrapped = make(array), optimized(use, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutopallasWarning)
        for value in (2.0, 3.0, 2.0, 5.0):
            array[:] = value
            np.testing.assert_array_equal(wrapped(x, thing), x * value)
    before = len(calls)
    wrapped(x, thing)
    assert (len(calls) == before) == is_compiled


@pytest.mark.parametrize(
    ("use", "things"),
    [
        (lambda x, n: x * len(str(n)), [decimal.Decimal("0.5"), decimal.Decimal("0.50")]),
        (lambda x, t: x * t.fold, [datetime.datetime(2020, 1, 1, fold=fold) for fold in (0, 1)]),
        (lambda x, r: x * r.stop, [range(0, 3, 2), range(0, 4, 2)]),
        (lambda x, s: x * s.inner, [InSlots(n) for n in (2, 3, 2.0)]),
    ],
    ids=["decimal", "time", "range", "slots"],
)
def test_equal_objects_without_a_dictionary_are_told_apart(use, things):
    wrapped = told_apart(use, things)
    assert wrapped._fixed._cache_size() == len(things)


@pytest.mark.parametrize("kind", ["dictionary", "random", "iterator"])
def test_methods_of_what_python_and_numpy_have_read_what_it_is_now(kind):
    def change(source):
        if kind == "dictionary":
            source["a"] += 1
            return source.get
        return source.normal if kind == "random" else source.__next__

    def use(x, method):
        return x * (method("a") if kind == "dictionary" else method())

    make = {
        "dictionary": lambda: {"a": 1.0},
        "random": lambda: np.random.default_rng(0),
        "iterator": lambda: iter([1, 2, 3]),
    }[kind]
    given, wanted, wrapped = make(), make(), autopallas.optimize(use)
    for _ in range(3):
        np.testing.assert_array_equal(wrapped(jnp.ones(3), change(given)), use(jnp.ones(3), change(wanted)))


@pytest.mark.parametrize("name", ["use", "jitted", "self", "fn", "instead", "trace", "static", "args", "kwargs"])
def test_an_argument_may_have_any_name(name):
    wrapped = optimized(lambda x, **named: x * len(named[name]))
    x = jnp.arange(3.0)
    same(wrapped(x, **{name: "text"}), x * 4)
    assert not autopallas.explain(wrapped, x, **{name: "text"}).failures
    same(wrapped(x, **{name: [x, x]}), x * 2)
    assert wrapped.eval_shape(x, **{name: [x]}).shape == (3,)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.parametrize("where", ["argument", "by name", "result", "added"])
def test_dictionaries_whose_keys_have_no_order_run_as_they_are(where):
    """jit puts keys in order, and raises an error where it cannot."""
    x = jnp.arange(3.0)

    def use(x, colors=None):
        if where == "result":
            return {Color.BLUE: x, Color.RED: 2 * x}
        if where == "added":
            colors[1] = x
            return 2 * x
        return x * colors[Color.RED] + colors[Color.BLUE]

    colors = {"a": x} if where == "added" else {Color.RED: x, Color.BLUE: 2 * x}
    wrapped = autopallas.optimize(use)
    for _ in range(2):
        if where == "result":
            assert jnp.array_equal(wrapped(x)[Color.RED], 2 * x)
        elif where == "by name":
            assert jnp.array_equal(wrapped(x, colors=colors), use(x, colors=colors))
        else:
            assert jnp.array_equal(wrapped(x, colors), use(x, colors))
    assert wrapped.report().failures


def through(layers, x):
    for name, layer in layers.items():
        x = jnp.tanh(x @ layer["w"]) + len(name)
    return x


@pytest.mark.parametrize("verify", [False, True, 0.9])
@pytest.mark.parametrize("mode", [None, "text"])
@pytest.mark.parametrize("lowered_before", [False, True])
def test_dictionaries_keep_the_order_of_their_keys(verify, mode, lowered_before, qkv):
    """jit sorts them: layer_10 would come before layer_2."""

    def use(layers, q, k, v, mode=None, **further):
        return through(further, through(layers, attend(q, k, v))) + (mode is None)

    def named(n):
        return {f"layer_{i}": {"w": array(D, D, seed=i), "b": array(D, seed=i)} for i in range(n, 12)}

    wrapped = optimized(use, verify=verify)
    if lowered_before and mode is None:
        wrapped.lower(named(7), *qkv, z=named(11)["layer_11"], a=named(10)["layer_10"])
    inner = jax.jit(lambda q: wrapped(named(7), q, *qkv[1:], mode, z=named(11)["layer_11"], a=named(10)["layer_10"]))
    for _ in range(3):
        given = wrapped(named(7), *qkv, mode, z=named(11)["layer_11"], a=named(10)["layer_10"])
        wanted = use(named(7), *qkv, mode, z=named(11)["layer_11"], a=named(10)["layer_10"])
        same(given, wanted)
        same(inner(qkv[0]), wanted)
    assert not wrapped.report().failures
    assert wrapped.report().counts()["attention"] == 1


def test_a_function_within_another_keeps_the_order_of_its_own_dictionary():
    def layers(*names):
        return {name: {"w": array(D, D, seed=len(name))} for name in names}

    inner = autopallas.optimize(lambda given, x: through(given, x))
    outer = autopallas.optimize(lambda given, x: inner(layers("zz", "a"), through(given, x)))
    x, given = array(2, D, seed=1), layers("yyy", "bbbb")
    same(outer(given, x), through(layers("zz", "a"), through(given, x)))


class Series:
    """An array of another library, which jit does not take."""

    def __init__(self, values):
        self.values, self.shape, self.dtype = values, values.shape, values.dtype


def masked(values):
    return np.ma.masked_array(values, [False, False, True])


class Variable:
    def __init__(self, value):
        self.value = value

    def __jax_array__(self):
        return self.value


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.parametrize("make", [Series, Variable, masked], ids=lambda make: make.__name__)
def test_what_looks_like_an_array_and_is_none_of_jax(make):
    def use(x, other):
        return x + (other.sum() if make is masked else other.values if make is Series else other.value)

    wrapped, x = autopallas.optimize(use), jnp.arange(3.0)
    for scale in (1, 2):
        same(wrapped(x, make(scale * np.ones(3, np.float32))), use(x, make(scale * np.ones(3, np.float32))))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Result:
    value: jax.Array
    total: object = dataclasses.field(metadata=dict(static=True))


@pytest.mark.filterwarnings("ignore:autopallas runs")
def test_a_result_that_holds_an_array_where_no_array_belongs_holds_none_that_is_traced():
    wrapped = autopallas.optimize(lambda x: Result(2 * x, x.sum()))
    for _ in range(2):
        assert float(wrapped(jnp.arange(3.0)).total) == 3.0


class Layer:
    """Holds what a method reads: its instances are equal to themselves alone, whatever their attributes are."""

    def __init__(self):
        self.scale, self.names, self.weight, self.table = 2.0, ["a"], jnp.ones(3), np.ones(3)
        self.table.setflags(write=False)
        self.inner = {"bias": 1, "layer": self}

    @functools.partial(autopallas.optimize, objective="always", strict=True)
    def __call__(self, q, k, v):
        return self.inner["bias"] + len(self.names) + attend(q * self.scale * self.weight * self.table, k, v)


@pytest.mark.parametrize(
    ("use", "number"),
    [
        (lambda q, n: jnp.zeros(n) + q[0, 0, 0, 0], (4, 2)),
        (lambda q, n: q.reshape(n, -1), 2),
        (lambda q, n: jax.random.normal(jax.random.key(n), q.shape), 2**40),
        (lambda q, n: jax.random.normal(jax.random.key(n), q.shape), 2**32 - 1),
        (lambda q, n: q * (n > 5), 2**40),
        (lambda q, n: q * float(n), 10**30),
    ],
    ids=["shape", "size", "seed", "32_bits", "compared", "large"],
)
def test_a_number_that_jit_does_not_take_or_that_is_a_size(use, number, qkv):
    wrapped = optimized(use)
    for _ in range(2):
        np.testing.assert_array_equal(wrapped(qkv[0], number), use(qkv[0], number))
    assert not wrapped.report().failures


def checked_number(q, n):
    if not isinstance(n, int):
        raise ValueError("n must be an integer")
    return q * n


@pytest.mark.parametrize(
    "use",
    [
        lambda q, n: q[..., :n],
        lambda q, n: q * n.bit_length(),
        lambda q, n: jax.grad(lambda q: jax.lax.fori_loop(0, n, lambda _, y: jnp.sin(y), q).sum())(q),
        lambda q, n: q * {"layer_2": 3.0}[f"layer_{n}"],
        checked_number,
    ],
    ids=["end of a slice", "method", "bound of a loop", "name", "checked"],
)
def test_a_number_at_which_a_traced_function_raises_an_error_of_any_kind(use, qkv):
    wrapped = optimized(use)
    for _ in range(2):
        same(wrapped(qkv[0], 2), use(qkv[0], 2))
    assert not wrapped.report().failures
    same(jax.grad(lambda q: wrapped(q, 2).sum())(qkv[0]), jax.grad(lambda q: use(q, 2).sum())(qkv[0]))
    assert not autopallas.explain(wrapped, qkv[0], 2).failures


def filled_in_place(x):
    x[:] = 2
    return jnp.asarray(x) + 1


@pytest.mark.parametrize(
    "use",
    [
        lambda x: (jnp.asarray(x) * 2).block_until_ready(),
        lambda x: jax.device_put(2, jnp.asarray(x).sharding) + x,
        lambda x: jnp.asarray(x) * x.flags.c_contiguous,
        lambda x: (f"{x.sum():.1f}", jnp.asarray(x))[1],
        filled_in_place,
    ],
    ids=["waits", "sharding", "attribute of NumPy", "format", "in place"],
)
def test_what_only_an_array_that_is_not_traced_has_runs_as_it_is(use):
    wrapped = optimized(use, strict=False)
    x, y = np.ones((2, 3), np.float32), np.ones((2, 3), np.float32)
    with pytest.warns(AutopallasWarning, match="as it is"):
        same(wrapped(x), use(y))
    same(wrapped(x), use(y))
    np.testing.assert_array_equal(x, y)


def test_an_own_error_of_any_kind_is_raised_and_nothing_is_learned_of_it(qkv):
    calls = []

    def function(q, n):
        calls.append(None)
        if n is None or q.ndim != 4:
            raise KeyError("mine") from ValueError("the cause")
        return q * 2

    wrapped = optimized(function, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for q, n in ((qkv[0], None), (qkv[0][0], 2)):
            with pytest.raises(KeyError, match="mine") as raised:
                wrapped(q, n)
            assert isinstance(raised.value.__cause__, ValueError)
            assert raised.value.__context__ is None
        assert len(calls) <= 5  # traced, once more with the number held fixed, and called as it is
        same(wrapped(qkv[0], 2), qkv[0] * 2)
    assert not wrapped.report().failures
    assert wrapped._run is wrapped._jit


@pytest.mark.parametrize("fixed", ["twice", True], ids=["text", "flag"])
def test_a_number_that_changes_beside_what_is_held_fixed_is_compiled_once(fixed, qkv):
    def function(q, step, fixed):
        return q * step * (2 if fixed == "twice" or fixed is True else 1)

    wrapped = optimized(function)
    for step in (1, 2, 3):
        same(wrapped(qkv[0], step, fixed), function(qkv[0], step, fixed))
        same(wrapped(qkv[0], step, fixed=fixed), function(qkv[0], step, fixed))
    assert wrapped._fixed._cache_size() == 2


def test_an_own_error_of_a_function_that_calls_itself_is_raised_soon():
    """Each call was made again for the error of the one inside, twice as many for each one more."""
    calls = []

    def function(x, n):
        calls.append(n)
        if n == 0:
            raise ValueError("mine")
        return wrapped(2 * x, n - 1)

    wrapped = autopallas.optimize(function)
    with pytest.raises(ValueError, match="mine"):
        wrapped(jnp.ones(3), 6)
    assert len(calls) < 60


def test_an_own_error_beside_a_number_is_raised_and_costs_nothing(qkv):
    wrapped = optimized(lambda q, k, v, scale: attend(q * scale, k, v), strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for use in (wrapped, functools.partial(autopallas.explain, wrapped)):
            with pytest.raises(TypeError, match=r"dot_general|matmul|contract|shape"):
                use(qkv[0], qkv[1][..., :2], qkv[2], 2.0)
        same(wrapped(*qkv, 2.0), attend(2 * qkv[0], *qkv[1:]))
    assert wrapped.report().counts()["attention"] == 1


@pytest.mark.parametrize(
    "array",
    [
        np.array([1, "a"], object),
        np.array(["a", "b"]),
        np.array(["2020-01-01"], "datetime64[D]"),
        np.array([(1.0,)], [("field", "f4")]),
        np.str_("a"),
    ],
    ids=["objects", "texts", "dates", "fields", "text"],
)
def test_arrays_that_jax_does_not_have(array, qkv):
    def function(q, array):
        return q * array.size

    wrapped = optimized(function, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutopallasWarning)
        same(wrapped(qkv[0], array), function(qkv[0], array))


def test_an_object_that_changes_between_calls(qkv):
    layer = Layer()
    changes = (
        lambda: setattr(layer, "scale", 3.0),
        lambda: layer.names.append("b"),
        lambda: setattr(layer, "weight", 2 * layer.weight),
        lambda: layer.inner.update(bias=5),
    )
    traced = Layer.__call__._fixed._cache_size
    before = traced()
    for change in (lambda: None, *changes):
        change()
        for _ in range(2):
            same(layer(*qkv), Layer.__call__._function(layer, *qkv))
    assert traced() - before == 1 + len(changes)


@pytest.mark.parametrize(
    "thing",
    [random.Random(0), threading.Lock(), functools.partial(print, np.ones(3))],
    ids=["subclass", "no_attributes", "array"],
)
def test_an_object_that_may_change_unseen_is_not_held_fixed(thing, qkv):
    calls = []

    def function(q, thing):
        calls.append(thing)
        return q

    wrapped = optimized(function, strict=False)
    with pytest.warns(AutopallasWarning, match=r"as it is.*may change without notice"):
        wrapped(qkv[0], thing)
    before = len(calls)
    wrapped(qkv[0], thing)
    assert len(calls) == before + 1


@pytest.mark.parametrize("disabled", ["0", "1"])
def test_what_the_function_changes_in_its_arguments_is_changed(disabled, qkv, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_DISABLE", disabled)

    def function(state, names, *, log):
        state["sum"] = state["sum"] + attend(*qkv).sum()
        names.append("b")
        log[0] = state["sum"]
        return state["sum"]

    seen = []
    for run in (function, optimized(function, strict=False)):
        state, names, log = {"sum": jnp.zeros(())}, ["a"], [0.0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AutopallasWarning)
            results = [run(state, names, log=log) for _ in range(3)]
        seen.append(([float(x) for x in (*results, state["sum"], log[0])], names))
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", ["dictionary", "list", "deeper", "object"])
def test_an_argument_that_is_changed_makes_the_function_run_as_it_is(kind, qkv):
    class Holder:
        value = 0.0

    def change(thing, x):
        if kind == "dictionary":
            thing["new"] = x
        elif kind == "list":
            thing[0] = x
        elif kind == "deeper":
            thing["a"][1].append(x)
        else:
            thing.value = x

    def function(q, thing):
        out = attend(q, *qkv[1:])
        change(thing, out.sum())
        return out

    make = {"dictionary": dict, "list": lambda: [1.0], "deeper": lambda: {"a": (1.0, [])}, "object": Holder}[kind]
    wrapped, given, wanted = optimized(function, strict=False), make(), make()
    with pytest.warns(AutopallasWarning, match=r"as it is.*changes its arguments, which would be lost"):
        same(wrapped(qkv[0], given), function(qkv[0], wanted))
    given, wanted = (vars(x) if kind == "object" else x for x in (given, wanted))
    same(given, wanted)


@pytest.mark.parametrize("looks", [False, True])
def test_an_object_that_computes_an_array_once(looks, qkv):
    """A tracer that is left in it would make every further call fail."""

    class Lazy:
        def __init__(self):
            self.known, self.calls = {}, 0

        def __call__(self, q):
            self.calls += 1
            if "mask" not in self.known:
                self.known["mask"] = jnp.tril(q[0, 0] @ q[0, 0].T)
            if looks and float(q.sum()) > 1e6:
                return q
            return attend(self.known["mask"] @ q, *qkv[1:])

    lazy, wanted = Lazy(), Lazy()
    wrapped = optimized(Lazy.__call__, strict=False)
    with pytest.warns(AutopallasWarning, match="as it is"):
        same(wrapped(lazy, qkv[0]), wanted(qkv[0]))
    same(wrapped(lazy, 2 * qkv[0]), wanted(2 * qkv[0]))
    assert lazy.calls == wanted.calls == 2


def test_arguments_that_are_made_anew_whenever_they_are_looked_at(qkv):
    @jax.tree_util.register_pytree_node_class
    class Doubled:
        def __init__(self, x):
            self.x = x

        def tree_flatten(self):
            return (self.x * 2,), None

        @classmethod
        def tree_unflatten(cls, _, children):
            return cls(*(x / 2 for x in children))

    wrapped = optimized(lambda q, k, v: attend(q.x, k, v))
    same(wrapped(Doubled(qkv[0]), *qkv[1:]), attend(*qkv))
    assert wrapped.report().counts()["attention"] == 1


def test_a_function_and_a_class_are_held_fixed(qkv):
    wrapped = optimized(lambda q, k, v, f, dtype: attend(f(q), k, v).astype(dtype))
    for activation in (jnp.sin, jax.nn.relu, functools.partial(jax.nn.gelu, approximate=False)):
        same(wrapped(*qkv, activation, jnp.float32), attend(activation(qkv[0]), *qkv[1:]))


def test_a_call_whose_number_is_looked_at_is_not_traced_again(qkv):
    traces = []

    def function(q, layers):
        traces.append(layers)
        return q * 2 if layers > 1 else q

    wrapped = optimized(function)
    wrapped(qkv[0], 2)
    before = len(traces)
    for _ in range(3):
        np.testing.assert_array_equal(wrapped(qkv[0], 2), qkv[0] * 2)
    assert len(traces) == before


def test_another_thread_finds_out_first_that_numbers_are_looked_at(qkv):
    """JAX lets one thread trace at a time, so what the other one leaves is put there by hand."""
    wrapped = optimized(lambda q, layers: function(q, layers))

    def function(q, layers):
        wrapped._run = functools.partial(wrapped._plain.call, lambda jitted, *args: jitted(*args))
        return q * 2 if layers > 1 else q

    np.testing.assert_array_equal(wrapped(qkv[0], 2), qkv[0] * 2)


def test_a_number_that_is_looked_at_and_changes_in_each_call_is_compiled_a_few_times_only(qkv, monkeypatch):
    monkeypatch.setattr("autopallas.plain_calls._MOST_HELD", 3)

    def function(q, step):
        return q * 2 if step > 3 else q + step

    wrapped = optimized(function)

    def call(step):
        np.testing.assert_array_equal(wrapped(qkv[0], step), function(qkv[0], step))

    for step in (0, 1, 2):
        call(step)
    with pytest.warns(AutopallasWarning, match=r"further calls.*3 different values.*jnp\.where"):
        call(3)
    for step in (4, 5, 1):
        call(step)
    assert wrapped._fixed._cache_size() == 3
    assert "further calls run as they are" in wrapped.report().failures[-1].error


def test_an_array_that_the_function_looks_at_runs_as_it_is(qkv):
    def function(q, k, v):
        return attend(q, k, v) if float(q.sum()) < 1e6 else q

    wrapped = optimized(function, strict=False)
    with pytest.warns(AutopallasWarning, match="as it is") as caught:
        same(wrapped(*qkv), attend(*qkv))
    assert [one.filename for one in caught] == [__file__], "the line of the call"
    assert wrapped.report().failures[0].stage == "trace"


def test_results_that_are_no_arrays(qkv):
    wrapped = optimized(lambda q, k, v: {"out": attend(q, k, v), "name": "attention"}, strict=False)
    with pytest.warns(AutopallasWarning):
        result = wrapped(*qkv)
    assert result["name"] == "attention"
    same(result["out"], attend(*qkv))


def model_of(activation, rate):
    return {"w": array(D, D, seed=4), "activation": activation, "rate": rate, "name": "layer"}


def step_of_model(model, q, k, v):
    """A train step whose model has functions, numbers and texts among its leaves, as Equinox's models have them."""

    def loss(w):
        scale = 1.0 if model["rate"] > 0 else 2.0
        return jnp.sum(model["activation"](attend(q @ w, k, v)) ** 2) * scale

    value, gradient = jax.value_and_grad(loss)(model["w"])
    return model | {"w": model["w"] - 0.1 * gradient}, value, 3


@pytest.mark.parametrize("verify", [False, True, 0.9])
def test_a_train_step_that_returns_the_model_it_was_given(qkv, verify):
    step = optimized(step_of_model, require={"attention": 1}, verify=verify)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for activation, rate in ((jnp.tanh, 0.5), (jax.nn.relu, 0), (lambda x: 2 * x, True), (lambda x: 3 * x, True)):
            model = model_of(activation, rate)
            for _ in range(2):
                expected, (model, value, number) = step_of_model(model, *qkv), step(model, *qkv)
                same(model["w"], expected[0]["w"])
                same(value, expected[1])
                assert model["activation"] is activation
                assert model["rate"] is rate
                assert (model["name"], number, type(number)) == ("layer", 3, int)
    assert step.report().counts()["attention"] == 1
    assert not step.report().failures
    inside = jax.jit(lambda w: step(model | {"w": w}, *qkv)[0]["w"])
    same(inside(model["w"]), step_of_model(model, *qkv)[0]["w"])


def test_a_function_that_returns_an_object_of_its_own_runs_as_it_is(qkv):
    class Result:
        def __init__(self, value):
            self.value = value

    def function(model, q):
        return model, Result(q * 2)

    with pytest.warns(AutopallasWarning, match="nor one of its arguments"):
        model, result = autopallas.optimize(function)(model_of(jnp.tanh, 1), qkv[0])
    assert model["activation"] is jnp.tanh
    same(result.value, qkv[0] * 2)


class Named:
    """An object that stands for a function."""

    __name__ = "named"

    def __init__(self):
        self.scale = 2.0

    def __call__(self, x):
        return x * self.scale


class EqualByName:
    """Compares neither of what it holds."""

    def __init__(self, scales):
        self.scales = scales

    def __eq__(self, other):
        return isinstance(other, EqualByName)

    def __hash__(self):
        return 1


def _attribute_of_a_function():
    def function(x):
        return x * function.scale

    return function, lambda value: setattr(function, "scale", value)


def _attribute_of_an_object():
    named = Named()
    return named, lambda value: setattr(named, "scale", value)


def _number_closed_over():
    scale = 2.0

    def change(value):
        nonlocal scale
        scale = value

    return (lambda x: x * scale), change


def _container_closed_over_by_another():
    scales = {"scale": [2.0]}

    def inner(x):
        return x * scales["scale"][0]

    return (lambda x: inner(x)), lambda value: scales["scale"].__setitem__(0, value)


def _attribute_of_a_class():
    kind = type("Kind", (), {"scale": 2.0, "__call__": None})
    return kind, lambda value: setattr(kind, "scale", value)


def _attribute_of_a_module():
    module = types.ModuleType("module")
    return module, lambda value: setattr(module, "scale", value)


def _list_of_an_object_that_compares_something_else():
    one = EqualByName([2.0])
    return one, lambda value: one.scales.__setitem__(0, value)


def _scaled(function, x):
    if isinstance(function, EqualByName):
        return x * function.scales[0]
    return x * function.scale if isinstance(function, (type, types.ModuleType)) else function(x)


@pytest.mark.parametrize(
    "make",
    [
        _attribute_of_a_function,
        _attribute_of_an_object,
        _number_closed_over,
        _container_closed_over_by_another,
        _attribute_of_a_class,
        _attribute_of_a_module,
        _list_of_an_object_that_compares_something_else,
    ],
)
def test_what_an_argument_that_is_held_fixed_reads_may_change(make):
    x, traces = jnp.arange(3.0), []

    def function(held, x):
        traces.append(None)
        return _scaled(held, x)

    held, change = make()
    wrapped = autopallas.optimize(function)
    for value in (2.0, 3.0, 2.0, 3.0):
        change(value)
        assert jnp.array_equal(wrapped(held, x), x * value)
    assert len(traces) <= 3


@pytest.mark.filterwarnings("ignore:autopallas runs")
def test_an_argument_whose_hash_fails_runs_as_written():
    data = bytearray(b"a")
    wrapped = autopallas.optimize(lambda view, x: x * view[0])
    for value in (1, 2):
        data[0] = value
        assert jnp.array_equal(wrapped(memoryview(data), jnp.arange(3.0)), jnp.arange(3.0) * value)
