"""Trains a small GPT as it is written, and with ``@autopallas.optimize`` on its step, once for each objective.

The model is plain jnp with attention and cross-entropy spelled out, as in a first draft.  Both are compared.  The text
is the source code of Python's standard library, which every machine has, in words.

    python examples/train_gpt.py --steps 40 --sequence-length 1024
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import autopallas

# All runs compute the same function, but add floats in another order, and AdamW divides by the gradient's own size: a
# rounding error in a gradient near zero moves its weight as far as a large gradient would.  Two spellings of attention
# in plain jnp drift apart likewise; this is an order of magnitude more than they do over some fifty steps.
LOSS_TOLERANCE = 5e-3


class Config(NamedTuple):
    """Sizes of the model."""

    layers: int
    width: int
    heads: int
    sequence_length: int
    vocabulary: int


# --- The model -------------------------------------------------------------------------------------------------------


def initialise(key: jax.Array, config: Config) -> dict[str, Any]:
    """Random parameters: normal weights, zero biases, unit gains."""

    def normal(key: jax.Array, *shape: int, scale: float = 0.02) -> jax.Array:
        return scale * jax.random.normal(key, shape, jnp.float32)

    width = config.width
    residual_scale = 0.02 / math.sqrt(2 * config.layers)
    keys = iter(jax.random.split(key, 2 + 4 * config.layers))
    return {
        "token_embedding": normal(next(keys), config.vocabulary, width),
        "position_embedding": normal(next(keys), config.sequence_length, width),
        "final_gain": jnp.ones(width),
        "blocks": [
            {
                "attention_gain": jnp.ones(width),
                "query_key_value": normal(next(keys), width, 3 * width),
                "attention_output": normal(next(keys), width, width, scale=residual_scale),
                "mlp_gain": jnp.ones(width),
                "mlp_input": normal(next(keys), width, 4 * width),
                "mlp_output": normal(next(keys), 4 * width, width, scale=residual_scale),
            }
            for _ in range(config.layers)
        ],
    }


def rms_norm(x: jax.Array, gain: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * gain


def attention(x: jax.Array, block: dict[str, jax.Array], heads: int) -> jax.Array:
    batch, length, width = x.shape
    query, key, value = jnp.split(x @ block["query_key_value"], 3, axis=-1)
    query = query.reshape(batch, length, heads, width // heads)
    key = key.reshape(batch, length, heads, width // heads)
    value = value.reshape(batch, length, heads, width // heads)

    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / math.sqrt(width // heads)
    causal = jnp.tril(jnp.ones((length, length), bool))
    scores = jnp.where(causal, scores, -jnp.inf)
    probabilities = jax.nn.softmax(scores, axis=-1)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", probabilities, value)

    return mixed.reshape(batch, length, width) @ block["attention_output"]


def mlp(x: jax.Array, block: dict[str, jax.Array]) -> jax.Array:
    return jax.nn.gelu(x @ block["mlp_input"]) @ block["mlp_output"]


def loss(parameters: dict[str, Any], text: jax.Array, heads: int) -> jax.Array:
    """Mean cross-entropy in nats per word of predicting each word of ``text`` [B, T + 1] from those before it."""
    inputs, targets = text[:, :-1], text[:, 1:]
    x = parameters["token_embedding"][inputs] + parameters["position_embedding"][: inputs.shape[1]]
    for block in parameters["blocks"]:
        x = x + attention(rms_norm(x, block["attention_gain"]), block, heads)
        x = x + mlp(rms_norm(x, block["mlp_gain"]), block)
    logits = rms_norm(x, parameters["final_gain"]) @ parameters["token_embedding"].T
    log_probabilities = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.mean(jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1))


# --- Training --------------------------------------------------------------------------------------------------------


class TrainingState(NamedTuple):
    """Parameters and AdamW's running averages of the gradient and of its square."""

    parameters: dict[str, Any]
    gradient_mean: dict[str, Any]
    gradient_square: dict[str, Any]
    step: jax.Array


def start(parameters: dict[str, Any]) -> TrainingState:
    zeros = jax.tree.map(jnp.zeros_like, parameters)
    return TrainingState(parameters, zeros, zeros, jnp.zeros((), jnp.int32))


def adamw(state: TrainingState, gradient: dict[str, Any], learning_rate: float) -> TrainingState:
    """One AdamW update (Loshchilov and Hutter, 2019), with a linear warm-up over the first ten steps."""
    step = state.step + 1
    rate = learning_rate * jnp.minimum(1.0, step / 10)
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.gradient_mean, gradient)
    square = jax.tree.map(lambda s, g: 0.95 * s + 0.05 * g**2, state.gradient_square, gradient)

    def update(parameter: jax.Array, m: jax.Array, s: jax.Array) -> jax.Array:
        direction = (m / (1 - 0.9**step)) / (jnp.sqrt(s / (1 - 0.95**step)) + 1e-8)
        decay = 0.1 if parameter.ndim > 1 else 0.0  # Gains are not decayed.
        return parameter - rate * (direction + decay * parameter)

    return TrainingState(jax.tree.map(update, state.parameters, mean, square), mean, square, step)


def train_step(
    heads: int, learning_rate: float, placement: Any = None
) -> Callable[[TrainingState, jax.Array], tuple[TrainingState, jax.Array]]:
    """The jitted training step: loss, gradient and AdamW.  The state stays where ``placement`` has it."""

    @functools.partial(jax.jit, out_shardings=None if placement is None else (placement, None))
    def step(state: TrainingState, text: jax.Array) -> tuple[TrainingState, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(state.parameters, text, heads)
        return adamw(state, gradient, learning_rate), value

    return step


def placement_of(state: TrainingState, mesh: Mesh) -> Any:
    """How the state is divided: words and the inner axis of the MLP over "model", and the rest is on every device."""
    divided = {"token_embedding": ("model",), "mlp_input": (None, "model"), "mlp_output": ("model",)}

    def sharding(path: Sequence[Any], leaf: jax.Array) -> NamedSharding:
        name = getattr(path[-1], "key", "") if path else ""
        return NamedSharding(mesh, PartitionSpec(*divided.get(name, ())))

    return jax.tree_util.tree_map_with_path(sharding, state)


def standard_library(characters: int, vocabulary: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """The words, spaces and signs of the standard library's modules, in the order of their names, as numbers.

    The most frequent words have the numbers from 1 on; 0 stands for all others.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = ""
    for path in sorted(folder.glob("*.py")):
        text += path.read_text(encoding="utf-8", errors="replace")
        if len(text) >= characters:
            break
    words = re.findall(r"\w+|\s+|[^\w\s]", text[:characters])
    frequent = {word: 1 + rank for rank, (word, _) in enumerate(Counter(words).most_common(vocabulary - 1))}
    return np.asarray([frequent.get(word, 0) for word in words], np.int32)


def batches(
    text: np.ndarray[Any, np.dtype[np.int32]], batch: int, sequence_length: int, seed: int
) -> Iterator[jax.Array]:
    """Endless random windows of T + 1 words: [B, T + 1] int32."""
    random = np.random.default_rng(seed)
    while True:
        starts = random.integers(0, len(text) - sequence_length, size=batch)
        yield jnp.asarray(np.stack([text[s : s + sequence_length + 1] for s in starts]))


# --- The comparison --------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """One training run: its compiled step, and what was measured of it."""

    name: str
    compiled: Callable[[TrainingState, jax.Array], tuple[TrainingState, jax.Array]]
    state: TrainingState
    first_step_seconds: float
    temporary_bytes: int | None
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, name: str, step: Any, state: TrainingState, text: jax.Array) -> Run:
        """Compiles the step and takes it once, timing both together: what a user waits for at the start."""
        began = time.perf_counter()
        compiled = step.lower(state, text).compile()
        state, value = jax.block_until_ready(compiled(state, text))
        seconds = time.perf_counter() - began
        memory = compiled.memory_analysis()
        run = cls(name, compiled, state, seconds, None if memory is None else memory.temp_size_in_bytes)
        run.losses.append(float(value))
        return run

    def step(self, text: jax.Array) -> None:
        began = time.perf_counter()
        self.state, value = jax.block_until_ready(self.compiled(self.state, text))
        self.step_seconds.append(time.perf_counter() - began)
        self.losses.append(float(value))


def compare(arguments: argparse.Namespace) -> int:
    """Trains all, prints everything, and returns the exit status."""
    sizes = (arguments.layers, arguments.width, arguments.heads, arguments.sequence_length, arguments.vocabulary)
    config = Config(*sizes)
    text = standard_library(4_000_000, config.vocabulary)
    windows = batches(text, arguments.batch, config.sequence_length, arguments.seed)
    state = start(initialise(jax.random.key(arguments.seed), config))
    placement = None
    if arguments.mesh:
        mesh = Mesh(np.array(jax.devices()).reshape(list(arguments.mesh.values())), tuple(arguments.mesh))
        placement = placement_of(state, mesh)
        state = jax.device_put(state, placement)
        rows = NamedSharding(mesh, PartitionSpec("data"))
        windows = (jax.device_put(window, rows) for window in windows)
    print(
        f"GPT with {count(state) / 1e6:.1f}M parameters: {config.layers} layers, width {config.width}, "
        f"{config.heads} heads, {config.vocabulary} words; {arguments.batch} x {config.sequence_length} words a step\n"
        f"on {jax.devices()[0].device_kind} with JAX {jax.__version__}; {allocator()}\n",
        flush=True,
    )
    return race(train_step(config.heads, arguments.learning_rate, placement), state, windows, arguments)


def count(state: TrainingState) -> int:
    """How many parameters there are."""
    return sum(leaf.size for leaf in jax.tree.leaves(state.parameters))


def race(step: Any, state: TrainingState, windows: Iterator[jax.Array], arguments: argparse.Namespace) -> int:
    """Trains with the step as it is and optimized for each objective; prints everything, returns the exit status."""
    optimized = {name: autopallas.optimize(objective=name)(step) for name in arguments.objective}  # The whole step.
    first = next(windows)
    runs = [Run.begin("original", step, state, first)]
    for name, optimized_step in optimized.items():
        runs.append(Run.begin(name, optimized_step, state, first))
        print(f'Objective "{name}":\n{optimized_step.report()}\n', flush=True)

    print("Losses\n" + f"{'step':>4}" + "".join(f"  {run.name:>10}" for run in runs))
    show(0, runs)
    for number in range(1, arguments.steps):
        window = next(windows)
        # Taken in turn, so that a noisy neighbour on the machine disturbs all alike.
        for run in runs if number % 2 else runs[::-1]:
            run.step(window)
        if number % max(1, arguments.steps // 10) == 0 or number == arguments.steps - 1:
            show(number, runs)

    original, *others = runs
    difference = max(abs(a - b) for run in others for a, b in zip(original.losses, run.losses, strict=True))
    equal = difference <= LOSS_TOLERANCE  # False for NaN as well.
    print(
        f"\nlargest difference of the losses {difference:.1e}, "
        f"{'within' if equal else 'ABOVE'} the tolerance {LOSS_TOLERANCE:.0e}\n"
    )
    print("\n".join(table(runs)))
    return 0 if equal else 1


def allocator() -> str:
    """The settings of the C library's allocator, which decide much of what naive attention costs on a CPU."""
    names = ("MALLOC_MMAP_MAX_", "MALLOC_ARENA_MAX", "MALLOC_TRIM_THRESHOLD_")
    settings = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    if not settings:
        return "default settings of the allocator"
    return "freed memory is kept for reuse, in both runs:\n  " + " ".join(settings)


def show(number: int, runs: Sequence[Run]) -> None:
    print(f"{number:>4}" + "".join(f"  {run.losses[-1]:>10.4f}" for run in runs), flush=True)


def table(runs: Sequence[Run]) -> list[str]:
    """The measurements, as lines of an aligned table; of all but the first run with the ratio to the first."""

    def row(label: str, unit: str, values: Sequence[float | None]) -> str:
        cells = []
        for value in values:
            shown = "not available" if value is None else f"{value:.2f} {unit}"
            if value is not None and values[0] and cells:
                shown += f" ({value / values[0]:.2f})"
            cells.append(f"{shown:>20}")
        return f"{label:<18}" + "".join(cells)

    def mebibytes(run: Run) -> float | None:
        return None if run.temporary_bytes is None else run.temporary_bytes / 2**20

    def median(run: Run) -> float | None:
        return 1e3 * statistics.median(run.step_seconds) if run.step_seconds else None

    return [
        f"{'':<18}" + "".join(f"{run.name:>20}" for run in runs),
        row("first step", "s", [run.first_step_seconds for run in runs]),
        row("step, median", "ms", [median(run) for run in runs]),
        row("temporary memory", "MiB", [mebibytes(run) for run in runs]),
    ]


class Parser(argparse.ArgumentParser):
    """Answers bad input with one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (--help lists the options)\n")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


positive.__name__ = "positive whole number"  # How argparse names it where it refuses a value.


def mesh_sizes(text: str) -> dict[str, int]:
    """From "data=4,model=2" to the sizes of the mesh."""
    sizes = {name: positive(number) for name, _, number in (part.partition("=") for part in text.split(","))}
    if sizes.keys() != {"data", "model"}:
        raise ValueError
    return sizes


mesh_sizes.__name__ = "mesh as data=N,model=N"


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        description="Trains a small GPT as it is written and with autopallas.optimize, and compares them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--steps", type=positive, default=40, metavar="N", help="training steps of each run")
    parser.add_argument("--sequence-length", type=positive, default=1024, metavar="T", help="words per sequence")
    parser.add_argument("--batch", type=positive, default=1, metavar="B", help="sequences per step")
    parser.add_argument("--layers", type=positive, default=3, metavar="N", help="transformer blocks")
    parser.add_argument("--width", type=positive, default=256, metavar="N", help="size of the residual stream")
    parser.add_argument("--heads", type=positive, default=4, metavar="N", help="attention heads")
    parser.add_argument("--vocabulary", type=positive, default=8192, metavar="N", help="different words")
    parser.add_argument("--learning-rate", type=float, default=1e-3, metavar="X", help="peak learning rate of AdamW")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the weights and of the batches")
    parser.add_argument(
        "--objective",
        nargs="+",
        choices=("time", "memory", "always"),
        default=["time", "memory"],
        help="what a replacement has to improve, one run for each; always: replace wherever it is legal",
    )
    parser.add_argument(
        "--mesh", type=mesh_sizes, metavar="data=N,model=N", help="divide the step among devices; CPUs may be as many"
    )
    arguments = parser.parse_args(argv)
    for name, number, size in (("data", arguments.batch, "--batch"), ("model", arguments.vocabulary, "--vocabulary")):
        if arguments.mesh and number % arguments.mesh[name]:
            parser.error(f"{size} {number} is not a multiple of the mesh's {name}={arguments.mesh[name]}")
    if arguments.width % arguments.heads:
        parser.error(f"--width {arguments.width} is not a multiple of --heads {arguments.heads}")
    if arguments.sequence_length > 100_000:
        parser.error("--sequence-length must be at most 100000, so that the text holds several sequences")
    if not 0 < arguments.learning_rate < math.inf:
        parser.error(f"--learning-rate {arguments.learning_rate} is not a positive number")
    if not 0 <= arguments.seed < 2**32:
        parser.error(f"--seed {arguments.seed} is not between 0 and 2**32 - 1")
    return arguments


def main() -> int:
    arguments = parse()
    if arguments.mesh and "cpu" in os.environ.get("JAX_PLATFORMS", "cpu"):
        jax.config.update("jax_num_cpu_devices", math.prod(arguments.mesh.values()))
    try:
        return compare(arguments)
    except autopallas.OptionError as error:
        print(f"train_gpt.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
