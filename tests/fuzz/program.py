"""One random program: its text, its arguments, and the function."""

from __future__ import annotations

import itertools
import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import (
    arrays,
    attention,
    convolutions,
    dispatched,
    gated,
    linear,
    losses,
    mixtures,
    pairs,
    recurrences,
    respellings,
    stacks,
)
from .altered import altered
from .choices import Choices
from .writing import Argument, Writer

__all__ = ["FIRST_RECURRENCE", "RandomProgram", "random_program"]

_FAMILIES = {"attention": 0.35, "loss": 0.25, "mixture": 0.2, "stack": 0.2}
_FIRST_PAIR = 20_000
"""From here on every fifth program is a loss over two products; those before are recorded as they are."""
_FIRST_GATHER = 24_000
"""From here on another fifth are losses of rows that are more often gathered, by numbers that differ by example."""
_FIRST_WINDOW = 28_000
"""From here on a third fifth are losses of rows in windows, in reverse, or selected twice."""
_FIRST_RESPELLING = 30_000
"""From here on a fourth fifth are of what respellings replace."""
_FIRST_DISPATCH = 32_000
"""From here on the last fifth are mixtures by scatters and gathers, intervals, gathered matrices and loops."""
FIRST_RECURRENCE = 80_000
"""From here on each of those is a tenth, two more tenths are loops over time, and three are what the draw says."""
_FIRST_MEMORY = 100_000
"""From here on half of the loops over time are optimized for memory, or checkpointed whatever that gains."""
_FIRST_GATED = 120_000
"""From here on a tenth are gated MLPs."""
_FIRST_LINEAR = 140_000
"""From here on a tenth are linear attentions."""
_FIRST_ALTERED = 160_000
"""From here on one equation of a derivative gives something else."""
_FIRST_CONVOLUTION = 180_000
"""From here on a tenth are convolutions, and derivatives are JAX's again."""
_MEMORY: dict[str, Mapping[str, Any]] = {
    "usual": {},
    "checkpoint": {"ops": ("scan_checkpoint",)},
    "checkpoint and slices": {"ops": ("scan_checkpoint", "indexed_loop")},
    "memory": {"objective": "memory"},
}
_EVERY_KIND: dict[str, Mapping[str, Any]] = {
    "usual": {},
    "distances": {"ops": ("respelling", "squared_distances")},
    "checkpoint": {"ops": ("respelling", "scan_checkpoint")},
    "every kind": {
        "ops": (
            "respelling",
            "squared_distances",
            "scan_checkpoint",
            "looped_bfloat16",
            "summed_products",
            "summed_exponentials",
            "summed_exponentials_gradient",
        )
    },
}
"""Options by which kinds are looked for that are not by default."""


@dataclass(frozen=True)
class RandomProgram:
    """What a seed stands for.

    Attributes:
      seed: the seed.
      text: the definition of ``program``, as Python.
      arguments: what ``program`` takes.
      x64: whether it is run with 64-bit types.
      choices: what was chosen other than plainly, by name.
      features: what it has, to count programs by.
      gradients: how many of its last results are gradients.
      options: of :func:`autopallas.optimize`, other than those of all programs.
    """

    seed: int
    text: str
    arguments: tuple[Argument, ...]
    x64: bool
    choices: dict[str, str]
    features: frozenset[str]
    gradients: int
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_altered(self) -> bool:
        """Whether its derivative is another one than JAX's."""
        return _FIRST_ALTERED <= self.seed < _FIRST_CONVOLUTION and self.gradients > 0

    def every_option(self) -> dict[str, Any]:
        """Returns the options with which it is optimized."""
        return {"objective": "always", "strict": True} | dict(self.options)

    def function(self) -> Callable[..., Any]:
        """The program itself."""
        file = f"<random program {self.seed}>"
        linecache.cache[file] = (len(self.text), None, self.text.splitlines(keepends=True), file)
        names = {"itertools": itertools, "jax": jax, "jnp": jnp, "np": np, "lax": lax, "wave": arrays.wave}
        exec(compile(self.text, file, "exec"), names)
        program: Callable[..., Any] = names["program"]  # type: ignore[assignment]
        return altered(program, self.seed) if self.is_altered else program

    def arrays(self) -> list[jax.Array]:
        """Arguments, always the same for a seed, whatever the other arguments are."""
        made = []
        for argument in self.arguments:
            draw = np.random.default_rng([self.seed, *argument.name.encode()])
            names = {name: getattr(arrays, name) for name in arrays.__all__}
            made.append(eval(argument.text, names | {"draw": draw}))
        return made

    def script(self) -> str:
        """The program with its arguments, to be run by itself from the root of the repository."""
        lines = ["import itertools, jax, jax.numpy as jnp, numpy as np", "from jax import lax", "import autopallas"]
        lines += ["from tests.fuzz.arrays import integers, mask, normal, wave", ""]
        lines += ['jax.config.update("jax_enable_x64", True)', ""] if self.x64 else []
        lines += [self.text, ""]
        if self.is_altered:
            lines += ["from tests.fuzz.altered import altered", f"program = altered(program, {self.seed})"]
        for a in self.arguments:
            seeded = f"np.random.default_rng([{self.seed}, *b{a.name!r}])"
            lines.append(f"{a.name} = {a.text.replace('draw', seeded, 1)}")
        given = ", ".join(a.name for a in self.arguments)
        options = ", ".join(f"{name}={value!r}" for name, value in self.every_option().items())
        lines += [f"optimized = autopallas.optimize(program, {options})"]
        lines += [f"print(program({given}))", f"print(optimized({given}))", "print(optimized.report())"]
        return "\n".join(lines) + "\n"


def random_program(
    seed: int, plain: frozenset[str] = frozenset(), fixed: dict[str, str] | None = None
) -> RandomProgram:
    """The program of a seed; choices named in ``plain`` are taken as the plain ones, those in ``fixed`` as said."""
    c = Choices(seed, plain, fixed)
    w = Writer(c, x64=c.chance("x64", 0.16))
    w.busy = c.pick("busy", [1.0, 0.5, 0.2], 0.7)
    shares = [name for name, share in _FAMILIES.items() for _ in range(round(share * 20))]
    family = c.pick("family", {f"{name}{i}": name for i, name in enumerate(shares)}, 0.95)
    place = seed % 5
    if seed >= FIRST_RECURRENCE:
        place = seed % 10
        family = "recurrence" if place in (5, 6) else family
    if seed >= _FIRST_PAIR and place == 1:
        family = "pair"
    if seed >= _FIRST_GATHER and place == 3:
        family, w.gathers = "loss", True
    if seed >= _FIRST_WINDOW and place == 4:
        family, w.windows = "loss", True
    if seed >= _FIRST_RESPELLING and place == 2:
        family = "respelling"
    if seed >= _FIRST_DISPATCH and place == 0:
        family = "dispatch"
    if seed >= _FIRST_GATED and place == 7:
        family = "gated"
    if seed >= _FIRST_LINEAR and place == 8:
        family = "linear"
    if seed >= _FIRST_CONVOLUTION and place == 9:
        family = "convolution"
    options: Mapping[str, Any] = {}
    if seed >= _FIRST_MEMORY and family == "recurrence":
        name = c.pick("options", {name: name for name in _MEMORY}, 0.5)
        options = _MEMORY[name]
        w.features.add(f"options: {name}")
    if seed >= respellings.FIRST_OF_EVERY_KIND and family == "respelling":
        name = c.pick("options", {name: name for name in _EVERY_KIND}, 0.85)
        options = _EVERY_KIND[name]
        w.features.add(f"options: {name}")
    w.features.add(f"family: {family}")
    w.features |= {"x64"} if w.x64 else set()
    core: list[str]
    if family == "attention":
        layout, size, core = attention.operands(w, "a")
        head, write = "attend", lambda: attention.body(w, "a", layout, size, *core)
    elif family == "loss":
        size, core = losses.operands(w, "l")
        head, write = "loss", lambda: losses.body(w, "l", size, *core)
    elif family == "pair":
        size, core = pairs.operands(w, "p")
        head, write = "loss", lambda: pairs.body(w, "p", size, *core)
    elif family == "respelling":
        size, core = respellings.operands(w, "r")
        head, write = "respelt", lambda: respellings.body(w, "r", size, *core)
    elif family == "recurrence":
        size, core = recurrences.operands(w, "t")
        head, write = "run_loop", lambda: recurrences.body(w, "t", size, *core)
    elif family == "gated":
        size, core = gated.operands(w, "g")
        head, write = "mlp", lambda: gated.body(w, "g", size, *core)
    elif family == "linear":
        form, core = linear.operands(w, "k")
        head, write = "attend", lambda: linear.body(w, "k", form, *core)
    elif family == "convolution":
        sizes, core = convolutions.operands(w, "v")
        head, write = "convolve", lambda: convolutions.body(w, "v", sizes, *core)
    elif family == "dispatch":
        size, core = dispatched.operands(w, "d")
        head, write = "mix", lambda: dispatched.body(w, "d", size, *core)
    elif family == "mixture":
        size, core = mixtures.operands(w, "m")
        head, write = "mix", lambda: mixtures.body(w, "m", size, *core)
    else:
        core, write = stacks.operands(w)
        head = "model"
    w._indent = 2
    result = write()
    w.line(f"return {result}")
    inner = [f"    def {head}({', '.join(core)}):", *w.lines]
    text, gradients = _around(w, head, core, inner)
    return RandomProgram(seed, text, tuple(w.arguments), w.x64, c.taken, frozenset(w.features), gradients, options)


_INNER = {
    "none": "{f}({args})",
    "jit": "jax.jit({f})({args})",
    "checkpoint": "jax.checkpoint({f})({args})",
    "checkpoint of dots": "jax.checkpoint({f}, policy=jax.checkpoint_policies.dots_saveable)({args})",
    "cond": "lax.cond(jnp.array(True), {f}, {f}, {args})",
    "called twice": "jax.tree.map(jnp.add, {f}({args}), jax.jit({f})({args}))",
}
_OUTER = {
    "none": "{f}({args})",
    "vmap": "jax.vmap({f})({args})",
    "map": "lax.map(lambda row: {f}(*row), ({args},))",
    "scan": "lax.scan(lambda n, row: (n + 1, {f}(*row)), 0, ({args},))[1]",
    "accumulated": (
        "lax.scan(lambda total, row: (jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, {f}(*row)), None), "
        "jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape({f}, *({first},))), ({args},))[0]"
    ),
    "vmap of some": "jax.vmap({f}, in_axes=({axes},))({args})",
}


def _around(w: Writer, head: str, core: Sequence[str], inner: Sequence[str]) -> tuple[str, int]:
    """The text of the whole program, with transformations within and around the gradient, and how many gradients."""
    c = w.choices
    within = c.pick("within", {name: name for name in _INNER}, 0.35)
    if within == "checkpoint of dots" and "complex products" in w.features:
        within = "checkpoint"  # JAX does not save complex dots
    outer = c.pick("around", {name: name for name in _OUTER}, 0.4)
    direction = c.pick("direction", ["forward", "vjp", "grad", "vjp of some"], 0.5)
    inside = c.chance("around within the gradient", 0.5)
    w.features |= {f"direction: {direction}", f"within: {within}", f"around: {outer}"}
    batched = list(core[:1] if outer == "vmap of some" else core)
    if outer != "none":
        w.arguments = [Argument(a.name, a.kind, (3, *a.shape), a.rest) if a.name in batched else a for a in w.arguments]
    names = [a.name for a in w.arguments]
    floats = [a.name for a in w.arguments if a.kind == "normal"]
    if direction == "vjp of some":
        floats = floats[:: 2 if len(floats) > 1 else 1]
    args = ", ".join(core)
    first = ", ".join(f"{name}[0]" for name in core)
    axes = ", ".join("0" if name in batched else "None" for name in core)

    def applied(function: str) -> str:
        return _OUTER[outer].format(f=function, args=args, first=first, axes=axes)

    lines = [f"def value({', '.join(names)}):", *inner]
    call = _INNER[within].format(f=head, args=args)
    if inside or direction == "forward":
        lines += [f"    def run({args}):", f"        return {call}", f"    return {applied('run')}"]
    else:
        lines += [f"    return {call}"]
    lines += ["", f"def program({', '.join(names)}):"]
    every = ", ".join(names)
    if direction == "forward":
        return "\n".join([*lines, f"    return value({every})"]), 0
    given = ", ".join(floats)
    if inside:
        return "\n".join([*lines, *_gradient(direction, given, every, "    ")]), len(floats)
    lines += [f"    def differentiated({args}):", *_gradient(direction, given, every, "        ")]
    return "\n".join([*lines, f"    return {applied('differentiated')}"]), len(floats)


def _gradient(direction: str, given: str, every: str, indent: str) -> list[str]:
    if direction == "grad":
        total = "sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in jax.tree.leaves({}))"
        numbers = f"tuple(range({given.count(',') + 1}))"
        return [
            f"{indent}def total({given}):",
            f"{indent}    return {total.format(f'value({every})')}",
            f"{indent}return jax.value_and_grad(total, {numbers})({given})",
        ]
    return [
        f"{indent}out, pull = jax.vjp(lambda {given}: value({every}), {given})",
        f"{indent}return out, pull(wave(out))",
    ]
