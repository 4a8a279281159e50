"""``autopallas doctor``: tells what this machine has, which implementations work on it, and why the others do not."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import textwrap
from collections import Counter
from typing import TYPE_CHECKING, TypedDict

from autopallas.errors import one_line, printable

if TYPE_CHECKING:
    from autopallas.sites.device import Device

__all__ = ["add"]

_PACKAGES = ("jax", "jaxlib", "numpy", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "tokamax", "rich")
_ELSEWHERE = ("JAX_PLATFORMS", "JAX_ENABLE_X64", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "CUDA_VISIBLE_DEVICES")
"""Variables of other programs that decide what autopallas sees or how fast it is."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    found = _examined()
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(found)))
    return int(bool(found["problems"]))


# ---------------------------------------------------------------------- examining


class Machine(TypedDict):
    system: str
    architecture: str
    cores: int
    vector_extensions: str | None


class DeviceKind(TypedDict):
    platform: str
    kind: str
    count: int


class Answer(TypedDict):
    """Answer of an implementation for the typical site."""

    usable: bool
    reason: str


class Asked(TypedDict):
    """Facts about an operation."""

    recognised: bool
    sample: str
    order: list[str]
    implementations: dict[str, Answer]


class Kept(TypedDict):
    """The folder of tuning results."""

    folder: str | None
    results: int
    bytes: int
    writable: bool


class Environment(TypedDict):
    variables: dict[str, str]
    options: dict[str, object]


class Examined(TypedDict):
    versions: dict[str, str]
    machine: Machine
    devices: list[DeviceKind]
    operations: dict[str, Asked]
    cache: Kept
    environment: Environment
    problems: list[str]


def _examined() -> Examined:
    """Returns all findings, as JSON's types; each problem is a sentence in ``problems``."""
    problems: list[str] = []
    versions = _versions()
    devices, current = _devices(problems)
    return {
        "versions": versions,
        "machine": _machine(),
        "devices": devices,
        "operations": {} if current is None else _operations(current, problems),
        "cache": _cache(problems),
        "environment": _environment(problems),
        "problems": problems,
    }


def _versions() -> dict[str, str]:
    import autopallas

    found = {"autopallas": autopallas.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            pass
    return found


def _machine() -> Machine:
    from autopallas.tuning import processor

    return {
        "system": platform.system(),
        "architecture": platform.machine(),
        "cores": _cores(),
        "vector_extensions": processor.vector_extensions(),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _devices(problems: list[str]) -> tuple[list[DeviceKind], Device | None]:
    """Returns (each kind of device and how many there are, the device that programs run on)."""
    import jax

    from autopallas.sites.device import Device

    try:
        kinds = Counter((device.platform, device.device_kind) for device in jax.devices())
        listed: list[DeviceKind] = [
            {"platform": name, "kind": kind, "count": count} for (name, kind), count in kinds.items()
        ]
        return listed, Device.current()
    except Exception as error:
        problems.append(f"JAX finds no device: {one_line(error)}")
        return [], None


def _operations(device: Device, problems: list[str]) -> dict[str, Asked]:
    """Returns, per operation, its site in a typical program, each implementation's answer, and the order of asking."""
    from autopallas.compat import make_jaxpr
    from autopallas.environment import OPERATIONS
    from autopallas.errors import OptionError
    from autopallas.graph import Graph, flatten
    from autopallas.patterns import find
    from autopallas.sites.operation import Supported, Unsupported, implementation_names, operation_named

    found: dict[str, Asked] = {}
    for op in OPERATIONS:
        try:
            program, shapes = operation_named(op).program()
            matches, _ = find(Graph(flatten(make_jaxpr(program, *shapes))), (op,), True)
        except Exception as error:
            problems.append(f"recognition of {op} fails: {one_line(error)}")
            continue
        if not matches:
            found[op] = {"recognised": False, "sample": "", "order": [], "implementations": {}}
            continue
        operation, spec = matches[0].site.operation, matches[0].spec
        answers: dict[str, Answer] = {}
        for name in filter(operation.has, implementation_names()):
            try:
                answer = operation.supports(name, spec, device)
            except OptionError as error:  # reported with the environment
                answer = Unsupported(str(error))
            except Exception as error:
                problems.append(f"{op}: asking {name} fails: {one_line(error)}")
                continue
            reason = answer.reason if isinstance(answer, Unsupported) else ""
            answers[name] = {"usable": isinstance(answer, Supported), "reason": reason}
        order = list(operation.requested(None, device))
        found[op] = {"recognised": True, "sample": str(spec), "order": order, "implementations": answers}
    return found


def _cache(problems: list[str]) -> Kept:
    from autopallas.errors import OptionError
    from autopallas.tuning.cache import Cache

    try:
        cache = Cache.current()
    except OptionError:  # reported with the environment
        return {"folder": None, "results": 0, "bytes": 0, "writable": False}
    folder = cache.folder
    if folder is None:
        problems.append("there is no folder for tuning results; set AUTOPALLAS_CACHE_DIR")
        return {"folder": None, "results": 0, "bytes": 0, "writable": False}
    unreadable = cache.unreadable()
    files = [] if unreadable else [f for f in folder.glob("*.json") if f.is_file()]
    existing = next(part for part in (folder, *folder.parents) if os.path.exists(part))
    writable = os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK)
    if not writable:
        problems.append(f"tuning results cannot be kept: {existing} cannot be written to")
    elif unreadable:
        problems.append(f"tuning results cannot be used: {folder} cannot be read: {unreadable}")
    size = sum(f.stat().st_size for f in files)
    return {"folder": str(folder), "results": len(files), "bytes": size, "writable": writable}


def _environment(problems: list[str]) -> Environment:
    """Returns the variables that are set, and the options that result from them, if they differ from the defaults."""
    from dataclasses import fields

    from autopallas.errors import OptionError
    from autopallas.options import Options, resolve

    names = sorted(name for name in os.environ if name.startswith("AUTOPALLAS_") or name in _ELSEWHERE)
    try:
        options, default = resolve({}), Options()
        changed = {f.name: getattr(options, f.name) for f in fields(Options)}
        changed = {name: value for name, value in changed.items() if value != getattr(default, name)}
    except OptionError as error:
        problems.append(str(error))
        changed = {}
    return {"variables": {name: os.environ[name] for name in names}, "options": changed}


# ---------------------------------------------------------------------- telling


def _lines(found: Examined) -> list[str]:
    """Formats the findings for people, in 80 columns."""
    machine = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    cores = f"{machine['cores']} core{'s' * (machine['cores'] > 1)}"
    system = f"{machine['system']} {machine['architecture']}, {cores}"
    system += f", vector extensions: {machine['vector_extensions'] or 'unknown'}"
    devices = "; ".join(f"{d['count']} x {_device(d)}" for d in found["devices"]) or "none"
    cache = found["cache"]
    kept = f"{cache['results']} results, {_size(cache['bytes'])}, in {cache['folder'] or 'no folder'}"
    lines = [*_row("versions", versions), *_row("machine", system), *_row("devices", devices), *_row("cache", kept)]
    variables = found["environment"]["variables"]
    options = found["environment"]["options"]
    lines += _row("environment", " ".join(f"{k}={v}" for k, v in variables.items()) or "nothing set")
    if options:
        lines += _row("options", ", ".join(f"{name}={value!r}" for name, value in options.items()))
    lines += ["", "Implementations, asked about a typical site of each operation:"]
    for op, told in found["operations"].items():
        lines += ["", op if told["recognised"] else f"{op}: not recognised by this version"]
        for name in sorted(told["implementations"], key=lambda n: (told["order"] + [n]).index(n)):
            answer = told["implementations"][name]
            place = f"asked {_ordinal(told['order'].index(name))}" if name in told["order"] else "on request"
            state = f"usable, {place}" if answer["usable"] else f"not usable: {answer['reason']}"
            lines += _row(f"  {name}", state)
    if found["problems"]:
        lines += ["", "Problems:"]
        lines += [line for p in found["problems"] for line in textwrap.wrap(f"- {p}", 80, subsequent_indent="  ")]
    else:
        lines += ["", "No problems found."]
    return lines


def _row(label: str, text: str) -> list[str]:
    lead = f"{label:<15} "
    return textwrap.wrap(
        printable(text), 80, initial_indent=lead, subsequent_indent=" " * len(lead), drop_whitespace=True
    )


def _device(device: DeviceKind) -> str:
    return device["platform"] if device["kind"] == device["platform"] else f"{device['kind']} ({device['platform']})"


def _ordinal(position: int) -> str:
    return ("first", "second", "third", "fourth", "fifth")[position]


def _size(count: int) -> str:
    if count < 2**10:
        return f"{count} bytes"
    return f"{count / 2**10:.0f} KiB" if count < 2**20 else f"{count / 2**20:.1f} MiB"
