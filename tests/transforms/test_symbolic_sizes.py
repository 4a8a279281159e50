"""Programs that are exported for several sizes, of which tracing knows an expression alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import autopallas


def attend(q, k, v):
    return jax.nn.softmax(q @ k.T) @ v


def loss(x, w, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], -1).mean()


def arrays(*shapes):
    random = np.random.default_rng(0)
    return tuple(random.standard_normal(shape).astype("float32") for shape in shapes)


LABELS = np.arange(5, dtype=np.int32)
PROGRAMS = {
    "attention": (attend, arrays((5, 4), (6, 4), (6, 4))),
    "cross_entropy": (loss, (*arrays((5, 4), (4, 7)), LABELS)),
}


def gradient(function):
    return jax.grad(lambda *args: jnp.sum(function(*args)))


def exported(function, args, symbolic):
    """The function's results, exported for any size of the first axis of the arguments at the places ``symbolic``."""
    (size,) = export.symbolic_shape("n")
    shapes = [(size, *x.shape[1:]) if i in symbolic else x.shape for i, x in enumerate(args)]
    types = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, args, strict=True)]
    return export.export(jax.jit(function))(*types).call(*args)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_of_unknown_sizes_stays_and_says_why(name):
    function, args = PROGRAMS[name]
    symbolic = [i for i, x in enumerate(args) if x.shape[0] == 5]
    run = autopallas.optimize(gradient(function), objective="always", strict=True)
    np.testing.assert_array_equal(exported(run, args, symbolic), exported(gradient(function), args, symbolic))
    report = run.report()
    assert report.notes == ("the program stays as it was: kernels are chosen by sizes, and n is not known",)
    assert report.failures == ()


@pytest.mark.parametrize("name", PROGRAMS)
def test_vmap_over_an_unknown_number_of_examples(name):
    function, args = PROGRAMS[name]
    args = tuple(np.stack([x, x[::-1]]) for x in args)
    run = autopallas.optimize(function, objective="always", strict=True)
    found, wanted = (exported(gradient(jax.vmap(f)), args, range(len(args))) for f in (run, function))
    np.testing.assert_array_equal(found, wanted)
    (site,) = run.report().sites
    assert (site.verdict, site.reason) == ("kept", "kernels are chosen by sizes, and n is not known")
