"""Writes sites as plain data (JSON) and reads them back, so that a saved report can be tuned for.

Reading builds only dataclasses of this package that describe sites, and looks up only elementwise primitives of JAX;
it imports nothing that the data names, and executes nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Literal, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from autopallas import compat
from autopallas.compat import ClosedJaxpr, Dtype, Shaped
from autopallas.sites.calls import SiteDescription
from autopallas.sites.declared import DeclaredOperation
from autopallas.sites.operation import operation_named, operation_names, registered
from autopallas.sites.random_keys import dtype_named
from autopallas.sites.spec import SiteSpec
from autopallas.sites.workload import Gradients, SiteWorkload

__all__ = ["EncodingError", "SavedSite", "encoded", "saved_site"]

Direction: TypeAlias = Literal["forward", "forward+backward"]

FORMAT = 3
"""Version number, which rises whenever the encoding of sites changes."""

_SHARED = ("autopallas.sites.elementwise", "autopallas.sites.index_notation", "autopallas.sites.declared")
_MOST_ELEMENTS = 2**40
_DEEPEST = 60


class EncodingError(ValueError):
    """Raised where data describe no site, or a site has no description as data."""


@dataclass(frozen=True, eq=False)
class SavedSite:
    """A site without its program, in the form that searches need instead of a match.

    The operation's reference takes the place of the original: the same computation, as vanilla JAX.

    Attributes:
      op, direction, location: those of the match.
      site: the description of the computation.
      original: the reference as a closed jaxpr of the site's operands.
      backwards: as many as the program held, each with the positions of the operands whose gradients it computes.
      then: further passes.
    """

    op: str
    site: SiteDescription
    direction: Direction
    original: ClosedJaxpr
    backwards: tuple[Gradients, ...]
    location: str = ""
    then: tuple[SavedSite, ...] = ()

    @property
    def passes(self) -> tuple[SavedSite, ...]:
        return (self, *self.then)

    @property
    def spec(self) -> SiteSpec:
        return self.site.spec


@dataclass(frozen=True)
class _Backward:
    gradients: tuple[tuple[int, int], ...]


# ---------------------------------------------------------------------- writing


def encoded(match: SiteWorkload) -> dict[str, object] | None:
    """Returns a match as data, from which :func:`saved_site` makes a site to tune for; None if it has no such form."""
    try:
        return {"format": FORMAT, "passes": [_pass(part) for part in match.passes]}
    except EncodingError:
        return None


def _pass(part: SiteWorkload) -> dict[str, object]:
    gradients = sorted({position for backward in part.backwards for position, _ in backward.gradients})
    return {
        "site": _data(part.site, _classes(part.op)),
        "operands": [_type(t) for t in part.original.in_avals],
        "results": [_type(t) for t in part.original.out_avals],
        "gradients": gradients if part.backwards else None,
    }


def _type(aval: Shaped) -> list[object]:
    return [list(aval.shape), aval.dtype.name]


def _data(value: object, classes: Mapping[str, type]) -> object:
    """Returns a value as data, which may hold instances of ``classes``."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (bool, np.bool_)):
        return bool(value)
    if isinstance(value, enum.Enum):
        if getattr(jax.lax, type(value).__name__, None) is not type(value):
            raise EncodingError(f"{value!r} has no form as data")
        return {"enum": [type(value).__name__, value.name]}
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, Primitive):
        if _primitives().get(value.name) is not value:
            raise EncodingError(f"the primitive {value.name} is not one of JAX's elementwise ones")
        return {"primitive": value.name}
    if isinstance(value, tuple):
        return [_data(item, classes) for item in value]
    if classes.get(type(value).__name__) is type(value) and dataclasses.is_dataclass(value):
        fields = {f.name: _data(getattr(value, f.name), classes) for f in dataclasses.fields(value) if f.init}
        return {"is": type(value).__name__, **fields}
    keys = dtype_named(str(value))
    if keys is not None and keys == value:
        return {"dtype": keys.name}
    raise EncodingError(f"{value!r} has no form as data")


# ---------------------------------------------------------------------- reading


def saved_site(op: str, direction: str, data: object, location: str = "") -> SavedSite:
    """Returns the site that :func:`encoded` described.

    Args:
      op: the site's operation.
      direction: "forward" or "forward+backward".
      data: the result of ``encoded``, perhaps from another machine, or anything else.
      location: the site's place in the source; for people.

    Raises:
      EncodingError: the data describe no site of that operation.
    """
    if op not in (*operation_names(), *(operation.name for operation in registered())):
        raise EncodingError(f"no operation is called {op!r}")
    if direction not in ("forward", "forward+backward"):
        raise EncodingError(f"{direction!r} is no direction")
    if not isinstance(data, Mapping) or data.get("format") != FORMAT or not isinstance(data.get("passes"), list):
        raise EncodingError(f"it describes no site in format {FORMAT}")
    if not 0 < len(data["passes"]) <= 8:
        raise EncodingError("it has no passes, or too many")
    try:
        first, *then = (_read_pass(op, cast(Direction, direction), part, location) for part in data["passes"])
    except EncodingError:
        raise
    except Exception as error:  # fields of a wrong type fail in the site's own arithmetic
        raise EncodingError(f"it describes no {op}: {type(error).__name__}: {error}") from None
    return dataclasses.replace(first, then=tuple(then))


def _read_pass(op: str, direction: Direction, data: object, location: str) -> SavedSite:
    if not isinstance(data, dict) or data.keys() != {"site", "operands", "results", "gradients"}:
        raise EncodingError("a pass has other fields than it should")
    site = cast(SiteDescription, _value(data["site"], _classes(op), 0))
    if not hasattr(site, "forward") or site.operation.name != op:
        raise EncodingError(f"it describes no site of {op}")
    operands, results = ([_read_type(item) for item in data[name]] for name in ("operands", "results"))
    reference = site.operation.implementation("reference")
    original = compat.make_jaxpr(lambda *arrays: site.forward(reference, None, arrays)[0], *operands)
    if [_type(t) for t in original.out_avals] != [_type(t) for t in results]:
        raise EncodingError("its results are not what the site gives")
    gradients = data["gradients"]
    backwards: tuple[_Backward, ...] = ()
    if gradients is not None:
        if not set(gradients) <= set(range(len(operands))):
            raise EncodingError("it has gradients of operands that it does not have")
        backwards = (_Backward(tuple((int(position), -1) for position in gradients)),)
    site.spec.to_dict()
    return SavedSite(op, site, direction, original, backwards, location)


def _read_type(data: tuple[Sequence[int], str]) -> jax.ShapeDtypeStruct:
    shape, name = data
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape) or math.prod(shape) > _MOST_ELEMENTS:
        raise EncodingError(f"{str(shape)[:60]} is no shape")
    return jax.ShapeDtypeStruct(tuple(shape), _dtype(name))


def _dtype(name: str) -> Dtype:
    keys = dtype_named(name)
    if keys is not None:
        return keys
    known = isinstance(name, str) and name.isidentifier() and isinstance(getattr(jnp, name, None), type(jnp.float32))
    if not known and name != "bool":
        raise EncodingError(f"{str(name)[:60]!r} is no dtype")
    return np.dtype(getattr(jnp, name)) if known else np.dtype(bool)


def _value(data: object, classes: Mapping[str, type], depth: int) -> object:
    if depth > _DEEPEST:
        raise EncodingError("it is nested too deeply")
    if data is None or isinstance(data, (bool, int, float, str)):
        return data
    if isinstance(data, Sequence):
        return tuple(_value(item, classes, depth + 1) for item in data)
    if not isinstance(data, Mapping):
        raise EncodingError("it is not JSON")
    if "is" in data:
        kind = classes.get(data["is"]) if isinstance(data["is"], str) else None
        if kind is None:
            raise EncodingError(f"nothing in a site is called {str(data['is'])[:60]!r}")
        names = {f.name for f in dataclasses.fields(kind) if f.init}
        if data.keys() - {"is"} != names:
            raise EncodingError(f"{data['is']} has other fields than it should: it is of another version")
        return kind(**{name: _value(data[name], classes, depth + 1) for name in names})
    if len(data) == 1:
        ((tag, value),) = data.items()
        if tag == "dtype":
            return _dtype(value)
        if tag == "float" and value in ("inf", "-inf", "nan"):
            return float(value)
        if tag == "primitive" and isinstance(value, str) and value in _primitives():
            return _primitives()[value]
        if tag == "enum" and isinstance(value, list) and len(value) == 2 and all(isinstance(v, str) for v in value):
            kind = getattr(jax.lax, value[0], None)
            if isinstance(kind, type) and issubclass(kind, enum.Enum) and value[1] in kind.__members__:
                return kind[value[1]]
    raise EncodingError(f"{str(dict(data))[:60]} describes nothing")


def _classes(op: str) -> Mapping[str, type]:
    """Returns the dataclasses that a site of an operation may consist of."""
    operation = operation_named(op)
    sample = [type(operation.sample)] if isinstance(operation, DeclaredOperation) else []
    return _classes_of_modules(op) | {kind.__name__: kind for kind in sample}


@functools.cache
def _classes_of_modules(op: str) -> dict[str, type]:
    found: dict[str, type] = {}
    modules = [importlib.import_module(name) for name in _SHARED]
    own = (operation_named(op).module(name) for name in ("operation", "spec", "site", "site_parts", "sum_site"))
    modules += [module for module in own if isinstance(module, ModuleType)]
    for module in modules:
        found |= _dataclasses(module)
    return found


def _dataclasses(module: ModuleType) -> dict[str, type]:
    inside = (value for value in vars(module).values() if isinstance(value, type))
    return {kind.__name__: kind for kind in inside if dataclasses.is_dataclass(kind)}


@functools.cache
def _primitives() -> Mapping[str, Primitive]:
    """Returns JAX's primitives by name."""
    from jax.extend.core import primitives  # here, since the import takes a while

    return {p.name: p for p in vars(primitives).values() if isinstance(p, Primitive)}
