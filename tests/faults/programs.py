"""Small programs with one site each, the faults that are put into their kernels, and what has to hold after one."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

import autopallas
from autopallas.sites.calls import kernel_backward, kernel_forward
from autopallas.tuning import cache, probe_cache


def attention(query, key, value):
    return jax.nn.softmax(query @ key.T / 8, axis=-1) @ value


def cross_entropy(x, table, labels):
    logits = x @ table.T
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[:, None], -1)[:, 0])


def grouped_matmul(rows, weights, sizes):
    return jax.lax.ragged_dot(rows, weights, sizes)


def _operands(op: str) -> tuple[Any, ...]:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray[Any, Any]:
        return random.standard_normal(shape, np.float32)

    return {
        "attention": (normal(48, 32), normal(48, 32), normal(48, 32)),
        "cross_entropy": (normal(32, 16), normal(96, 16), np.arange(32, dtype=np.int32)),
        "grouped_matmul": (normal(32, 16), normal(3, 16, 24), np.array([10, 2, 20], np.int32)),
    }[op]


FORWARD = {"attention": attention, "cross_entropy": cross_entropy, "grouped_matmul": grouped_matmul}
OPERATIONS = tuple(FORWARD)


def gradient(op: str) -> Callable[..., Any]:
    """A train step of an operation: value and gradients."""
    return jax.value_and_grad(lambda *a: jnp.sum(FORWARD[op](*a) ** 2), argnums=(0, 1))


@dataclass
class Program:
    """A function, its arguments, and what it gives as it is written."""

    function: Callable[..., Any]
    operands: tuple[Any, ...]
    wanted: Any

    def same(self, result: Any) -> None:
        # 5e-5: what float32 gradients may differ by from those of the original.
        jax.tree.map(lambda r, w: np.testing.assert_allclose(r, w, rtol=5e-5, atol=5e-5), result, self.wanted)


def program(op: str = "attention", backward: bool = False) -> Program:
    return Program(gradient(op) if backward else FORWARD[op], _operands(op), _wanted(op, backward))


@functools.cache
def _wanted(op: str, backward: bool) -> Any:
    """Computed before any fault is let loose, and once: caches are cleared all the time here."""
    function = gradient(op) if backward else FORWARD[op]
    return jax.tree.map(np.asarray, jax.jit(function)(*_operands(op)))


def forget() -> None:
    """What a new process does not know: all but the disk."""
    cache._at.cache_clear()
    probe_cache._at.cache_clear()
    cache.WARNED.forget()
    kernel_forward.cache_clear()
    kernel_backward.cache_clear()
    jax.clear_caches()


@contextlib.contextmanager
def warned(times: int, *words: str) -> Iterator[None]:
    """That many warnings of this package, each with all words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    own = [str(w.message) for w in caught if issubclass(w.category, autopallas.AutopallasWarning)]
    assert len(own) == times, own
    for text in own:
        assert all(word in text for word in words), text


# ---------------------------------------------------------------------- faults in kernels

Fault = Callable[[jax.Array], jax.Array]


def break_kernel(monkeypatch: Any, op: str, name: str, fault: Fault) -> None:
    """Lets a fault loose on what a kernel gives: ``name`` is "forward" or "backward"."""
    module = importlib.import_module(f"autopallas.kernels.{op}.xla")
    real = getattr(module, name)

    def broken(*arguments: Any, **keywords: Any) -> Any:
        return jax.tree.map(fault, real(*arguments, **keywords))

    monkeypatch.setattr(module, name, broken)
    kernel_forward.cache_clear()
    kernel_backward.cache_clear()


def raises(error: Exception) -> Fault:
    def fault(x: jax.Array) -> jax.Array:
        raise error

    return fault


def longer(x: jax.Array) -> jax.Array:
    return jnp.concatenate([x.ravel(), jnp.zeros(1, x.dtype)])


def _primitive(name: str, lower: Callable[..., Any] | None) -> Fault:
    made = Primitive(name)
    made.def_abstract_eval(lambda x: x)
    if lower is not None:
        mlir.register_lowering(made, lower)
    return lambda x: made.bind(x)


def _no_memory(context: Any, x: Any) -> Any:
    raise MemoryError("RESOURCE_EXHAUSTED: lowering needs more than there is")


def _another_type(context: Any, x: Any) -> Any:
    wrong = jax.core.ShapedArray((*context.avals_in[0].shape, 2), np.dtype("float32"))
    return [mlir.lower_fun(lambda x: jnp.zeros(wrong.shape, wrong.dtype), False)(context, x)[0]]


unlowered = _primitive("faults_unlowered", None)
exhausted_lowering = _primitive("faults_exhausted", _no_memory)
mistyped = _primitive("faults_mistyped", _another_type)


def uncompilable(x: jax.Array) -> jax.Array:
    return jax.ffi.ffi_call("faults_no_such_target", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def _called_back(work: Callable[[Any], Any]) -> Fault:
    return lambda x: jax.pure_callback(work, jax.ShapeDtypeStruct(x.shape, x.dtype), x, vmap_method="sequential")


def _raise(error: Exception) -> Any:
    raise error


launch_fails = _called_back(lambda x: _raise(RuntimeError("the launch failed")))
run_fails = _called_back(lambda x: _raise(ArithmeticError("the run failed")))
run_exhausted = _called_back(lambda x: _raise(MemoryError("RESOURCE_EXHAUSTED: while it ran")))


def too_much(x: jax.Array) -> jax.Array:
    """Needs 64 TiB.  A callback makes a CPU's launch wait, so that the call itself fails."""
    return _called_back(lambda x: x)(too_much_unread(x))


def too_much_unread(x: jax.Array) -> jax.Array:
    """Needs 64 TiB, which a CPU says when the result is read: the launch does not wait."""
    huge = jax.lax.broadcasted_iota(jnp.float32, (2**22, 2**22), 1) * x.ravel()[0].astype(jnp.float32)
    return x + jnp.sort(huge, axis=1)[0, 0].astype(x.dtype)


def endless(x: jax.Array) -> jax.Array:
    """Never ends."""
    return x + jax.lax.while_loop(lambda c: c > -1, lambda c: jnp.abs(c) * 0.5, jnp.abs(x.ravel()[0])).astype(x.dtype)


def not_numbers(x: jax.Array) -> jax.Array:
    return x * jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else x


def doubled(x: jax.Array) -> jax.Array:
    return x * 2
