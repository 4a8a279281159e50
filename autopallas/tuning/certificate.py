"""Digests of programs: equal for programs that are lowered to the same StableHLO, wherever their code stands.

A digest is that of the text of the module, without locations and scopes.  Names of functions in it are replaced by
numbers, and arrays that the program captured by digests of their bytes.  Kernels count too, without the lines of their
code.
"""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
from collections.abc import Mapping

import jax
import numpy as np

from autopallas import array_types, compat, jaxprs
from autopallas.compat import ClosedJaxpr
from autopallas.errors import one_line
from autopallas.sites import random_keys
from autopallas.sites.device import Device
from autopallas.tuning import processor
from autopallas.tuning.lock import Lock
from autopallas.version import __version__

__all__ = ["digest_of", "normalized", "problem", "setting"]

_KERNEL = re.compile(r'(?P<name>body|debug_locations|module)(?P<quote>\\22|"): (?P=quote)(?P<data>[A-Za-z0-9+/=]{16,})')
_FUNCTION = re.compile(r'func\.func (?:public |private )?@(?P<name>"[^"]*"|[\w.$-]+)')
_MODULE = re.compile(r'^module @(?:"[^"]*"|[\w.$-]+)', re.MULTILINE)
_NAME = re.compile(r'@(?P<name>"[^"]*"|[\w.$-]+)')


def setting(device: Device, versions: Mapping[str, str]) -> str:
    """Returns what a digest holds for: a device, and the versions of what lowers the program.

    Example:
      >>> setting(Device("tpu", "TPU v5e"), {"jax": "0.12.0", "jaxlib": "0.12.0", "python": "3.12.1"}).split(", ")[:2]
      ['TPU v5e', 'jax 0.12.0']
    """
    own = {"jax": versions["jax"], "jaxlib": versions["jaxlib"], "autopallas": __version__, **processor.told(device)}
    return ", ".join([device.kind or device.platform, *(f"{name} {version}" for name, version in own.items())])


def digest_of(program: ClosedJaxpr) -> str:
    """Returns the digest of what a program is lowered to, for the default device.

    Args:
      program: a closed jaxpr, with its sites.
    """
    jaxpr, consts = jaxprs.open_jaxpr(program)
    inputs = [*jaxpr.constvars, *jaxpr.invars]
    closed = jaxprs.rebuild(program, [], [], inputs, jaxpr.outvars, jaxpr.eqns)
    run = jax.jit(compat.jaxpr_as_fun(closed), keep_unused=True)
    text = run.trace(*(array_types.typed_like(v.aval) for v in inputs)).lower().as_text()
    found = hashlib.sha256(normalized(text).encode())
    for constant in consts:
        found.update(_bytes(constant))
    return f"sha256:{found.hexdigest()}"


def problem(program: ClosedJaxpr, lock: Lock, device: Device) -> str:
    """Returns why a lockfile does not certify a program, or an empty string if it does.

    Args:
      program: the rewritten program, a closed jaxpr.
      lock: the lockfile.
      device: the default device.
    """
    here = setting(device, compat.versions())
    locked = lock.digests.get(here)
    if locked is None:
        known = "; ".join(sorted(lock.digests)) or "nothing"
        return f"it has no digest for {here}, only for {known}. `autopallas lock` adds one where it is run"
    try:
        found = digest_of(program)
    except Exception as error:
        return f"its digest cannot be computed: {one_line(error)}"
    if found == locked:
        return ""
    return (
        f"its digest is {found}, and {locked} is locked, for the arguments {lock.shapes or 'without arrays'}. "
        "`autopallas check` tells what became of each site"
    )


def _bytes(constant: jax.Array) -> bytes:
    array = np.asarray(random_keys.data(constant))
    return f"{array.dtype.name}{list(array.shape)}".encode() + array.tobytes()


def normalized(text: str) -> str:
    """Returns the text of a module without what does not change what it computes.

    Example:
      >>> print(normalized("module @jit_step {\\n  func.func private @_where_7(%0: i1) { call @_where_7(%0) }"))
      module @program {
        func.func private @function0(%0: i1) { call @function0(%0) }
    """
    text = _MODULE.sub("module @program", _KERNEL.sub(_kernel, text))
    numbers = (f"@function{number}" for number in itertools.count())
    names = {found["name"]: next(numbers) for found in _FUNCTION.finditer(text)}
    return _NAME.sub(lambda found: names.get(found["name"], found[0]), text)


def _kernel(found: re.Match[str]) -> str:
    """Returns a kernel's module without locations; as it is where it cannot be read."""
    if found["name"] == "debug_locations":
        return found["name"]
    try:
        return f"{found['name']} {compat.module_text(base64.b64decode(found['data'], validate=True))}"
    except Exception:  # MLIR has errors of its own
        return found[0]
