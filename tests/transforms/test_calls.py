"""The optimized function in every use that jit allows."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import pickle
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from support.catalogue import array

import autopallas
from autopallas import jaxprs
from autopallas.graph import sizes
from transforms.test_transforms import attend, optimized, primitives, same

T, S, D = 5, 7, 3


@pytest.fixture(scope="module")
def qkv():
    return array(1, 2, T, D, seed=1), array(1, 2, S, D, seed=2), array(1, 2, S, D, seed=3)


def test_what_a_jit_function_changes_stays_as_jit_has_it(qkv):
    def function(q, batch):
        k, v = batch.pop("k"), batch.pop("v")
        return attend(q, k, v)

    batch = {"k": qkv[1], "v": qkv[2]}
    wrapped = optimized(jax.jit(function))
    same(wrapped(qkv[0], batch), attend(*qkv))
    assert len(batch) == 2
    assert wrapped.report().counts()["attention"] == 1


def test_the_functions_own_error_is_raised_as_it_is(qkv):
    def function(q, k, v):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        optimized(function, strict=False)(*qkv)
    with pytest.raises(TypeError, match=r"dot_general|matmul|contract|shape"):
        optimized(strict=False)(qkv[0], qkv[1][..., :2], qkv[2])


def test_a_method_and_its_instance(qkv):
    @dataclasses.dataclass(frozen=True)
    class Layer:
        scale: float

        @functools.partial(autopallas.optimize, objective="always", strict=True)
        def __call__(self, q, k, v):
            return attend(q * self.scale, k, v)

    q, k, v = qkv
    same(Layer(2.0)(*qkv), attend(q * 2, k, v))
    same(Layer(0.5)(*qkv), attend(q * 0.5, k, v))


def test_keyword_arguments_and_trees(qkv):
    def function(params, *, inputs):
        return {"out": [attend(inputs["q"], *params)]}

    wrapped = optimized(function, require={"attention": 1})
    q, k, v = qkv
    result = wrapped((k, v), inputs={"q": q})
    same(result["out"][0], attend(*qkv))
    gradients = jax.grad(lambda p: wrapped(p, inputs={"q": q})["out"][0].sum())((k, v))
    same(gradients, jax.grad(lambda p: attend(q, *p).sum())((k, v)), 3e-5)


def test_static_arguments_of_an_existing_jit(qkv):
    @functools.partial(jax.jit, static_argnames="repeats", static_argnums=3)
    def function(q, k, v, name, repeats=1):
        assert isinstance(name, str)
        for _ in range(repeats):
            q = attend(q, k, v)
        return q

    wrapped = optimized(function)
    same(wrapped(*qkv, "name", repeats=2), function(*qkv, "name", repeats=2))
    assert wrapped.report().counts()["attention"] == 2
    wrapped(*qkv, "name")
    assert wrapped.report().counts()["attention"] == 1


@jax.tree_util.register_pytree_node_class
class Sizes:
    """Has an array among its leaves, and something beside them; jit takes it as a static argument."""

    def __init__(self, scale, name=None):
        self.scale, self.name = scale, name

    def tree_flatten(self):
        return (self.scale,), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)

    def __eq__(self, other):
        return isinstance(other, Sizes) and self.name == other.name

    def __hash__(self):
        return hash(self.name)


@pytest.mark.parametrize(
    ("use", "fixed"),
    [
        (lambda x, n: jnp.zeros(n) + x[0], np.int64(4)),
        (lambda x, n: x * 2 if n > 0.4 else x, np.float32(0.5)),
        (lambda x, n: x.reshape(n), tuple(np.array([3, 1]))),
        (lambda x, n: x * (float(n.scale) + len(n.name)), Sizes(np.float32(2), "name")),
        (lambda x, n: x * (float(n.scale) + len(n.name)), Sizes(jnp.float32(2), "name")),
    ],
    ids=["size", "compared", "sizes", "object", "object with an array"],
)
def test_a_static_argument_stays_what_it_is(use, fixed):
    """Whatever it is made of: a number of NumPy was traced, and an object taken apart."""
    x = jnp.arange(3.0)
    wrapped = optimized(jax.jit(use, static_argnums=1))
    for _ in range(2):
        same(wrapped(x, fixed), use(x, fixed))


@pytest.mark.parametrize("use", ["static", "donate"])
@pytest.mark.parametrize(("numbers", "names"), [((0,), ()), ((), ("x",)), ((0,), ("x",)), ((0,), ("y",))])
def test_an_argument_is_static_or_donated_as_jit_was_told_by_number_and_by_name(use, numbers, names):
    traced = []

    def function(x, y):
        traced.append([isinstance(one, jax.core.Tracer) for one in (x, y)])
        return x + y, x * y

    jitted = jax.jit(function, **{f"{use}_argnums": numbers, f"{use}_argnames": names})

    def told(called, by_name):
        x, y = (1, 2) if use == "static" else (jnp.ones(3), jnp.ones(3))
        called(x, y=y) if not by_name else called(x=x, y=y)
        return traced[-1] if use == "static" else [x.is_deleted(), y.is_deleted()]

    for by_name in (False, True):
        assert told(optimized(jitted), by_name) == told(jitted, by_name)


def test_donated_arguments_of_an_existing_jit(qkv):
    function = jax.jit(lambda q, k, v: attend(q, k, v), donate_argnums=0)
    wrapped = optimized(function, require={"attention": 1})
    q = jnp.array(qkv[0])
    result = wrapped(q, *qkv[1:])
    assert q.is_deleted()
    same(result, attend(*qkv))


def test_the_api_of_jit(qkv):
    wrapped = optimized()
    lowered = wrapped.lower(*qkv)
    same(lowered.compile()(*qkv), attend(*qkv))
    assert wrapped.eval_shape(*qkv).shape == (1, 2, T, D)
    assert "autopallas_site" in primitives(wrapped.trace(*qkv).jaxpr)
    assert wrapped.__wrapped__ is attend
    assert wrapped.__name__ == "attend"
    wrapped(*qkv)
    wrapped.clear_cache()
    same(wrapped(*qkv), attend(*qkv))


def test_the_shardings_of_an_existing_jit(qkv):
    mesh = Mesh(jax.devices()[:1], ("heads",))
    spread, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "heads"), ()))
    wrapped = optimized(jax.jit(attend, in_shardings=(spread, whole, whole), out_shardings=spread))
    compiled = wrapped.lower(*qkv).compile()
    assert compiled.input_shardings[0][0].is_equivalent_to(spread, 4)
    result = wrapped(*qkv)
    assert result.sharding.is_equivalent_to(spread, 4)
    assert result.sharding.mesh.axis_names == ("heads",)
    same(result, attend(*qkv))


@optimized
def decorated(q, k, v):
    return attend(q, k, v)


def test_pickled_by_name_or_with_the_function_within(qkv):
    assert pickle.loads(pickle.dumps(decorated)) is decorated
    again = pickle.loads(pickle.dumps(optimized(require={"attention": 1})))
    same(again(*qkv), attend(*qkv))
    assert again.report().counts()["attention"] == 1
    assert copy.deepcopy(again) is not again


def test_a_signature_is_traced_once(qkv):
    traced = []

    def function(q, k, v):
        traced.append(q.shape)
        return attend(q, k, v)

    wrapped = optimized(function)
    for _ in range(3):
        wrapped(*qkv)
    assert len(traced) == 1
    wrapped(qkv[0][..., :2], qkv[1][..., :2], qkv[2])
    assert len(traced) == 2


def test_what_is_not_replaced_keeps_its_lines_and_scopes(qkv):
    def function(q, k, v):
        with jax.named_scope("ours"):
            return jnp.tanh(attend(jnp.sin(q), k, v))

    program = optimized(function).trace(*qkv).jaxpr
    for name in ("sin", "tanh"):
        (equation,) = [e for e in jaxprs.open_jaxpr(program)[0].eqns if e.primitive.name == name]
        assert "test_calls.py" in jaxprs.location(equation)
        assert "ours" in jaxprs.name_stack(equation)


class Attention:
    def __init__(self, scale):
        self.scale = scale

    @functools.partial(jax.jit, static_argnums=(0, 4))
    def of_object(self, q, k, v, power=1):
        return attend(q * self.scale**power, k, v)

    @functools.partial(jax.jit, static_argnames=("self", "power"))
    def by_name(self, q, k, v, *, power=1):
        return attend(q * self.scale**power, k, v)

    @classmethod
    @functools.partial(jax.jit, static_argnums=0)
    def of_class(cls, q, k, v, power=1):
        return attend(q * power, k, v)

    @autopallas.optimize(objective="memory")
    @functools.partial(jax.jit, static_argnums=0)
    def optimized(self, q, k, v, power=1):
        return attend(q * self.scale**power, k, v)


@pytest.mark.parametrize("name", ["of_object", "by_name", "of_class", "optimized"])
def test_a_method_that_jit_made_is_given_its_object(qkv, name):
    for instance in (Attention(0.5), Attention(0.25)):
        method = getattr(instance, name)
        wrapped = optimized(method)
        same(wrapped(*qkv), method(*qkv))
        same(wrapped(*qkv, power=2), method(*qkv, power=2))
        assert wrapped.report().counts()["attention"] == 1
        assert autopallas.explain(method, *qkv).sites[0].op == "attention"
        assert autopallas.verify(wrapped, *qkv).ok


def test_a_method_that_jit_made_reads_the_object_of_each_call(qkv):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Scaled:
        scale: jax.Array

        @jax.jit
        def attend(self, q, k=qkv[1], v=qkv[2]):
            return attend(q * self.scale, k, v)

    scaled = Scaled(jnp.asarray(0.5))
    wrapped = optimized(scaled.attend)
    same(wrapped(qkv[0]), scaled.attend(qkv[0]))
    scaled.scale = jnp.asarray(0.25)
    same(wrapped(qkv[0]), scaled.attend(qkv[0]))


class Doubled:
    def __call__(self, x):
        return 2 * x


class Holder:
    """Holds what is bound to no instance, beside a function, which is."""

    of_object = autopallas.optimize(Doubled())
    of_partial = autopallas.optimize(functools.partial(jnp.multiply, 3))
    of_method = autopallas.optimize(Doubled().__call__)

    @autopallas.optimize
    @staticmethod
    def of_none(x):
        return 4 * x

    @autopallas.optimize
    def of_instance(self, x):
        return 5 * x


@pytest.mark.parametrize(
    ("name", "factor"),
    [("of_object", 2), ("of_partial", 3), ("of_method", 2), ("of_none", 4), ("of_instance", 5)],
)
def test_an_attribute_of_a_class_is_bound_as_the_function_would_be(name, factor):
    x = jnp.arange(3.0)
    same(getattr(Holder(), name)(x), factor * x)


@pytest.mark.parametrize("copied", [False, True], ids=["attributes by name", "attributes copied"])
def test_what_has_the_attributes_of_a_jit_function_runs_its_own_code(qkv, copied):
    class Negated:
        def __init__(self, function):
            self.function = function
            if copied:
                functools.update_wrapper(self, function)

        def __getattr__(self, name):
            return getattr(self.function, name)

        def __call__(self, *arguments):
            return -self.function(*arguments)

    negated = Negated(jax.jit(attend))
    same(optimized(negated)(*qkv), negated(*qkv))


def test_attributes_of_an_object_take_the_place_of_no_method(qkv):
    """What an object is called with, it may call a report, too."""

    class Layer:
        def __init__(self):
            self.report = self.lower = self._traced = self._plain = self._called = True
            self.scale = 0.5

        def __call__(self, q, k, v):
            return attend(q * self.scale, k, v)

    wrapped = optimized(Layer())
    same(wrapped(*qkv), Layer()(*qkv))
    assert wrapped.scale == 0.5
    assert wrapped.report().counts()["attention"] == 1
    assert autopallas.explain(Layer(), *qkv).sites[0].op == "attention"
    assert wrapped.lower(*qkv).out_info.shape == qkv[0].shape


def test_functions_that_call_one_another_twice_are_left_where_they_would_be_millions_of_equations():
    """Each of 40 functions calls the one before it twice, and is traced once."""

    def calls(function):
        return jax.jit(lambda x: function(function(x) + 1))

    function = jax.jit(lambda x: jnp.tanh(x @ x))
    for _ in range(40):
        function = calls(function)
    looped = autopallas.optimize(lambda x: jax.lax.scan(lambda x, _: (function(x), None), x, None, 10)[0])
    assert looped.eval_shape(jax.ShapeDtypeStruct((4, 4), jnp.float32)).shape == (4, 4)
    assert "where each call is written out" in looped.report().notes[0]


def test_layers_that_share_a_function_are_not_too_many():
    layer = jax.jit(lambda x: jnp.tanh(x @ x))

    def function(x):
        return layer(layer(x)) + jax.lax.fori_loop(0, 3, lambda _, x: layer(x), x)

    written, flat = sizes(jax.make_jaxpr(function)(jnp.ones((4, 4))))
    assert (written, flat) == (8, 12)


def _of_values(x):
    return x if x.sum() > 0 else -x


def _that_fails(x):
    raise ValueError("always")


@pytest.mark.parametrize(
    ("function", "further"),
    [
        (lambda x: x * 2, ()),
        (jax.jit(lambda x: x * 2), ()),
        (lambda x, text: x * len(text), ("ab",)),
        (lambda x, number: x if number > 0 else -x, (3,)),
        (lambda x, thing: x * 2, (object(),)),
        (_of_values, ()),
        (_that_fails, ()),
    ],
    ids=["traced", "jit", "text", "number", "object", "as it is", "error"],
)
def test_what_is_not_used_any_more_is_gone_without_the_garbage_collector(function, further):
    """What jit compiled takes a megabyte, and the collector does not know of it."""
    wrapped, x = autopallas.optimize(function), jnp.ones(3)
    kept = [weakref.ref(wrapped), weakref.ref(x)]
    gc.collect()
    gc.disable()
    try:
        with warnings.catch_warnings(), contextlib.suppress(ValueError):
            warnings.simplefilter("ignore", autopallas.AutopallasWarning)
            jax.block_until_ready(wrapped(x, *further))
            jax.block_until_ready(wrapped(x + 1, *further))
        del x
        assert kept[1]() is None
        del wrapped
        assert kept[0]() is None
    finally:
        gc.enable()
