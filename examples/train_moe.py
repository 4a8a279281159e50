"""Trains a small mixture-of-experts language model, as it is written and under ``autopallas.optimize``.

The model is plain jnp: attention spelled out, and a mixture of experts that sorts its tokens by expert and multiplies
them with ``jax.lax.ragged_dot``.  On a CPU that multiplies every token with every expert; the replacement multiplies it
with its own.  Text, optimizer and comparison are those of ``train_gpt.py``.

    python examples/train_moe.py --experts 32
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from train_gpt import (
    Parser,
    TrainingState,
    adamw,
    allocator,
    attention,
    batches,
    count,
    positive,
    race,
    rms_norm,
    standard_library,
    start,
)

import autopallas


class Config(NamedTuple):
    """Sizes of the model."""

    layers: int
    width: int
    heads: int
    experts: int
    experts_per_token: int
    sequence_length: int
    vocabulary: int


# --- The model -------------------------------------------------------------------------------------------------------


def initialise(key: jax.Array, config: Config) -> dict[str, Any]:
    """Random parameters: normal weights, unit gains."""

    def normal(*shape: int, scale: float = 0.02) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape, jnp.float32)

    width, hidden, experts = config.width, 2 * config.width, config.experts
    residual_scale = 0.02 / math.sqrt(2 * config.layers)
    keys = iter(jax.random.split(key, 2 + 6 * config.layers))
    return {
        "token_embedding": normal(config.vocabulary, width),
        "position_embedding": normal(config.sequence_length, width),
        "final_gain": jnp.ones(width),
        "blocks": [
            {
                "attention_gain": jnp.ones(width),
                "query_key_value": normal(width, 3 * width),
                "attention_output": normal(width, width, scale=residual_scale),
                "experts_gain": jnp.ones(width),
                "router": normal(width, experts),
                "gate": normal(experts, width, hidden),
                "up": normal(experts, width, hidden),
                "down": normal(experts, hidden, width, scale=residual_scale),
            }
            for _ in range(config.layers)
        ],
    }


def mixture_of_experts(x: jax.Array, block: dict[str, jax.Array], count: int) -> tuple[jax.Array, jax.Array]:
    """The ``count`` best experts of each token, weighted; and how unevenly the experts are used, 1 where evenly."""
    tokens = x.reshape(-1, x.shape[-1])
    probabilities = jax.nn.softmax(tokens @ block["router"], axis=-1)
    weights, experts = jax.lax.top_k(probabilities, count)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)

    order = jnp.argsort(experts.ravel())  # Pairs of token and expert, by expert.
    source = order // count
    sizes = jnp.bincount(experts.ravel(), length=probabilities.shape[-1])

    rows = tokens[source]
    hidden = jax.nn.silu(jax.lax.ragged_dot(rows, block["gate"], sizes)) * jax.lax.ragged_dot(rows, block["up"], sizes)
    rows = jax.lax.ragged_dot(hidden, block["down"], sizes) * weights.ravel()[order, None]
    mixed = jnp.zeros_like(tokens).at[source].add(rows)

    # The balancing loss of Switch Transformers (Fedus et al., 2021).
    shares = sizes / experts.size
    imbalance = probabilities.shape[-1] * jnp.sum(shares * jnp.mean(probabilities, axis=0))
    return mixed.reshape(x.shape), imbalance


def loss(parameters: dict[str, Any], text: jax.Array, config: Config) -> tuple[jax.Array, jax.Array]:
    """Cross-entropy of each word of ``text`` [B, T + 1] given those before it, plus a little imbalance; and the former
    alone."""
    inputs, targets = text[:, :-1], text[:, 1:]
    x = parameters["token_embedding"][inputs] + parameters["position_embedding"][: inputs.shape[1]]
    imbalance = jnp.zeros(())
    for block in parameters["blocks"]:
        x = x + attention(rms_norm(x, block["attention_gain"]), block, config.heads)
        mixed, uneven = mixture_of_experts(rms_norm(x, block["experts_gain"]), block, config.experts_per_token)
        x, imbalance = x + mixed, imbalance + uneven
    logits = rms_norm(x, parameters["final_gain"]) @ parameters["token_embedding"].T
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    cross_entropy = -jnp.mean(jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1))
    return cross_entropy + 0.01 * imbalance, cross_entropy


def train_step(
    config: Config, learning_rate: float
) -> Callable[[TrainingState, jax.Array], tuple[TrainingState, jax.Array]]:
    """The jitted training step: loss, gradient and AdamW."""

    @jax.jit
    def step(state: TrainingState, text: jax.Array) -> tuple[TrainingState, jax.Array]:
        (_, cross_entropy), gradient = jax.value_and_grad(loss, has_aux=True)(state.parameters, text, config)
        return adamw(state, gradient, learning_rate), cross_entropy

    return step


# --- The comparison --------------------------------------------------------------------------------------------------


def compare(arguments: argparse.Namespace) -> int:
    """Trains all, prints everything, and returns the exit status."""
    config = Config(
        arguments.layers, arguments.width, arguments.heads, arguments.experts, arguments.experts_per_token,
        arguments.sequence_length, arguments.vocabulary,
    )  # fmt: skip
    text = standard_library(4_000_000, config.vocabulary)
    windows = batches(text, arguments.batch, config.sequence_length, arguments.seed)
    state = start(initialise(jax.random.key(arguments.seed), config))
    print(
        f"Mixture of experts with {count(state) / 1e6:.1f}M parameters: {config.layers} layers, width {config.width}, "
        f"{config.experts_per_token} of {config.experts} experts, {config.vocabulary} words;\n"
        f"{arguments.batch} x {config.sequence_length} words a step, on {jax.devices()[0].device_kind} "
        f"with JAX {jax.__version__}; {allocator()}\n",
        flush=True,
    )
    return race(train_step(config, arguments.learning_rate), state, windows, arguments)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="Trains a small mixture of experts as it is written and with autopallas.optimize, and compares.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=positive, default=20, metavar="N", help="training steps of each run")
    parser.add_argument("--sequence-length", type=positive, default=512, metavar="T", help="words per sequence")
    parser.add_argument("--batch", type=positive, default=2, metavar="B", help="sequences per step")
    parser.add_argument("--layers", type=positive, default=2, metavar="N", help="transformer blocks")
    parser.add_argument("--width", type=positive, default=256, metavar="N", help="size of the residual stream")
    parser.add_argument("--heads", type=positive, default=4, metavar="N", help="attention heads")
    parser.add_argument("--experts", type=positive, default=16, metavar="N", help="experts of each layer")
    parser.add_argument("--experts-per-token", type=positive, default=2, metavar="N", help="how many a token uses")
    parser.add_argument("--vocabulary", type=positive, default=2048, metavar="N", help="different words")
    parser.add_argument("--learning-rate", type=float, default=5e-4, metavar="X", help="peak learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights and of the batches")
    parser.add_argument(
        "--objective",
        nargs="+",
        choices=("time", "memory", "always"),
        default=["time"],
        help="what a replacement has to improve, one run for each; always: replace wherever it is legal",
    )
    arguments = parser.parse_args(argv)
    if arguments.width % arguments.heads:
        parser.error(f"--width {arguments.width} is not a multiple of --heads {arguments.heads}")
    if arguments.experts_per_token > arguments.experts:
        parser.error(f"--experts-per-token {arguments.experts_per_token} is more than --experts {arguments.experts}")
    if arguments.sequence_length > 100_000:
        parser.error("--sequence-length must be at most 100000, so that the text holds several sequences")
    if not 0 < arguments.learning_rate < math.inf:
        parser.error(f"--learning-rate {arguments.learning_rate} is not a positive number")
    if not 0 <= arguments.seed < 2**32:
        parser.error(f"--seed {arguments.seed} is not between 0 and 2**32 - 1")
    return arguments


def main() -> int:
    arguments = parse()
    try:
        return compare(arguments)
    except autopallas.OptionError as error:
        print(f"train_moe.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
