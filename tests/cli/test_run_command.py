"""``autopallas run``: to its program everything is as with ``python``, but that ``jax.jit`` optimizes."""

from __future__ import annotations

import json

import jax
import pytest

import autopallas
from autopallas.cli import COMMANDS

SCRIPT = """
import functools, json, sys
import jax, jax.numpy as jnp
import optional_part
from jax import jit

@jit
def attend(q, k, v):
    scores = q @ k.T / 8
    return jax.nn.softmax(scores, axis=-1) @ v

class Model:
    @functools.partial(jax.jit, static_argnames=("self", "scale"))
    def __call__(self, x, scale):
        return attend(x, x, x + 1) * scale

if __name__ == "__main__":
    x = jnp.ones((300, 64))
    print(json.dumps([sys.argv, sys.path[0], __file__, sys.modules["__main__"].__file__]))
    print(attend(x, x, x + 1).shape, f"{Model()(x, scale=2.0).sum():.0f} {optional_part.total(x):.0f}")
    match sys.argv[-1]:
        case "fail":
            jit(lambda x: x + jnp.ones(3))(x)
        case "status":
            sys.exit(7)
"""
PART = """
import jax

@jax.jit
def total(x):
    return x.sum()
"""


@pytest.fixture(autouse=True)
def script(tmp_path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "optional_part.py").write_text(PART)


def test_the_script_runs_as_with_python_and_its_sites_are_replaced(process):
    plain = process("scripts/train.py", "--lr", "0.1", python=("-B",))
    ours = process("run", "--objective", "always", "--json", "scripts/train.py", "--lr", "0.1")
    assert ours.returncode == plain.returncode == 0, ours.stderr
    assert ours.stdout == plain.stdout
    reports = json.loads(ours.stderr)
    assert [len(r["sites"]) for r in reports] == [1, 1, 0], "attend, Model.__call__ and total"
    assert all(site["verdict"] == "applied" for r in reports for site in r["sites"])


def test_an_error_is_the_scripts_own_and_the_report_is_written_all_the_same(process, tmp_path):
    path = str(tmp_path / "scripts" / "train.py")
    plain = process(path, "fail", python=("-B",))
    ours = process("run", "--report", "out.txt", path, "fail")
    assert ours.returncode == plain.returncode == 1
    assert ours.stdout == plain.stdout
    assert ours.stderr == plain.stderr
    assert "attention" in (tmp_path / "out.txt").read_text()


def test_the_exit_status_is_the_scripts_own_and_the_report_at_the_end_is_a_table(process, tmp_path):
    ours = process("run", "--objective", "always", "--xla-dump-dir", "dump", "scripts/train.py", "status")
    assert ours.returncode == 7
    assert "autopallas traced 3 compiled functions; 2 have sites, near misses or failures." in ours.stderr
    assert "attend: 1 site replaced" in ours.stderr
    assert max(map(len, ours.stderr.splitlines())) <= 80
    told = json.loads((tmp_path / "dump" / "flags.json").read_text())
    assert f"--xla_dump_to={tmp_path / 'dump'}" in told["flags"]["XLA_FLAGS"]
    assert told["versions"]["jax"] == jax.__version__
    assert list((tmp_path / "dump").glob("*jit_attend*")), "what XLA compiled"


def test_a_module_runs_with_m(process, tmp_path):
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(
        "import sys\nfrom trainer.part import name\nprint(name, __package__, __spec__.name, sys.argv[1:])\n"
    )
    (package / "part.py").write_text("name = 'part'\n")
    result = process("run", "-m", "trainer", "--steps", "3")
    assert result.stdout == "part trainer trainer.__main__ ['--steps', '3']\n", result.stderr


def test_an_error_in_the_syntax_is_the_scripts_own(process, tmp_path):
    (tmp_path / "broken.py").write_text("x = = 3\n")
    ours = process("run", "--json", "broken.py")
    assert ours.returncode == 1, "as with python"
    assert "SyntaxError: invalid syntax" in ours.stderr
    assert "autopallas/cli" not in ours.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to run"),
        (["absent.py"], "absent.py cannot be read: No such file or directory"),
        (["."], "is a folder"),
        (["-m", "absent"], "there is no module absent"),
        (["-m", "absent.part"], "the module absent.part cannot be found"),
        (["-m", "../absent"], "is no module's name"),
        (["-m"], "there is nothing to run"),
        (["--report", "out.pdf", "x.py"], "out.pdf is no report"),
        (["--report", "absent/out.html", "x.py"], "there is no such folder"),
        (["--xla-dump-dir", "/dev/null/dump", __file__], "nothing can be written to /dev/null/dump: Not a directory"),
        (["--fuel", "-1", "x.py"], "option fuel is -1"),
        (["--ops", "atention", "x.py"], "option ops is 'atention', which is not one of attention, cross_entropy"),
        (["--objective", "speed", "x.py"], "invalid choice"),
    ],
)
def test_bad_input_is_one_line_and_status_2(command, arguments, message):
    status, out, err = command("run", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_misspelt_variable_is_told_before_the_script_begins(command, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_OBJECTIVE", "speed")
    status, out, err = command("run", __file__)
    assert (status, out) == (2, "")
    assert "AUTOPALLAS_OBJECTIVE is 'speed'" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["tune", "attention"], ["lock", "os.path:join", "--shapes", "", "-o", "x"]])
def test_a_platform_that_does_not_exist_is_one_line_and_status_2(command, monkeypatch, arguments):
    def none():
        raise RuntimeError("Unable to initialize backend 'absent': it is not known\nand more")

    monkeypatch.setattr(jax, "devices", none)
    monkeypatch.setattr(jax, "make_jaxpr", lambda function: lambda *a: None)
    status, out, err = command(*arguments)
    assert (status, out) == (2, "")
    assert "JAX finds no device: Unable to initialize backend 'absent'" in err
    assert err.count("\n") == 1


def test_without_any_word_the_help_is_shown_with_status_2(command):
    status, out, err = command()
    assert (status, out) == (2, "")
    assert err.startswith("usage: autopallas")
    assert "run a script" in err


def test_it_tells_its_version(command):
    assert command("--version") == (0, f"autopallas {autopallas.__version__}\n", "")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(command, name):
    status, out, _ = command(name, "--help")
    assert status == 0
    assert "--json" in out or name == "cache"


REPEATED = """
import functools, gc, json, weakref
import jax, jax.numpy as jnp

traced = []

def step(x):
    traced.append(x.shape)
    return jax.nn.softmax(x @ x.T) @ x

@functools.wraps(step)
def other(x):
    return step(x) + 1

x, scaled = jnp.ones((32, 16)), functools.partial(step)
for _ in range(3):
    jax.jit(step)(x)
    jax.jit(scaled)(x)
assert len(traced) == 2, traced
assert float(jax.jit(other)(x)[0, 0]) == float(jax.jit(step)(x)[0, 0]) + 1
held = jnp.array(x)
jax.jit(step, donate_argnums=0)(held)
assert held.is_deleted()
jax.jit(step)(x)
assert not x.is_deleted()

def made():
    weight = jnp.ones(16)
    function = lambda x: x @ weight
    jax.jit(function)(x)
    return weakref.ref(weight)

gone = made()
gc.collect()
assert gone() is None
"""


def test_jit_of_the_same_function_is_traced_once_though_it_is_written_in_a_loop(process, tmp_path):
    (tmp_path / "repeated.py").write_text(REPEATED)
    ran = process("run", "--objective", "always", "--json", "repeated.py")
    assert ran.returncode == 0, ran.stderr
