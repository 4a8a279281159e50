"""Models of tunix, with the loss of its supervised fine-tuning."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.programs.program import Built, Program, tokens, train_step

__all__ = ["PROGRAMS"]

_PACKAGES = ("google-tunix", "flax")
_VOCABULARY = 8192


def _step(model: Any, batch: int, length: int) -> Built:
    """A step of the trainer's own loss, with its own masks."""
    from flax import nnx
    from tunix.sft import utils
    from tunix.sft.peft_trainer import _default_loss_fn

    definition, parameters = nnx.split(model)

    def loss(parameters: Any, ids: jax.Array, mask: jax.Array, positions: jax.Array, attended: jax.Array) -> jax.Array:
        return _default_loss_fn(nnx.merge(definition, parameters), ids, mask, positions, attended)

    mask = jnp.ones((batch, length), bool)
    positions, attended = utils.build_positions_from_mask(mask), utils.make_causal_attn_mask(mask)
    return train_step(loss), (parameters, tokens(batch, length, _VOCABULARY), mask, positions, attended)


def _llama3(batch: int, length: int) -> Built:
    from flax import nnx
    from tunix.models.llama3.model import Llama3, ModelConfig

    config = ModelConfig(
        num_layers=2, vocab_size=_VOCABULARY, embed_dim=512, hidden_dim=1024, num_heads=8, head_dim=64,
        num_kv_heads=4, rope_theta=500_000, norm_eps=1e-5,
    )  # fmt: skip
    return _step(Llama3(config, rngs=nnx.Rngs(0)), batch, length)


def _qwen3(batch: int, length: int, experts: int | None) -> Built:
    from flax import nnx
    from tunix.models.qwen3.model import ModelConfig, Qwen3

    config = ModelConfig(
        num_layers=2, vocab_size=_VOCABULARY, embed_dim=512, hidden_dim=512, num_heads=8, head_dim=64,
        num_kv_heads=4, rope_theta=1_000_000, norm_eps=1e-6, num_experts=experts, num_experts_per_tok=2,
    )  # fmt: skip
    return _step(Qwen3(config, rngs=nnx.Rngs(0)), batch, length)


def _program(name: str, build: Any, *arguments: Any) -> Program:
    return Program(name, _PACKAGES, functools.partial(build, *arguments))


PROGRAMS = (
    _program("tunix Llama 3 train B1 T1024 f32", _llama3, 1, 1024),
    _program("tunix Llama 3 train B4 T256 f32", _llama3, 4, 256),
    _program("tunix Qwen 3 mixture train B1 T512 f32", _qwen3, 1, 512, 8),
)
