"""What a function that cannot be traced holds besides its arguments is what it was when it is called as it is."""

from __future__ import annotations

import collections
import functools
import itertools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopallas
from autopallas import compat

X = jnp.arange(3.0)


class Model:
    """Counts its calls, and is taken apart while another function is traced."""

    def __init__(self):
        self.calls, self.log, self.scale, self.parts = 0, [], 2.0, {}

    def choose(self, x):
        self.calls += 1
        self.log.append(x)
        self.parts["x"] = x
        if isinstance(x, jax.core.Tracer):
            vars(self).clear()
            raise RuntimeError("a model may not change while it is traced")
        return x * self.scale

    __call__ = choose


MODEL = Model()


def closure(model):
    return lambda x: model.choose(x)


HOLDERS = {
    "method": lambda model: model.choose,
    "object": lambda model: model,
    "partial": lambda model: functools.partial(Model.choose, model),
    "closure": closure,
}


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.every_case
@pytest.mark.parametrize("name", HOLDERS)
def test_an_object_that_a_trace_took_apart_is_put_together_again(name):
    model = Model()
    function = autopallas.optimize(HOLDERS[name](model))
    for calls in (1, 2):
        assert jnp.array_equal(function(X), X * 2)
        if name != "closure":  # others may change beside the trace
            assert model.calls == len(model.log) == calls
        assert model.scale == 2.0


@pytest.mark.filterwarnings("ignore:autopallas runs")
def test_an_object_that_a_function_reads_by_a_global_name():
    function = autopallas.optimize(lambda x: MODEL.choose(x))
    assert jnp.array_equal(function(X), X * 2)
    assert MODEL.scale == 2.0


@pytest.mark.filterwarnings("ignore:autopallas runs")
def test_arguments_of_a_function_that_returns_a_text_are_changed_once():
    def function(model, x):
        model.calls += 1
        return x, "text"

    model = Model()
    autopallas.optimize(function)(model, X)
    assert model.calls == 1


class Stateful:
    """Keeps what it computes, as a solver or a network that counts its steps does."""

    def __init__(self):
        self.weight, self.steps, self.seen = jnp.ones(()), 0, []

    def __call__(self, x):
        self.weight, self.steps = self.weight * x.sum(), self.steps + 1
        self.seen.append(self.weight)
        return x * self.weight + len(self.seen)

    def count(self, x):
        self.steps += 1
        return x * self.steps


STATEFUL = {
    "object": Stateful,
    "method": lambda: Stateful().__call__,
    "number": lambda: Stateful().count,
    "partial": lambda: functools.partial(Stateful.count, Stateful()),
}


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.every_case
@pytest.mark.parametrize("name", STATEFUL)
def test_what_a_function_keeps_for_its_next_call_is_not_lost(name):
    given, wanted = autopallas.optimize(STATEFUL[name]()), STATEFUL[name]()
    for _ in range(3):
        assert jnp.array_equal(given(X), wanted(X))
    assert "which would be lost" in given.report().failures[0].error


class WithJit(Stateful):
    """Keeps what a jit function gives it."""

    def __init__(self):
        super().__init__()
        self.jitted = jax.jit(lambda weight, x: weight * x)

    def __call__(self, x):
        result = self.jitted(self.weight, x)
        self.weight = self.weight * x.sum()
        return result


def test_an_object_that_holds_a_jit_function_keeps_arrays():
    given, wanted, held = autopallas.optimize(model := WithJit()), WithJit(), None
    for _ in range(3):
        assert jnp.array_equal(given(X), wanted(X))
        held = model.weight
    assert jnp.array_equal(held, wanted.weight)


class Lazy:
    """Computes in its first call what later ones find."""

    def __init__(self):
        self.scale, self.masks, self.width = 0.5, {}, 0

    @functools.cached_property
    def square(self):
        return jnp.ones((3, 3)) @ jnp.full((3, 3), 2.0)

    def __call__(self, x):
        self.scale, self.width = 1 / (len(x) + 1) ** 0.5, len(x)
        if len(x) not in self.masks:
            self.masks[len(x)] = jnp.tril(jnp.ones((len(x), len(x))))
        return self.masks[len(x)] @ self.square @ x * self.scale


@pytest.mark.parametrize("make", [Lazy, lambda: Lazy().__call__], ids=["object", "method"])
def test_a_function_whose_first_call_computes_what_later_ones_find_is_compiled_from_the_second_on(make):
    given, wanted = autopallas.optimize(make()), make()
    x = jnp.arange(1.0, 4)
    for _ in range(3):
        assert jnp.allclose(given(x), wanted(x), rtol=1e-6)  # in another order of products
    assert not given._runs_as_it_is
    assert not given.report().failures


class InContainers:
    """Keeps what it computes in containers that it makes anew."""

    def __init__(self):
        self.tuple, self.mapping, self.list = (jnp.ones(()), 0), {"w": jnp.ones(())}, [jnp.ones(())]

    def __call__(self, x):
        self.tuple = self.tuple[0] + x.sum(), self.tuple[1] + 1
        self.mapping = {"w": self.mapping["w"] + x.sum()}
        self.list = [self.list[0] * 2]
        return x * self.tuple[0] + self.mapping["w"] * self.list[0] + self.tuple[1]


def element_of_a_list():
    held = [jnp.ones(())]

    def function(x):
        held[0] = held[0] + x.sum()
        return x * held[0]

    return function


def closed_over_containers():
    model = InContainers()
    return lambda x: model(x)


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.parametrize("make", [InContainers, closed_over_containers, element_of_a_list])
def test_what_a_function_keeps_in_containers_is_not_lost(make):
    given, wanted = autopallas.optimize(make()), make()
    for _ in range(3):
        assert jnp.array_equal(given(X), wanted(X))


class Changing:
    """Keeps other things for its next call than numbers and arrays in attributes."""

    def __init__(self):
        self.seen, self.log, self.found, self.last = set(), [], {}, collections.deque(maxlen=2)
        self.table, self.random, self.mode, self.on = np.zeros(3), np.random.default_rng(0), "a", None
        self.left = collections.Counter()

    def with_a_set(self, x):
        self.seen.add(len(self.seen))
        return x * len(self.seen)

    def with_a_list(self, x):
        self.log.append("called")
        return x * len(self.log)

    def with_a_list_made_anew(self, x):
        self.log = [*self.log, 1]
        return x * len(self.log)

    def with_a_stack(self, x):
        self.log = self.log or [1.0, 2.0, 3.0, 4.0]
        return x * self.log.pop()

    def with_a_dictionary(self, x):
        self.found[len(self.found)] = 1
        return x * len(self.found)

    def with_a_counter(self, x):
        self.left["calls"] -= 1
        return x * self.left["calls"]

    def with_a_queue(self, x):
        self.last.append(sum(self.last) + 1)
        return x * sum(self.last)

    def with_a_new_attribute(self, x):
        self.count = getattr(self, "count", 0) + 1
        return x * self.count

    def with_a_text(self, x):
        self.mode = "b" if self.mode == "a" else "a"
        return x * (2 if self.mode == "a" else 3)

    def with_a_flag(self, x):
        self.on = not self.on
        return x * (2 if self.on else 3)

    def with_nothing(self, x):
        self.on = object() if self.on is None else None
        return x * (2 if self.on is None else 3)

    def with_an_array_of_numpy(self, x):
        self.table += 1
        return x * self.table

    def with_random_numbers(self, x):
        return x * self.random.integers(100)


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.parametrize("name", [name for name in vars(Changing) if name.startswith("with")])
def test_whatever_an_object_keeps_for_its_next_call_is_not_lost(name):
    """What a trace changed was the object's from then on, and no later call changed it again."""
    given, wanted = autopallas.optimize(getattr(Changing(), name)), getattr(Changing(), name)
    for _ in range(4):
        assert jnp.array_equal(given(X), wanted(X))
    assert "which would be lost" in given.report().failures[0].error


class Scoped:
    """Takes names in a scope, and is given another scope at the end, as the modules of a library are."""

    def __init__(self):
        self.scope, self.used = collections.defaultdict(set), {}

    def __call__(self, x):
        self.used["layer"] = 1
        assert "layer" not in self.scope["names"]
        self.scope["names"].add("layer")
        self.scope, self.used = collections.defaultdict(set), {}
        return x * 2


def test_an_object_that_puts_in_order_what_it_used_is_compiled():
    given = autopallas.optimize(Scoped())
    for _ in range(3):
        assert jnp.array_equal(given(X), X * 2)
    assert not given._runs_as_it_is
    assert not given.report().failures


@pytest.mark.filterwarnings("ignore:autopallas runs")
def test_the_scope_of_an_object_is_put_together_again():
    scoped = Scoped()
    given = autopallas.optimize(functools.partial(lambda scoped, x: (scoped(x), "a text"), scoped))
    for _ in range(2):
        assert jnp.array_equal(given(X)[0], X * 2)


LOG = []
LAST = None


def in_a_global_list(x):
    LOG.append(jnp.sin(x))
    return x * len(LOG)


def in_a_global_variable(x):
    global LAST
    before, LAST = LAST, jnp.sin(x)
    return x if before is None else x * before


def keeping(write):
    """Returns a function that keeps what it computes by ``write(held, value)``."""
    held = {"list": [], "dictionary": {}}

    def function(x):
        value = jnp.sum(x) + len(held["list"]) + len(held["dictionary"])
        write(held, value)
        return x * value

    return function


def in_a_variable():
    last = None

    def function(x):
        nonlocal last
        before, last = last, jnp.sin(x)
        return x if before is None else x * before

    return function


KEEPING = {
    "list": lambda: keeping(lambda held, value: held["list"].append(value)),
    "dictionary": lambda: keeping(lambda held, value: held["dictionary"].update({len(held["dictionary"]): value})),
    "variable": in_a_variable,
    "global list": lambda: LOG.clear() or in_a_global_list,
    "global variable": lambda: globals().update(LAST=None) or in_a_global_variable,
}


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.parametrize("name", KEEPING)
def test_what_a_function_keeps_in_what_it_closes_over_is_not_lost(name):
    """What was traced stood in the list from then on, of no use to anybody, and no later call added to it."""
    function = KEEPING[name]()
    wanted = [function(X) for _ in range(3)]
    wrapped = autopallas.optimize(KEEPING[name]())
    for one in wanted:
        assert jnp.array_equal(wrapped(X), one)
    assert not any(map(compat.is_tracer, [*LOG, LAST]))


JOBS = {"first": 1, "second": 2}


@pytest.mark.filterwarnings("ignore:autopallas runs")
def test_a_global_dictionary_is_given_nothing_back_that_others_took():
    def function(x):
        JOBS.pop("first", None)  # as another thread may do meanwhile
        LOG.append(jnp.sin(x))
        return x, "a text"

    autopallas.optimize(function)(X)
    assert JOBS == {"second": 2}
    assert not any(map(compat.is_tracer, LOG))


COUNT = 0


def with_a_global_number(x):
    global COUNT
    COUNT += 1
    return x * COUNT


def with_a_number_around_it():
    count = 0

    def function(x):
        def inner():
            nonlocal count
            count += 1

        inner()
        return x * count

    return function


class WithSlots:
    __slots__ = ("count", "log")

    def __init__(self):
        self.count, self.log = 0, []

    def step(self, x):
        self.count += 1
        self.log.append(1)
        return x * self.count * len(self.log)


class OfClass:
    count = 0

    @classmethod
    def step(cls, x):
        cls.count += 1
        return x * cls.count

    def of_instance(self, x):
        type(self).count += 1
        return x * self.count


NUMBERS = {
    "global": lambda: globals().update(COUNT=0) or with_a_global_number,
    "closed over": with_a_number_around_it,
    "slots": lambda: WithSlots().step,
    "class": lambda: setattr(OfClass, "count", 0) or OfClass.step,
    "class of an instance": lambda: setattr(OfClass, "count", 0) or OfClass().of_instance,
}


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_that_a_function_gives_another_value_in_each_call_is_not_lost(name):
    function = NUMBERS[name]()
    wanted = [function(X) for _ in range(4)]
    wrapped = autopallas.optimize(NUMBERS[name]())
    for one in wanted:
        assert jnp.array_equal(wrapped(X), one)
    assert "which would be lost" in wrapped.report().failures[0].error


def with_a_default():
    def function(x, memo={}):  # noqa: B006
        if "mask" not in memo:
            memo["mask"] = jnp.tril(jnp.ones((3, 3)))
        return memo["mask"] @ x

    return function


def with_a_default_by_name():
    def function(x, *, memo=[]):  # noqa: B006
        memo.append(jnp.tril(jnp.ones((3, 3))))
        return memo[0] @ x * len(memo)

    return function


@functools.cache
def mask_of(size):
    return jnp.tril(jnp.ones((size, size)))


def with_a_function_that_keeps_its_results():
    mask_of.cache_clear()
    return lambda x: mask_of(3) @ x


def with_one_that_another_calls():
    mask = functools.lru_cache(lambda size: jnp.tril(jnp.ones((size, size))))

    def masked(x):
        return mask(3) @ x

    return lambda x: masked(x)


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.parametrize(
    "make",
    [
        with_a_default,
        with_a_default_by_name,
        with_a_function_that_keeps_its_results,
        with_one_that_another_calls,
    ],
)
def test_what_a_trace_keeps_for_other_calls_is_not_traced(make):
    """The trace of a second shape would find what the first one has left, which is of no use to anybody."""
    given, wanted = autopallas.optimize(make()), make()
    for x in (X, jnp.ones((3, 2)), X, jnp.ones((3, 4))):
        assert jnp.array_equal(given(x), wanted(x))
    if make is not with_a_default_by_name:
        assert not given._runs_as_it_is
    assert not compat.is_tracer(mask_of(3))


RANDOM = np.random.RandomState(0)


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.parametrize("name", ["closed over", "global", "of Python"])
def test_random_numbers_of_a_generator_that_a_function_reads_are_others_in_each_call(name):
    def make():
        numpy, python = np.random.default_rng(0), random.Random(0)
        RANDOM.seed(0)
        return {
            "closed over": lambda x: x + numpy.integers(100),
            "global": lambda x: x + RANDOM.randint(100),
            "of Python": lambda x: x + python.randrange(100),
        }[name]

    function = make()
    wanted = [function(X) for _ in range(4)]
    wrapped = autopallas.optimize(make())
    for one in wanted:
        assert jnp.array_equal(wrapped(X), one)


class Reader:
    def __init__(self):
        self.numbers = (n for n in range(9))

    def __call__(self, x):
        return x + next(self.numbers)

    def other(self, x):
        return x + 1


def with_an_iterator():
    numbers = itertools.count()
    return lambda x: x + next(numbers)


def with_keys():
    keys = iter(jax.random.split(jax.random.key(0), 9))
    return lambda x: x + jax.random.uniform(next(keys), x.shape)


@pytest.mark.filterwarnings("ignore:autopallas runs")
@pytest.mark.parametrize(
    "make",
    [Reader, with_an_iterator, with_keys, lambda: functools.partial(lambda it, x: x + next(it), iter([1, 2, 3]))],
)
def test_what_a_function_reads_of_an_iterator_is_something_else_in_each_call(make):
    given, wanted = autopallas.optimize(make()), make()
    for _ in range(3):
        assert jnp.array_equal(given(X), wanted(X))
    assert "reads an iterator" in given.report().failures[0].error


def test_a_method_that_does_not_read_the_iterator_of_its_object_is_compiled():
    given = autopallas.optimize(Reader().other)
    assert jnp.array_equal(given(X), X + 1)
    assert not given.report().failures


def test_functions_that_name_each_other_as_wrapped_are_looked_at_once():
    twice = functools.lru_cache(lambda n: 2 * n)
    twice.__wrapped__ = twice
    np.testing.assert_array_equal(autopallas.optimize(lambda x: x * twice(3))(X), X * 6)
