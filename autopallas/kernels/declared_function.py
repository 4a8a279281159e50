"""The public function of a declared operation: its arguments, its docstring and its derivative by the declaration."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable
from itertools import pairwise
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.compat import ArrayFunction
from autopallas.sites.calls import kernel_backward, kernel_forward
from autopallas.sites.declared import DeclaredOperation, DeclaredSite, Result, declared_named
from autopallas.sites.declared_call import (
    checked_parameters,
    kind_of,
    main_operand,
    operand_names,
    parameters,
    result_dtype_of,
    shape_in_letters,
    site_of,
)
from autopallas.sites.device import Device
from autopallas.sites.operation import Operation
from autopallas.sites.spec import BlockSizes, NoBlockSizes
from autopallas.tuning.direct import block_sizes_for

__all__ = ["function_named", "public_function"]

Arrays: TypeAlias = tuple[jax.Array, ...]


@functools.cache
def function_named(name: str) -> ArrayFunction:
    """Returns the public function of the declared operation of a name."""
    return public_function(declared_named(name))


def public_function(operation: DeclaredOperation) -> Callable[..., Result]:
    """Returns the function that computes a declared operation.

    Its arguments are the operands in the order of the reference's, and by name the parameters of the spec,
    ``result_dtype``, the dtype of each further result, ``implementation`` and ``block_sizes``.
    """
    signature = _signature(operation)

    def function(*given: object, **named: object) -> Result:
        try:
            bound = signature.bind(*given, **named)
        except TypeError as error:
            raise TypeError(f"{operation.name}{signature}: {error}") from None
        bound.apply_defaults()
        arguments = bound.arguments
        values = checked_parameters(operation, {name: arguments[name] for name in parameters(operation)})
        arrays = {
            n: arguments[n] for n, lacks in operand_names(operation).items() if not lacks or arguments[n] is not None
        }
        dtype, *more = (
            None if (dtype := arguments[f"{name}_dtype"]) is None else np.dtype(dtype)
            for name in ("result", *operation.further)
        )
        further = dict(zip(operation.further, more, strict=True))
        site = site_of(operation, arrays, values, dtype, further)
        block_sizes = _checked_block_sizes(operation, arguments["block_sizes"])
        device = Device.current()

        def call(name: str) -> Result:
            chosen = block_sizes_for(operation.name, site.spec, device, name, block_sizes)
            results: Arrays = _computed(site, name, chosen, tuple(arrays.values()))
            return results if site.further else results[0]

        return operation.first_that_works(site.spec, device, arguments["implementation"], call)

    function.__name__ = function.__qualname__ = operation.name
    function.__module__ = operation.package
    function.__doc__ = _docstring(operation)
    function.__signature__ = signature  # type: ignore[attr-defined]
    return function


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _computed(site: DeclaredSite, name: str, block_sizes: tuple[BlockSizes, BlockSizes], operands: Arrays) -> Arrays:
    """The kernel ``name`` on whole arrays, with its derivative; block sizes for forward alone, and for both."""
    results, _ = kernel_forward(site, name, block_sizes[0])(*operands)
    return tuple(results)


def _forward(
    site: DeclaredSite, name: str, block_sizes: tuple[BlockSizes, BlockSizes], operands: Arrays
) -> tuple[Arrays, tuple[Arrays, Arrays]]:
    """The backward reads further results too, and not the first."""
    results, _ = kernel_forward(site, name, block_sizes[1])(*operands)
    return tuple(results), (operands, tuple(results[1:]))


def _backward(
    site: DeclaredSite,
    name: str,
    block_sizes: tuple[BlockSizes, BlockSizes],
    known: tuple[Arrays, Arrays],
    cotangents: Arrays,
) -> tuple[tuple[jax.Array | None, ...]]:
    operands, further = known
    active = tuple(i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating))
    results = (cotangents[0], *further)  # of the first one, only its type counts
    gradients = kernel_backward(site, name, block_sizes[1], active)(operands, results, (), cotangents)
    found = dict(zip(active, gradients, strict=True))
    return (tuple(found.get(i) for i in range(len(operands))),)


_computed.defvjp(_forward, _backward)


def _signature(operation: DeclaredOperation) -> inspect.Signature:
    one, empty = inspect.Parameter, inspect.Parameter.empty
    own = [
        one(name, one.POSITIONAL_OR_KEYWORD, default=None if lacks else empty)
        for name, lacks in operand_names(operation).items()
    ]
    dtypes = (f"{name}_dtype" for name in ("result", *operation.further))
    named = parameters(operation) | dict.fromkeys((*dtypes, "implementation", "block_sizes"))
    own += [one(name, one.KEYWORD_ONLY, default=default) for name, default in named.items()]
    return inspect.Signature(own)


def _checked_block_sizes(operation: DeclaredOperation, given: BlockSizes | None) -> BlockSizes | None:
    kind: object = operation.part("block_sizes").BlockSizes
    if given is None or type(given) is kind:
        return given
    in_module = Operation.module(operation, "block_sizes") is not None
    own = "block_sizes.BlockSizes" if in_module else "operation.OPERATION.block_sizes"
    none = kind is NoBlockSizes
    remedy = f"{operation.name} has none: leave them out" if none else f"pass one of {operation.package}.{own}"
    raise TypeError(f"block_sizes is a {type(given).__name__}; {remedy}")


_ANY_AXES = "any number of axes, or none, along which arrays are broadcast as by NumPy"


def _docstring(operation: DeclaredOperation) -> str:
    """The formula of the spec, and the shapes of what goes in and comes out."""
    spec, first, further = type(operation.sample), operation.first_row, operation.rows.split()[1:]
    formula = inspect.cleandoc(spec.__doc__ or "what its reference says.").split("\n\n")[0]
    letters = ", ".join(f"{letter} {name.replace('_', ' ')}" for letter, name in operation.sizes.items())
    meanings, arguments = _meanings(spec), []
    for name, lacks in operand_names(operation).items():
        shape = shape_in_letters(operation, operation.operands[name])
        arguments.append(f"{name}: {shape}, {kind_of(operation, name)}{'; may be left out' if lacks else ''}.")
    for name, default in parameters(operation).items():
        meaning = meanings.get(name) or f"a {type(getattr(operation.sample, name)).__name__}"
        given = "" if default is inspect.Parameter.empty else f"; {default} by default"
        arguments.append(f"{name}: {_within(meaning).rstrip('.')}{given}.")
    main = main_operand(operation)
    several = ", or a tuple of it and the further results that are asked for" if operation.further else ""
    by_default = f"that of {main}" if main is not None else str(result_dtype_of(operation, {}))
    lines = [
        f"``{operation.name}`` computes {_within(formula)}",
        "",
        "Differentiable in reverse mode once; forward mode and second derivatives are not available here",
        "(``autopallas.optimize`` has them).",
        "",
        *textwrap.wrap(f"Letters: {letters}; {first}... is {_ANY_AXES}.", width=116),
        *(f"The axis {letter} may be left out where its size is 1." for letter in further),
        "",
        "Arguments:",
        *(line for own in arguments for line in textwrap.wrap(own, 118, initial_indent="  ", subsequent_indent="    ")),
        f"  result_dtype: the dtype of the result; {by_default} by default.",
        *(f"  {name}: {_within(meanings[name])}" for name in (f"{name}_dtype" for name in operation.further)),
        '  implementation: None for the best one here, a name ("xla", "reference", ...), or a sequence of names to try',
        "    in order, with a warning for each that cannot be used.",
        "  block_sizes: tile sizes, where the operation has any; from the cache or the tuned table by default.",
        "",
        "Returns:",
        f"  {shape_in_letters(operation, operation.result)}{several}.",
        "",
        "Raises:",
        "  TypeError, ValueError: an argument has the wrong type, dtype, rank or size.",
        "  UnsupportedError: the named implementation cannot compute this, or none of several can.",
    ]
    return "\n".join(lines)


def _within(sentence: str) -> str:
    """A sentence within another one; a letter that stands for a size stays as it is."""
    return sentence if sentence[1:2] == " " and sentence[0] != "A" else sentence[0].lower() + sentence[1:]


def _meanings(spec: type) -> dict[str, str]:
    """What is written under the fields of a spec and of what it is derived from, where the source is at hand."""
    found: dict[str, str] = {}
    for kind in reversed(spec.__mro__):
        try:
            (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except (OSError, SyntaxError, TypeError, ValueError):
            continue
        assert isinstance(definition, ast.ClassDef)
        for one, below in pairwise(definition.body):
            match one, below:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    found[name] = " ".join(text.split())
    return found
