"""What a program is, for the benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax

__all__ = ["Built", "Platform", "Program", "images", "labels", "tokens", "train_step"]

Platform = Literal["cpu", "gpu"]

Built = tuple[Callable[..., Any], tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Program:
    """A model of a library, as that library has it, with arguments.

    Attributes:
      name: model, direction, sizes and dtype, to be read and to select by.
      packages: the distributions that hold it, by their names on a package index.
      build: returns a function and its arguments; imports the library.
      platform: what it is sized for: a "cpu" of a few cores, or a large "gpu", which stands for all accelerators.
      small: the same as ``build``, of the sizes of a dry run; None for programs that are small anyway.
    """

    name: str
    packages: tuple[str, ...]
    build: Callable[[], Built]
    platform: Platform = "cpu"
    small: Callable[[], Built] | None = None

    @property
    def direction(self) -> str:
        return "train step" if "train" in self.name.split() else "forward"


def train_step(loss: Callable[..., Any], rate: float = 1.0) -> Callable[..., Any]:
    """Returns a step of gradient descent.

    Args:
      loss: of a tree of parameters and a batch, a scalar.
      rate: what gradients are multiplied by; as large as here, they show in the result.
    """

    def step(parameters: Any, *batch: Any) -> tuple[Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, *batch)
        return jax.tree.map(lambda p, g: p - (rate * g).astype(p.dtype), parameters, gradients), value

    return step


def tokens(batch: int, length: int, vocabulary: int) -> jax.Array:
    """Ids of tokens, drawn at random: int32 [batch, length]."""
    return jax.random.randint(jax.random.key(1), (batch, length), 0, vocabulary)


def images(*shape: int) -> jax.Array:
    """Pixels, drawn at random: float32."""
    return jax.random.normal(jax.random.key(2), shape)


def labels(batch: int, classes: int) -> jax.Array:
    """Numbers of classes, drawn at random: int32 [batch]."""
    return jax.random.randint(jax.random.key(3), (batch,), 0, classes)
