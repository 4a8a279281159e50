"""Keeps the patterns that are declared in this process, and defines what each consists of."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, ModuleType
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from autopallas.compat import ArrayFunction, PyTree
from autopallas.court.case import random_array
from autopallas.custom.operation import PatternOperation, operation_of
from autopallas.errors import UnsupportedError
from autopallas.numerics.classes import Numerics
from autopallas.sites.block_sizes import Candidates
from autopallas.sites.declared_call import site_of
from autopallas.sites.operation import register as register_operation
from autopallas.sites.operation import registered, unregister
from autopallas.sites.spec import Sizes
from autopallas.tuning.key import syntax

__all__ = ["PLATFORMS", "Pattern", "declared", "register"]

PLATFORMS = ("cpu", "gpu", "tpu")

_MARK = 0.618033
"""Value near which each scalar gets a number of its own, to be told from other numbers."""
_DEEPEST = 4
"""How deep the functions are looked at that a replacement captured."""


@dataclass(frozen=True, eq=False)
class Pattern:
    """A reference computation and its replacement; made by :func:`autopallas.pattern`.

    Calling it calls the replacement.

    Attributes:
      name: its name in reports.
      reference: plain JAX; programs are searched for the equations that it traces to.
      replacement: the function that runs instead.
      shapes: types of the operands for which the reference was declared; other sizes are found too.
      scalars: names of the keyword arguments that may have any value.
      differentiable: whether JAX can differentiate the replacement; otherwise it differentiates the reference.
      platforms: where it is used.
      inputs: returns operands of given types, for the check before first use; None: random numbers.
      operands: the letters of each operand's axes, by its name; empty if the pattern declares none.
      result: the letters of the result.
      sizes: names of letters in specs, where these are not the letters themselves.
      rows: the letters along which the computation is independent.
      block_sizes: block sizes by name, with their defaults; they are keyword arguments of the replacement.
      candidates: returns all block sizes that are valid for a spec, the best guess first.
      numerics: how the replacement's results relate to the reference's.
    """

    name: str
    reference: ArrayFunction
    replacement: ArrayFunction
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    scalars: tuple[str, ...] = ()
    differentiable: bool = False
    platforms: tuple[str, ...] = PLATFORMS
    inputs: Callable[[Sequence[jax.ShapeDtypeStruct]], Sequence[ArrayLike]] | None = None
    operands: Mapping[str, str] = field(default_factory=dict)
    result: str = ""
    sizes: Mapping[str, str] = field(default_factory=dict)
    rows: str = ""
    block_sizes: Sizes = field(default_factory=dict)
    candidates: Candidates | None = None
    numerics: Numerics = "tolerance"

    def __call__(self, *operands: PyTree, **named: PyTree) -> PyTree:
        """Calls the replacement, with valid block sizes where none are given.

        Raises:
          UnsupportedError: no block sizes are valid for these operands.
        """
        if self.block_sizes and not named.keys() & self.block_sizes.keys():
            scalars = {name: value for name, value in named.items() if name in self.scalars}
            spec = site_of(self.operation, dict(zip(self.names, operands, strict=True)), {**self.marks, **scalars}).spec
            valid = self.operation.block_sizes.candidates(spec)
            if not valid:
                raise UnsupportedError(f"the pattern {self.name} has no block sizes for {spec}; give them by name")
            named = {**named, **valid[0].to_dict()}
        return self.replacement(*operands, **named)

    def remove(self) -> None:
        """Removes the pattern: functions that are traced from now on do not look for it any more."""
        unregister(self.operation)

    @functools.cached_property
    def operation(self) -> PatternOperation:
        """The operation that the pattern declares, of its example's ranks."""
        return operation_of(self)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the operands."""
        return tuple(self.operands) or tuple(f"operand{position}" for position in range(len(self.shapes)))

    @property
    def marks(self) -> dict[str, float]:
        """Values of the scalars for which the reference is traced as an example."""
        return {name: _MARK + 0.01 * i for i, name in enumerate(self.scalars)}

    @functools.cached_property
    def example_result(self) -> jax.ShapeDtypeStruct:
        """Type of the reference's result for the example's operands."""
        found: jax.ShapeDtypeStruct = jax.eval_shape(lambda *x: self.reference(*x, **self.marks), *self.shapes)
        return found

    @functools.cached_property
    def version(self) -> str:
        """Hash of the replacement and its candidates: of their own code, and of the modules that define them."""
        own = (self.replacement, self.candidates)
        return hashlib.sha256("".join(_source(f) for f in own if f is not None).encode()).hexdigest()[:16]

    def example(self, types: Sequence[jax.ShapeDtypeStruct], key: int = 0) -> list[np.ndarray]:
        """Returns operands of given types: those of ``inputs``, or random ones."""
        if self.inputs is not None:
            given = zip(self.inputs(types), types, strict=True)
            return [np.asarray(jnp.asarray(x, kind.dtype)) for x, kind in given]
        random = np.random.default_rng(key)
        return [random_array(random, kind) for kind in types]

    def __repr__(self) -> str:
        return f"<autopallas.pattern {self.name}>"


def _source(function: Callable[..., object]) -> str:
    """Returns a function's code, and the syntax of its module if that has a file."""
    own = _code(function)
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    try:
        module = syntax(inspect.getsource(cast(ModuleType, inspect.getmodule(function))))
    except (OSError, TypeError, SyntaxError, ValueError):
        module = ""
    return f"{own} {module}"


def _code(function: Callable[..., object], depth: int = 0) -> str:
    """Returns a function's instructions, with the plain values and the functions that it was given or captured."""
    if depth == _DEEPEST:
        return type(function).__name__
    if isinstance(function, functools.partial):
        named = sorted(function.keywords.items())
        names = [name for name, _ in named]
        return " ".join([*names, *_values([function.func, *function.args, *(value for _, value in named)], depth)])
    function = inspect.unwrap(function)
    code = getattr(function, "__code__", None)
    if code is None:
        return type(function).__name__
    captured = [*code.co_consts, *(getattr(function, "__defaults__", None) or ())]
    captured += [value for _, value in sorted((getattr(function, "__kwdefaults__", None) or {}).items())]
    cells = (cell for cell in getattr(function, "__closure__", None) or () if cell != CellType())
    captured += [cell.cell_contents for cell in cells]
    return " ".join([repr(code.co_code), *code.co_names, *_values(captured, depth)])


def _values(values: Sequence[object], depth: int) -> list[str]:
    """Returns the plain ones among values, and the code of the functions."""
    plain = [repr(value) for value in values if isinstance(value, (bool, int, float, str, tuple))]
    functions = (value for value in values if inspect.isfunction(value) or isinstance(value, functools.partial))
    return [*plain, *(_code(function, depth + 1) for function in functions)]


def declared() -> tuple[Pattern, ...]:
    """Returns the custom patterns that programs are searched for."""
    return tuple(own.pattern for own in registered() if isinstance(own, PatternOperation))


def register(pattern: Pattern) -> None:
    """Registers a pattern: functions traced from now on look for it, instead of one of the same name."""
    register_operation(pattern.operation)
