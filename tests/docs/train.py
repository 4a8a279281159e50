"""What the pages' commands run: a user's script."""

import jax
import jax.numpy as jnp
from model import attend


def step(x, labels):
    logits = attend(x, x + 1, x) @ x.T
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1))


if __name__ == "__main__":
    print(jax.jit(attend)(*[jnp.ones((32, 8))] * 3).shape)
