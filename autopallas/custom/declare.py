"""Declares a custom pattern."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from autopallas.compat import ArrayFunction
from autopallas.custom.axes import Axes
from autopallas.custom.registry import PLATFORMS, Pattern, register
from autopallas.environment import OPERATIONS
from autopallas.errors import OptionError, one_line
from autopallas.numerics.classes import CLASSES, Numerics
from autopallas.patterns.spellings import check
from autopallas.sites.block_sizes import Candidates
from autopallas.sites.operation import folder_names
from autopallas.sites.spec import Sizes

__all__ = ["pattern"]


def pattern(
    reference: ArrayFunction,
    *,
    shapes: Sequence[ArrayLike | jax.ShapeDtypeStruct],
    scalars: Sequence[str] = (),
    name: str | None = None,
    differentiable: bool = False,
    platforms: Sequence[str] = PLATFORMS,
    inputs: Callable[[Sequence[jax.ShapeDtypeStruct]], Sequence[ArrayLike]] | None = None,
    operands: Mapping[str, str] | None = None,
    result: str | None = None,
    sizes: Mapping[str, str] | None = None,
    rows: str = "",
    block_sizes: Sizes | None = None,
    candidates: Candidates | None = None,
    numerics: Numerics = "tolerance",
) -> Callable[[ArrayFunction], Pattern]:
    """Declares that the decorated function computes the same as ``reference``, and is to run in its place.

    It applies to every optimized function that is traced from then on.  The reference is traced, and its equations are
    looked up in the program's value-numbered graph, for whatever sizes the program has.  Layout copies, inner jits,
    operand order of sums and products, and loop bodies make no difference; other equations do.  In a train step the
    backward is found like that of the built-in operations, by differentiating the matched equations.

    A replacement runs only after it was compared with the reference in float64, once for each set of types and scalars:
    values, and gradients if the program has them.  If it fails or is off, the original equations stay, and the report
    says why.

    The arguments from ``operands`` to ``candidates`` are optional.  With them a pattern is what a declared operation of
    this package is: its replacement is called with an axis for each letter, devices compute its rows in parts, and its
    block sizes are searched for, cached, locked and tuned.

    Args:
      reference: a function of arrays, and of ``scalars`` by keyword, that returns one array.
      shapes: an example of each operand: an array or a ``jax.ShapeDtypeStruct``.
      scalars: names of keyword arguments whose values may vary, such as an epsilon or a scale: the values are read from
        the program and given to the replacement.
      name: the pattern's name in reports; by default the decorated function's name.
      differentiable: whether JAX can differentiate the replacement (it has a rule, or is plain JAX).  If not, the
        backward differentiates the reference.
      platforms: a selection of "cpu", "gpu", "tpu"; elsewhere the original runs.
      inputs: returns operands of the types that it is given, for the comparison, if random numbers make no sense.
      operands: a name for each operand, in order, and the letters of its axes, as in ``{"x": "M N", "scale": "N"}``.
        The first letter of ``rows`` stands for any number of axes in a program; the replacement gets them as one.
      result: the letters of the result, as in ``"M N"``.
      sizes: names for letters, such as ``{"M": "rows"}``, under which reports and ``candidates`` have their sizes; by
        default the letters themselves.
      rows: the letters along which the result is computed independently, as in ``"M"``: devices may divide them.
      block_sizes: names of further keyword arguments of the replacement, with their defaults, as in
        ``{"row_block": 128}``: whole numbers, truth values or words.
      candidates: ``candidates(spec)`` returns all block sizes that are valid for sizes such as ``spec.M``, as mappings,
        the best guess first; none if there are none.  By default ``block_sizes`` are valid everywhere.
      numerics: how the replacement's results relate to the reference's, as the option ``numerics`` has it: "identical"
        is compared bit by bit before the first use, "reordered" and "tolerance" within tolerance.

    Returns:
      A decorator that returns a :class:`Pattern`, which can be called like the function, and has ``remove()``.

    Raises:
      OptionError: the reference cannot be looked for, with the reason.

    Example:
      >>> import jax, jax.numpy as jnp, autopallas
      >>> def reference(x, *, eps):
      ...     return x / (jnp.sum(jnp.abs(x), axis=-1, keepdims=True) + eps)
      >>> @autopallas.pattern(reference, shapes=[jnp.ones((8, 16))], scalars=["eps"], differentiable=True)
      ... def l1_normalize(x, *, eps):
      ...     return x * (1 / (jnp.sum(jnp.abs(x), axis=-1, keepdims=True) + eps))
      >>> step = autopallas.optimize(lambda x: l1_normalize.reference(2 * x, eps=1e-3) + 1)
      >>> step(jnp.ones((4, 32))).shape, step.report().counts()
      ((4, 32), Counter({'l1_normalize': 1}))
      >>> l1_normalize.remove()
    """
    if not callable(reference):
        raise OptionError(f"the reference of a pattern is a function, not {reference!r}")
    types = _types(shapes)
    _check_words(scalars, platforms, name, rows, numerics)
    if inputs is not None and not callable(inputs):
        raise OptionError(f"inputs is {inputs!r}; give a function of types, which returns operands, or None")
    axes = Axes.of(operands, result, sizes, rows, types, scalars)
    if block_sizes is not None or candidates is not None:
        _check_block_sizes(block_sizes, candidates, axes, scalars)

    def declare(replacement: ArrayFunction) -> Pattern:
        called = name if name is not None else str(getattr(replacement, "__name__", ""))
        if not called.isidentifier() or called in folder_names():
            raise OptionError(f"{called!r} is no name for a pattern; give name=, other than {', '.join(OPERATIONS)}")
        if not callable(replacement):
            raise OptionError(f"the replacement of a pattern is a function, not {replacement!r}")
        _check_keywords(replacement, (*scalars, *(block_sizes or ())))
        made = Pattern(
            called,
            reference,
            replacement,
            types,
            tuple(scalars),
            differentiable,
            tuple(platforms),
            inputs,
            operands=axes.operands,
            result=axes.result,
            sizes=axes.sizes,
            rows=rows,
            block_sizes=dict(block_sizes or {}),
            candidates=candidates,
            numerics=numerics,
        )
        check(made)
        axes.check_result(made.example_result.shape)
        if made.block_sizes:
            _check_candidates(made)
        register(made)
        return made

    return declare


def _dtype(x: ArrayLike | jax.ShapeDtypeStruct) -> DTypeLike:
    return x.dtype if hasattr(x, "dtype") else jax.dtypes.canonicalize_dtype(np.asarray(x).dtype)


def _types(shapes: Sequence[ArrayLike | jax.ShapeDtypeStruct]) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Returns the types of the operands' examples."""
    if isinstance(shapes, (str, bytes, Mapping)) or not hasattr(shapes, "__iter__"):
        raise OptionError(f"shapes is {shapes!r}; give a list with an array, or its type, for each operand")
    types = tuple(jax.ShapeDtypeStruct(np.shape(x), _dtype(x)) for x in shapes)
    if not types:
        raise OptionError("a pattern has at least one operand; give an example of each as shapes=[...]")
    return types


def _check_words(
    scalars: Sequence[str], platforms: Sequence[str], name: str | None, rows: str, numerics: Numerics
) -> None:
    if not _is_list(scalars) or not all(isinstance(s, str) and s.isidentifier() for s in scalars):
        raise OptionError(f"scalars is {scalars!r}; give a list of names of keyword arguments")
    if not _is_list(platforms) or not all(p in PLATFORMS for p in platforms):
        raise OptionError(f"platforms is {platforms!r}; give a list out of {', '.join(PLATFORMS)}")
    if name is not None and not isinstance(name, str):
        raise OptionError(f"name is {name!r}; give a word for reports, or None")
    if not isinstance(rows, str):
        raise OptionError(f'rows is {rows!r}; give letters in one text, such as "M"')
    if numerics not in CLASSES:
        raise OptionError(f"numerics is {numerics!r}; give one of {', '.join(CLASSES)}")


def _is_list(given: object) -> bool:
    return isinstance(given, Collection) and not isinstance(given, (str, bytes))


def _check_keywords(function: ArrayFunction, names: Sequence[str]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    missing = [name for name in names if name not in signature.parameters and not takes_any]
    if missing:
        raise OptionError(f"the replacement takes no keyword argument {', '.join(missing)}")


def _check_block_sizes(
    block_sizes: Sizes | None, candidates: Candidates | None, axes: Axes, scalars: Sequence[str]
) -> None:
    if not isinstance(block_sizes, Mapping) or not block_sizes:
        raise OptionError(f'block_sizes is {block_sizes!r}; give names with defaults, such as {{"row_block": 128}}')
    for name, value in block_sizes.items():
        if not isinstance(name, str) or not name.isidentifier() or name in scalars:
            raise OptionError(f"block_sizes has the name {name!r}; give other keyword arguments than the scalars")
        if type(value) not in (int, bool, str):
            raise OptionError(f"block_sizes has {name}={value!r}; give a whole number, a truth value or a word")
    if not axes.operands:
        raise OptionError("block sizes are chosen by the sizes of axes; declare these: operands=..., result=...")
    if candidates is not None and not callable(candidates):
        raise OptionError(f"candidates is {candidates!r}; give a function of a spec")


def _check_candidates(pattern: Pattern) -> None:
    try:
        pattern.operation.block_sizes.candidates(pattern.operation.sample)
    except Exception as error:
        reason = one_line(error)
        raise OptionError(f"the candidates of the pattern {pattern.name} fail for its example: {reason}") from error
