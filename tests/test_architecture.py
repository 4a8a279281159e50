"""What may import what (docs/architecture.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import autopallas
from autopallas.sites.operation import operation_folders, operation_named, operation_names

ROOT = Path(autopallas.__file__).parent
MODULES = {
    ".".join(("autopallas", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
FLOORS = (
    {"array_types", "compat", "jaxprs", "environment", "numerics", "sites", "places", "errors", "version"}
    | {
        "arguments",
        "closed_over",
        "flags",
        "gc_pause",
        "held_jit",
        "key_order",
        "own_frames",
        "place_selectors",
        "progress",
        "trace_context",
    },
    {"report", "faults"},
    {
        "graph",
        "kernels",
        "tuning",
        "options",
        "compile",
        "autotune",
        "court",
        "custom",
        "patterns",
        "tokamax",
        "workbench",
    },
    {"plan", "rewrite", "sharding", "fallback"},
    {"invariants", "passes", "pipeline", "verification", "plain_calls", "optimized", "optimize"},
    {"autopallas", "cli", "__main__"},
)
"""From the ground up.  A room imports from its own floor and from those below."""


def imports(path: Path) -> Iterator[str]:
    """The modules that one imports when it is imported or run; not what only its annotations name."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autopallas"):
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)


GRAPH = {name: set(imports(path)) - {name} for name, path in MODULES.items()}


def reached(start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        for name in GRAPH[todo.pop()] - found:
            found.add(name)
            todo.append(name)
    return found


def test_no_modules_import_each_other_in_a_circle():
    """But a report and its pages: it prints itself."""
    circles = {name for name in GRAPH if name in reached(name)}
    assert {name for name in circles if not name.startswith("autopallas.report.")} == set()


def test_rooms_import_from_their_own_floor_and_from_those_below():
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    room = lambda name: name.split(".")[1] if "." in name else name  # noqa: E731
    assert {room(name) for name in MODULES} == set(floor_of)
    upward = {
        (name.removeprefix("autopallas."), other.removeprefix("autopallas."))
        for name, others in GRAPH.items()
        for other in others
        if floor_of[room(other)] > floor_of[room(name)]
    }
    assert upward == set()


FOLDERS = sorted(path.parent.name for path in ROOT.glob("kernels/*/operation.py"))
PARTS = {part: name for name in operation_names() for part in operation_folders(name)[1:]}


def test_every_folder_of_kernels_declares_an_operation_or_a_part_of_one():
    assert {*operation_names(), *PARTS} == set(FOLDERS)
    assert {operation_named(folder).package for folder in FOLDERS} == {f"autopallas.kernels.{f}" for f in FOLDERS}


def test_a_part_of_an_operation_is_known_to_itself_and_its_pattern_alone():
    """Its operation has no need of it, and others ask the site for what they need."""
    own = {part: (f"autopallas.kernels.{part}", f"autopallas.patterns.{part}") for part in PARTS}
    strangers = {
        (name, other)
        for part, homes in own.items()
        for name, others in GRAPH.items()
        for other in others
        if other.startswith(homes[0]) and not name.startswith(homes)
    }
    assert PARTS
    assert strangers == set()


def test_any_stands_only_where_jax_gives_no_type():
    """Names of ``typing.Any`` in code: JAX's own objects, and JSON that is not yet looked at."""
    found = {
        name: sum(isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(ast.parse(path.read_text())))
        for name, path in MODULES.items()
    }
    assert sum(found.values()) <= 40, {name: count for name, count in found.items() if count}
