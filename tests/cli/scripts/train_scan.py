"""Trains a small model in plain JAX: a scan over layers with checkpoints, compiled ahead of time."""

import jax
import jax.numpy as jnp


def layer(x, parameters):
    q, k, v = (jnp.einsum("btd,dnh->btnh", x, parameters[name]) for name in "qkv")
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / q.shape[-1] ** 0.5
    mask = jnp.arange(x.shape[1])[:, None] >= jnp.arange(x.shape[1])
    attended = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.where(mask, scores, -1e30)), v)
    return x + jnp.einsum("btnh,nhd->btd", attended, parameters["o"]), None


def loss(parameters, tokens):
    x = parameters["embedding"][tokens[:, :-1]]
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, parameters["layers"])
    logits = x @ parameters["embedding"].T
    picked = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def step(parameters, tokens):
    value, gradients = jax.value_and_grad(loss)(parameters, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), value


def main():
    keys = iter(jax.random.split(jax.random.key(0), 6))
    shapes = {"q": (3, 32, 4, 8), "k": (3, 32, 4, 8), "v": (3, 32, 4, 8), "o": (3, 4, 8, 32)}
    layers = {name: 0.2 * jax.random.normal(next(keys), shape) for name, shape in shapes.items()}
    parameters = {"embedding": jax.random.normal(next(keys), (48, 32)) * 0.2, "layers": layers}
    tokens = jax.random.randint(next(keys), (2, 17), 0, 48)
    compiled = jax.jit(step, donate_argnums=0).lower(parameters, tokens).compile()
    for _ in range(3):
        parameters, value = compiled(parameters, tokens)
        print(f"loss {value:.4f}")


if __name__ == "__main__":
    main()
