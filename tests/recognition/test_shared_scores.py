"""Two softmaxes along different axes of one product: each, with the product that follows it, is an attention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.nn import gelu, log_softmax, softmax
from support.catalogue import array
from support.compare import compare, optimized_like_a_user, with_gradients

import autopallas
from autopallas import jaxprs

B, H, T, S, D, E = 2, 2, 6, 7, 4, 3
SIDES = ((B, H, T, D), (B, H, S, D), (B, H, T, D), (B, H, S, D))
SLOTS = ((B, T, D), (D, E, 2), (E, D, 5), (E, 5, D))
LAYERS = ((B, T, D), *((2, *shape) for shape in SLOTS[1:]))


def arguments(shapes, dtype=jnp.float32):
    return [array(*shape, dtype=dtype, seed=seed + 1, scale=0.7) for seed, shape in enumerate(shapes)]


def both_sides(a, b, of_a, of_b):
    z = jnp.einsum("bhtd,bhsd->bhts", a, b)
    return jnp.einsum("bhts,bhsd->bhtd", softmax(z, -1), of_b), jnp.einsum("bhts,bhtd->bhsd", softmax(z, -2), of_a)


def of_the_transposed_scores(a, b, of_a, of_b):
    z = jnp.matmul(a * 0.8, (b * 0.8).mT)
    back = softmax(z.mT, -1)
    return jnp.concatenate([softmax(z, -1) @ of_b, back @ of_a], 2)


def masked_and_scaled(a, b, of_a, of_b):
    seen = (jnp.arange(T) < 5)[:, None] & (jnp.arange(S) != 2)
    z = jnp.where(seen, a @ b.mT * 0.5, -1e9)
    return softmax(z, -1) @ of_b, softmax(z, -2).mT @ of_a


def with_a_bias(a, b, of_a, of_b):
    z = a @ b.mT + of_a.sum(-1)[..., None]
    return softmax(z, -1) @ of_b, softmax(z, -2).mT @ a


def values_of_the_other(a, b, of_a, of_b):
    """The first one's result makes the second one's values."""
    z = a @ b.mT
    seen = softmax(z, -2).mT @ of_a
    return softmax(z, -1) @ jnp.tanh(seen + of_b)


def slots(x, phi, first, second):
    z = jnp.einsum("btd,des->btes", x, phi)
    given = jnp.einsum("btes,btd->besd", softmax(z, 1), x)
    given = jnp.einsum("besf,efd->besd", gelu(jnp.einsum("besd,edf->besf", given, first)), second)
    return jnp.einsum("btes,besd->btd", softmax(z.reshape(B, T, -1), -1).reshape(z.shape), given)


def slots_of_a_step(x, phi, first, second):
    """One example at a time, with maxima that are differentiated."""

    def normalised(z, axes):
        e = jnp.exp(z - z.max(axes, keepdims=True))
        return e / e.sum(axes, keepdims=True)

    def example(x):
        z = jnp.einsum("td,des->tes", x, phi)
        given = jnp.einsum("tes,td->esd", normalised(z, 0), x)
        given = jnp.tanh(given @ first) @ second
        return jnp.einsum("tes,esd->td", normalised(z, (1, 2)), given)

    return jax.vmap(example)(x)


def layers(layer):
    return lambda x, *parameters: lax.scan(lambda x, own: (x + layer(x, *own), None), x, parameters)[0]


FOUND = {
    "both sides": (both_sides, SIDES),
    "of the transposed scores": (of_the_transposed_scores, SIDES),
    "masked and scaled": (masked_and_scaled, SIDES),
    "with a bias": (with_a_bias, SIDES),
    "values of the other": (values_of_the_other, SIDES),
    "slots": (slots, SLOTS),
    "slots of a step": (slots_of_a_step, SLOTS),
    "layers of slots": (layers(slots), LAYERS),
    "checkpointed layers of slots": (layers(jax.checkpoint(slots)), LAYERS),
}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FOUND)
def test_each_softmax_with_its_product_is_a_site(name, dtype):
    function, shapes = FOUND[name]
    compared = compare(function, arguments(shapes, dtype), gradients=False)
    assert compared.complaints == []
    assert compared.counts() == 2
    assert {site.direction for site in compared.report.sites} == {"forward"}


@pytest.mark.parametrize("name", FOUND)
def test_in_a_train_step_each_is_a_site_with_its_backward(name):
    function, shapes = FOUND[name]
    args = arguments(shapes)
    compared = compare(with_gradients(function, args), args, gradients=False)
    assert compared.complaints == []
    found = [site.direction for site in compared.report.sites if site.op == "attention"]
    assert found == ["forward+backward"] * 2


def test_bfloat16_gradients_are_as_exact_as_the_program():
    args = arguments(SLOTS, jnp.bfloat16)
    assert compare(with_gradients(slots, args), args, gradients=False).complaints == []


def test_all_axes_of_one_size():
    args = arguments([(4, 4, 4)] * 4)

    def attend(a, b, of_a, of_b):
        z = a @ b.mT
        return softmax(z, -1) @ of_b + softmax(z.mT, -1) @ of_a

    compared = compare(with_gradients(attend, args), args, gradients=False)
    assert compared.complaints == []
    assert compared.counts() == 2


# --- What looks alike ------------------------------------------------------------------------------------------------


def product_of_both(a, b, of_a, of_b):
    z = a @ b.mT
    return (softmax(z, -1) * softmax(z, -2)) @ of_b


def scores_are_needed(a, b, of_a, of_b):
    z = a @ b.mT
    return softmax(z, -1) @ of_b, softmax(z, -2).mT @ of_a, z.sum()


def probabilities_are_needed(a, b, of_a, of_b):
    z = a @ b.mT
    back = softmax(z, -2)
    return softmax(z, -1) @ of_b, back.mT @ of_a, back.max(-1)


def probabilities_turned(a, b, of_a, of_b):
    seen = softmax(a @ b.mT, -1)
    return seen @ of_b, seen.mT @ of_a


def one_axis_twice(a, b, of_a, of_b):
    z = a @ b.mT
    return softmax(z, -1) @ of_b, softmax(2 * z, -1) @ b


def gradient_of_one_is_stopped(a, b, of_a, of_b):
    z = a @ b.mT
    return softmax(z, -1) @ of_b, lax.stop_gradient(softmax(z, -2)).mT @ of_a


@pytest.mark.parametrize(
    "function", [product_of_both, scores_are_needed, probabilities_are_needed, probabilities_turned, one_axis_twice]
)
@pytest.mark.parametrize("differentiated", [False, True])
def test_what_looks_alike_stays(function, differentiated):
    args = arguments(SIDES)
    compared = compare(with_gradients(function, args) if differentiated else function, args, gradients=False)
    assert compared.complaints == []
    assert compared.counts() == 0


def test_what_is_differentiated_through_one_alone_is_right():
    args = arguments(SIDES)
    assert compare(with_gradients(gradient_of_one_is_stopped, args), args, gradients=False).complaints == []


def test_a_loss_of_rows_and_columns_is_no_attention():
    def loss(a, b):
        z = a @ b.T
        own = jnp.arange(T)
        return -(log_softmax(z, 0)[own, own] + log_softmax(z, 1)[own, own]).mean()

    compared = compare(jax.value_and_grad(loss, (0, 1)), arguments([(T, D), (T, D)]), gradients=False)
    assert compared.complaints == []
    assert (compared.counts(), compared.counts("cross_entropy")) == (0, 1)


# --- The plan --------------------------------------------------------------------------------------------------------


def products(program):
    found, todo = 0, [program]
    while todo:
        for equation in jaxprs.open_jaxpr(todo.pop())[0].eqns:
            found += equation.primitive.name == "dot_general"
            todo += [] if "site" in equation.primitive.name else [inner for _, _, inner in jaxprs.bodies(equation)]
    return found


def test_measurements_of_single_attentions_are_no_evidence():
    args = arguments(SLOTS)
    sites = [site for site in autopallas.explain(slots, *args).sites if site.op == "attention"]
    assert [site.verdict for site in sites] == ["kept", "kept"]
    assert all("which the program computes once" in site.reason for site in sites)


def test_where_one_of_both_is_kept_no_product_is_added():
    args = arguments(SLOTS)
    step = with_gradients(slots, args)
    optimized = optimized_like_a_user(step, fuel=1)
    assert products(jax.make_jaxpr(optimized)(*args)) <= products(jax.make_jaxpr(step)(*args))
