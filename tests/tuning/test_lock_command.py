"""``autopallas lock`` and ``check``: what a program was, written down, and whether it still is."""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import autopallas
from autopallas.cli import CommandError, main
from autopallas.cli.shapes import shapes_of
from autopallas.tuning.lock import Lock

MODULE = """
import autopallas, jax, jax.numpy as jnp

def attend(q, k, v):
    scores = q @ k.T / 8
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ v

def two(q, k, v):
    return attend(attend(q, k, v), k, v)

def step(parameters, x):
    return jax.grad(lambda p: jnp.sum(attend(x @ p["q"], x, x) ** 2))(parameters)

optimized = autopallas.optimize(attend, objective="always")
"""
HOLDS = "sites.lock: 2 of 2 applied sites hold\nthe program: it is the one that was locked\n"
SHAPES = "f32[600,64],f32[600,64],f32[600,64]"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes the module that the commands import, into the folder that they run in; each write is a new module."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def write(text=MODULE):
        (tmp_path / "lockable.py").write_text(text)
        importlib.invalidate_caches()
        sys.modules.pop("lockable", None)
        for cached in tmp_path.glob("__pycache__/*"):
            cached.unlink()
        jax.clear_caches()

    write()
    yield write
    sys.modules.pop("lockable", None)


def run(capsys, *arguments):
    """(exit status, standard output, standard error); a traceback would fail the test."""
    try:
        status = main(arguments)
    except SystemExit as stopped:
        status = stopped.code
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def lock(capsys, function="lockable:two", *arguments, shapes=SHAPES):
    status, out, err = run(capsys, "lock", function, "--shapes", shapes, "-o", "sites.lock", *arguments)
    assert status == 0, err
    return out


# --- lock ------------------------------------------------------------------------------------------------------------


def test_what_is_no_file_is_written_to_and_not_replaced(module, capsys, tmp_path):
    """As ``-o /dev/null`` would be, by who may do so."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    words = ("lock", "lockable:attend", "--shapes", SHAPES, "-o", str(pipe))
    command = threading.Thread(target=main, args=(words,), daemon=True)
    command.start()
    command.join(60)
    reader.join(1)
    assert not command.is_alive()
    assert pipe.is_fifo()
    assert len(Lock.from_json(read[0]).sites) == 1


def test_lock_writes_what_optimize_then_does(module, capsys, tmp_path):
    out = lock(capsys)
    assert "2 applied, 0 kept" in out
    assert "attention at lockable.py:7 (attend): applied xla query_block=" in out
    assert out.endswith(", 2 times\n"), "sites of one place are one line"
    written = Lock.from_json((tmp_path / "sites.lock").read_text())
    assert [site.location for site in written.sites] == ["lockable.py:7 (attend)"] * 2
    optimized = autopallas.optimize(importlib.import_module("lockable").two, lock="sites.lock", strict=True)
    x = jax.ShapeDtypeStruct((600, 64), jnp.float32)
    optimized.lower(x, x, x)
    assert [site.block_sizes for site in optimized.report().sites] == [site.block_sizes for site in written.sites]
    assert optimized.report().counts()["attention"] == 2


def test_a_lockfile_is_the_same_in_every_folder_and_every_time(module, capsys, tmp_path, monkeypatch):
    lock(capsys)
    first = (tmp_path / "sites.lock").read_bytes()
    lock(capsys)
    assert (tmp_path / "sites.lock").read_bytes() == first
    assert str(tmp_path).encode() not in first
    (tmp_path / "below").mkdir()
    status, _, _ = run(capsys, "lock", "lockable:two", "--shapes", SHAPES, "-o", "below/sites.lock")
    assert status == 0
    assert (tmp_path / "below/sites.lock").read_bytes() == first


def test_lock_takes_the_functions_own_options_and_the_commands(module, capsys):
    small = "f16[40,64],f16[40,64],f16[40,64]"
    assert "1 applied" in lock(capsys, "lockable:optimized", shapes=small)
    assert "0 applied, 1 kept" in lock(capsys, "lockable:attend", shapes=small)
    assert "1 applied" in lock(capsys, "lockable:attend", "--objective", "always", shapes=small)


def test_lock_of_a_step_whose_parameters_are_a_dictionary(module, capsys):
    lock(capsys, "lockable:step", "--objective", "always", shapes="{q: f32[64,64]}, f32[40,64]")
    assert Lock.from_json(Path("sites.lock").read_text()).sites[0].direction == "forward+backward"


def test_lock_prints_json_or_the_file_itself(module, capsys):
    out = lock(capsys, "lockable:two", "--json")
    assert json.loads(out) == {"file": "sites.lock", "applied": 2, "kept": 0, "searches": 0, "cache_hits": 0}
    status, out, _ = run(capsys, "lock", "lockable:two", "--shapes", SHAPES, "-o", "-")
    assert status == 0
    assert out == Path("sites.lock").read_text()


def test_lock_searches_where_it_is_asked_to(module, capsys, monkeypatch):
    from autopallas.autotune import tuner as choose
    from autopallas.tuning.entry import Entry

    begun = []

    def search(match, implementation, key, first, seconds, *rest, **options):
        begun.append(seconds)
        return Entry(key.description, "unfinished", reason="not now", seconds=seconds)

    monkeypatch.setattr(choose, "search", search)
    small = "f16[40,64],f16[40,64],f16[40,64]"
    lock(capsys, "lockable:attend", "--no-autotune", shapes=small)
    assert not begun
    out = lock(capsys, "lockable:attend", "--autotune", "--budget", "3", "--json", shapes=small)
    assert json.loads(out)["searches"] == 1
    assert begun == [3.0]


# --- check -----------------------------------------------------------------------------------------------------------


def test_check_passes_while_the_sites_are_there_wherever_they_moved(module, capsys):
    lock(capsys)
    assert run(capsys, "check", "sites.lock")[:2] == (0, HOLDS)
    module("\n\n\n" + MODULE.replace("q @ k.T / 8", "jnp.einsum('td,sd->ts', q, k) * 0.125"))
    assert run(capsys, "check", "sites.lock")[0] == 1, "another way to scale is another computation"
    module("\n\n\n" + MODULE.replace("q @ k.T / 8", "jnp.einsum('td,sd->ts', q, k) / 8"))
    assert run(capsys, "check", "sites.lock")[0] == 0


def test_check_names_the_near_miss_and_its_line(module, capsys):
    lock(capsys, "lockable:attend")
    module(
        MODULE.replace(
            "return jax.nn.softmax(scores, axis=-1) @ v",
            "weights = jax.nn.softmax(scores, axis=-1)\n    return weights @ v, weights",
        )
    )
    status, out, err = run(capsys, "check", "sites.lock")
    assert (status, err) == (1, "")
    assert "lost: attention at lockable.py:7 (attend)" in out
    assert "lockable.py:8 (attend): " in out
    assert "also returned" in out
    assert "0 of 1 applied sites hold" in out
    told = json.loads(run(capsys, "check", "sites.lock", "--json")[1])
    assert (told["ok"], told["held"]) == (False, 0)
    assert told["lost"][0]["op"] == "attention"
    assert "also returned" in told["lost"][0]["near_miss"]


def test_check_tells_a_changed_site_from_a_lost_one(module, capsys):
    lock(capsys, "lockable:attend")
    module(MODULE.replace("jnp.tril(jnp.ones(scores.shape, bool))", "jnp.ones(scores.shape, bool)"))
    status, out, _ = run(capsys, "check", "sites.lock")
    assert status == 1
    assert "the site there is now another one: attention" in out
    assert "new: a site at" in out
    module(MODULE.replace("jax.nn.softmax(scores, axis=-1) @ v", "q"))
    status, out, _ = run(capsys, "check", "sites.lock")
    assert status == 1
    assert "nothing like it is in the program" in out


def test_check_counts_equal_sites(module, capsys):
    lock(capsys)
    module(MODULE.replace("attend(attend(q, k, v), k, v)", "attend(q, k, v)"))
    status, out, _ = run(capsys, "check", "sites.lock")
    assert status == 1
    assert "1 of 2 applied sites hold" in out


def test_check_fails_where_a_site_is_found_but_not_replaced(module, capsys, monkeypatch):
    from autopallas.kernels.attention import xla
    from autopallas.sites.operation import Unsupported

    lock(capsys)
    monkeypatch.setattr(xla, "supports", lambda spec, device: Unsupported("too old"))
    status, out, _ = run(capsys, "check", "sites.lock")
    assert status == 1
    assert "found, but not replaced: xla cannot compute it" in out


def test_check_of_another_devices_lock_checks_recognition(module, capsys, tmp_path):
    lock(capsys)
    path = tmp_path / "sites.lock"
    path.write_text(path.read_text().replace('"platform": "cpu"', '"platform": "gpu"'))
    status, out, _ = run(capsys, "check", "sites.lock")
    assert status == 0
    assert "only recognition was checked" in out
    module(MODULE.replace("jax.nn.softmax(scores, axis=-1) @ v", "q"))
    assert run(capsys, "check", "sites.lock")[0] == 1


# --- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lock"], "the following arguments are required"),
        (["lock", "lockable", "--shapes", "f32[]", "-o", "x"], "no function's name"),
        (["lock", "os:system('x')", "--shapes", "f32[]", "-o", "x"], "no function's name"),
        (["lock", "absent:f", "--shapes", "f32[]", "-o", "x"], "no module absent"),
        (["lock", "lockable:absent", "--shapes", "f32[]", "-o", "x"], "lockable has no absent"),
        (["lock", "lockable:jnp", "--shapes", "f32[]", "-o", "x"], "lockable:jnp is no function; its type is module"),
        (["lock", "lockable:two", "--shapes", "f32[3]", "-o", "x"], "cannot be traced with these shapes"),
        (["lock", "lockable:two", "--shapes", SHAPES, "-o", "no/such/folder"], "cannot be written"),
        (
            ["lock", "lockable:two", "--shapes", SHAPES, "-o", "x", "--budget", "-1"],
            "--budget: -1 is not a number of seconds",
        ),
        (["lock", "lockable:two", "--shapes", SHAPES, "-o", "x", "--objective", "speed"], "invalid choice"),
        (["check", "absent.lock"], "No such file"),
        (["check", "lockable.py"], "is no lockfile"),
        (["check", "."], "cannot be read"),
    ],
)
def test_bad_input_is_one_line_and_status_2(module, capsys, arguments, message):
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("text", ["1 +", "raise SystemExit('no')", "raise ValueError('a\\nb')", "import absent_too"])
def test_a_module_that_cannot_be_imported_is_one_line_and_status_2(module, capsys, text):
    module(text)
    status, _, err = run(capsys, "lock", "lockable:two", "--shapes", SHAPES, "-o", "x")
    assert status == 2
    assert err.startswith("autopallas lock: importing lockable failed: ")
    assert err.count("\n") == 1


def test_a_lockfile_cannot_make_check_run_anything_but_an_import(module, capsys, tmp_path):
    lock(capsys)
    path = tmp_path / "sites.lock"
    path.write_text(path.read_text().replace("lockable:two", "os:system; import os"))
    status, _, err = run(capsys, "check", "sites.lock")
    assert status == 2
    assert "no function's name" in err


@pytest.mark.parametrize("command", ["lock", "check"])
def test_help_is_there(capsys, command):
    status, out, _ = run(capsys, command, "--help")
    assert status == 0
    assert "--json" in out


# --- shapes ----------------------------------------------------------------------------------------------------------


def test_shapes_are_arrays_and_trees_of_them():
    (a, b), scalar, tree, empty = shapes_of("(f32[8,1024], i32[8]), bfloat16[], {w: [bf16[2],u8[0]], n: bool[1]}, []")
    assert [(x.shape, x.dtype.name) for x in (a, b, scalar)] == [
        ((8, 1024), "float32"),
        ((8,), "int32"),
        ((), "bfloat16"),
    ]
    assert [x.dtype.name for x in (*tree["w"], tree["n"])] == ["bfloat16", "uint8", "bool"]
    assert empty == []
    assert shapes_of("key[]")[0].dtype == jax.eval_shape(jax.random.key, 0).dtype
    assert shapes_of("") == ()
    assert [x.shape for x in shapes_of("f32[2],")] == [(2,)]


@pytest.mark.parametrize(
    "text",
    [
        "f32",
        "f32[",
        "f32[a]",
        "f32[-1]",
        "f32[1]]",
        "f32[1] f32[2]",
        "x32[1]",
        "f64[1]",
        "str[1]",
        "object[2]",
        "(f32[1]",
    ]
    + ["{f32[1]}", ",", "f32[1];", "f32[1].x", "(" * 50, "f32[99999999999999999999]", "__import__('os')", "void[1]"],
)
def test_shapes_that_are_none_are_refused(text):
    with pytest.raises(CommandError, match="--shapes"):
        shapes_of(text)
