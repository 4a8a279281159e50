"""Options: names, values, and which request wins."""

from __future__ import annotations

import re
import threading

import jax
import numpy as np
import pytest

import autopallas
from autopallas import environment
from autopallas.environment import VARIABLES
from autopallas.errors import OptionError
from autopallas.options import Options, active, options, resolve, validated


def test_without_any_request_the_defaults_hold():
    assert resolve({}) == Options()
    assert resolve({}).objective == "time"
    assert not resolve({}).disabled


def test_resolved_options_are_hashable_and_equal_where_the_requests_are():
    first = resolve({"require": {"cross_entropy": 1, "attention": 2}, "implementation": ["xla", "reference"]})
    second = resolve({"implementation": ("xla", "reference"), "require": {"attention": 2, "cross_entropy": 1}})
    assert first == second
    assert hash(first) == hash(second)
    assert first.require == (("attention", 2), ("cross_entropy", 1))


# --- Precedence ------------------------------------------------------------------------------------------------------


def test_an_argument_wins_over_the_block_and_the_block_over_the_environment(monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_OBJECTIVE", "memory")
    assert resolve({}).objective == "memory"
    with options(objective="always"):
        assert resolve({}).objective == "always"
        assert resolve({"objective": "time"}).objective == "time"
    assert resolve({}).objective == "memory"


@pytest.mark.parametrize(
    ("variable", "text", "option", "value"),
    [
        ("AUTOPALLAS_OPS", "attention, cross_entropy", "ops", ("attention", "cross_entropy")),
        ("AUTOPALLAS_AUTOTUNE", "0", "autotune", False),
        ("AUTOPALLAS_VERIFY", "1", "verify", True),
        ("AUTOPALLAS_FUEL", "0", "fuel", 0),
    ],
)
def test_a_variable_sets_its_option_and_yields_to_the_argument(monkeypatch, variable, text, option, value):
    monkeypatch.setenv(variable, text)
    assert getattr(resolve({}), option) == value
    other = {"ops": "attention", "autotune": True, "verify": False, "fuel": 7}[option]
    assert getattr(resolve({option: other}), option) == dict(validated({option: other}))[option]


def test_a_backend_in_the_environment_wins_over_the_code(monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_BACKEND", "reference")
    assert resolve({"implementation": "xla"}).implementation_for("attention") == "reference"
    with options(implementation="xla"):
        assert resolve({}).implementation_for("attention") == "reference"


def test_a_backend_for_one_operation_wins_over_the_general_one_there_only(monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_BACKEND", "reference")
    monkeypatch.setenv("AUTOPALLAS_BACKEND_CROSS_ENTROPY", "pallas_gpu,xla")
    resolved = resolve({"implementation": "cudnn"})
    assert resolved.implementation_for("cross_entropy") == ("pallas_gpu", "xla")
    assert resolved.implementation_for("attention") == "reference"


def test_one_backend_is_a_demand_and_several_are_a_list(monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_BACKEND", "xla")
    assert resolve({}).implementation == "xla"
    monkeypatch.setenv("AUTOPALLAS_BACKEND", "pallas_tpu,xla")
    assert resolve({}).implementation == ("pallas_tpu", "xla")


def test_disable_in_the_environment_cannot_be_overridden(monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_DISABLE", "1")
    with options(objective="always"):
        assert resolve({"strict": True}).disabled


def test_an_empty_variable_counts_as_unset(monkeypatch):
    for variable in VARIABLES:
        monkeypatch.setenv(variable.name, "")
    assert resolve({}) == Options()


# --- The block -------------------------------------------------------------------------------------------------------


def test_blocks_nest_and_an_exception_ends_them():
    with options(objective="memory", fuel=3):
        with options(fuel=1):
            assert (resolve({}).objective, resolve({}).fuel) == ("memory", 1)
        assert resolve({}).fuel == 3
        with pytest.raises(ZeroDivisionError), options(fuel=2):
            raise ZeroDivisionError
        assert resolve({}).fuel == 3
    assert active() == ()


def test_a_block_does_not_reach_other_threads():
    seen = []
    with options(objective="always"):
        thread = threading.Thread(target=lambda: seen.append(resolve({}).objective))
        thread.start()
        thread.join()
    assert seen == ["time"]


def test_jit_traces_again_where_the_block_changes_and_only_there():
    traced = []

    @jax.jit
    def function(x):
        traced.append(resolve({}).objective)
        return x + 1

    x = np.ones(3)
    for _ in range(2):
        function(x)
        with options(objective="memory"):
            function(x)
        with options(objective="memory"):
            function(x)
    assert traced == ["time", "memory"]


# --- Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("objective", "tiem", "time"),
        ("objective", None, "memory"),
        ("implementation", "palas_gpu", "pallas_gpu"),
        ("implementation", "xla,reference", "xla"),
        ("implementation", [], "at least one"),
        ("implementation", 3, "list of names"),
        ("implementation", ["xla", None], "reference"),
        ("ops", "atention", "attention"),
        ("numerics", "exact", "identical, reordered, tolerance"),
        ("numerics", None, "identical"),
        ("deny", "attend", "FILE:LINE"),
        ("ops", {"attention": 1}, "list of names"),
        ("require", {"atention": 1}, "attention"),
        ("require", {"attention": -1}, "0 or more"),
        ("require", {"attention": 1.5}, "whole number"),
        ("require", ["attention"], "mapping"),
        ("strict", 1, "True or False"),
        ("autotune", "on", "True, False or None"),
        ("tune_seconds", 0, "above 0"),
        ("tune_seconds", float("nan"), "above 0"),
        ("tune_seconds", "30", "seconds"),
        ("tune_seconds", 10**400, "above 0"),
        ("verify", 10**400, "fraction"),
        ("verify", None, "True or False"),
        ("fuel", True, "whole number"),
        ("fuel", -1, "0 or more"),
        ("lock", "", "lockfile"),
        ("lock", b"path", "lockfile"),
        ("assume_finite", "yes", "True or False"),
    ],
)
def test_a_bad_value_is_refused_with_the_option_the_value_and_the_remedy(name, value, remedy):
    with pytest.raises(OptionError) as caught:
        resolve({name: value})
    message = str(caught.value)
    assert name in message
    assert remedy in message
    with pytest.raises(OptionError), options(**{name: value}):
        pass


@pytest.mark.parametrize("use", [autopallas.optimize, autopallas.optimize(), autopallas.explain, autopallas.verify])
def test_what_is_no_function_is_refused(use):
    with pytest.raises(OptionError, match="takes a function, not 3; options are given by name"):
        use(3)


def test_words_that_leave_out_are_accepted_and_not_listed():
    with pytest.raises(OptionError) as caught:
        resolve({"ops": "-atention"})
    assert len(re.findall(r"\battention\b", str(caught.value))) == 2, "listed, and meant"
    assert str(caught.value).endswith("did you mean '-attention'?")


def test_an_unknown_option_is_refused_with_the_nearest_and_all_valid_ones():
    with pytest.raises(OptionError, match=r"'objectve' \(did you mean objective\?\).*assume_finite"):
        resolve({"objectve": "time"})


@pytest.mark.parametrize("name", ["static_argnums", "donate_argnames", "out_shardings"])
def test_arguments_of_jit_are_told_where_they_belong(name):
    with pytest.raises(OptionError, match=rf"{name} is an argument of jax.jit: optimize\(jax.jit\(fn, {name}=...\)\)"):
        autopallas.optimize(lambda x: x, **{name: 0})


@pytest.mark.parametrize("name", ["disabled", "implementation_of"])
def test_what_only_the_environment_sets_is_no_option(name):
    with pytest.raises(OptionError, match=name):
        resolve({name: True})


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("AUTOPALLAS_DISABEL", "AUTOPALLAS_DISABLE"),
        ("AUTOPALLAS_Backend", "AUTOPALLAS_BACKEND"),
        ("autopallas_disable", "AUTOPALLAS_DISABLE"),
        ("AUTOPALLASDISABLE", "AUTOPALLAS_DISABLE"),
        ("AUTO_PALLAS_DISABLE", "AUTOPALLAS_DISABLE"),
        ("AUTOPALAS_DISABLE", "AUTOPALLAS_DISABLE"),
        ("ATUOPALLAS_OBJECTIVE", "AUTOPALLAS_OBJECTIVE"),
    ],
)
def test_a_misspelt_variable_is_refused_with_the_nearest_and_all_valid_ones(monkeypatch, variable, nearest):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(OptionError) as caught:
        resolve({})
    assert f"{variable} (did you mean {nearest}?)" in str(caught.value)
    assert all(known.name in str(caught.value) for known in VARIABLES)


@pytest.mark.parametrize("variable", ["AUTOPALLAS_LOCK", "AUTOPALLAS_TPU", "AUTOPALLAS_NONSENSE", "AUTOPALLAS"])
def test_a_variable_that_is_like_no_other_is_refused_without_a_guess(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    with pytest.raises(OptionError, match=f"^there is no environment variable {variable}; the variables are "):
        resolve({})


@pytest.mark.parametrize(
    ("variable", "text", "remedy"),
    [
        ("AUTOPALLAS_DISABLE", "yes", "0 or 1"),
        ("AUTOPALLAS_BACKEND", "xla,palas_gpu", "pallas_gpu"),
        ("AUTOPALLAS_BACKEND", "xla,", "pallas_gpu"),
        ("AUTOPALLAS_BACKEND_ATTENTION", "cuddn", "cudnn"),
        ("AUTOPALLAS_OPS", "atention", "attention"),
        ("AUTOPALLAS_OPS", "sort,attention,-attention", "'-attention', which leaves it out"),
        ("AUTOPALLAS_OPS", "sort,-respelling", "'-respelling', which leaves it out"),
        ("AUTOPALLAS_OBJECTIVE", "speed", "memory"),
        ("AUTOPALLAS_NUMERICS", "bitwise", "identical"),
        ("AUTOPALLAS_DENY", "model.py:94,,", "FILE:LINE"),
        ("AUTOPALLAS_AUTOTUNE", "2", "0 or 1"),
        ("AUTOPALLAS_CACHE_DIR", __file__, "folder"),
        ("AUTOPALLAS_VERIFY", "true", "0 or 1"),
        ("AUTOPALLAS_INTERPRET", "-1", "0 or 1"),
        ("AUTOPALLAS_FUEL", "-3", "whole number"),
        ("AUTOPALLAS_FUEL", "1.5", "whole number"),
        ("AUTOPALLAS_FUEL", "9" * 5000, "whole number"),
        ("AUTOPALLAS_REPORT", "report.pdf", ".json"),
    ],
)
def test_a_bad_value_of_a_variable_is_refused_with_the_remedy(monkeypatch, variable, text, remedy):
    monkeypatch.setenv(variable, text)
    with pytest.raises(OptionError) as caught:
        resolve({})
    assert variable in str(caught.value)
    assert remedy in str(caught.value)


def test_variables_of_other_programs_are_not_looked_at():
    others = ("JAX_PALLAS_INTERPRET", "PALLAS_DISABLE", "AUTOPALETTE_OPS", "OPAL_REPORT", "MY_AUTOPALLAS_OPS")
    assert environment.read(dict.fromkeys(others, "x")) == environment.read({})


def test_operations_that_are_selected_and_left_out_are_refused_as_an_option_too():
    with pytest.raises(OptionError, match="option ops has 'sort' and '-sort', which leaves it out"):
        resolve({"ops": ["sort", "-sort"]})
    assert resolve({"ops": ["respelling", "-sort"]}).ops == ("respelling", "-sort")


def test_the_users_folder_may_be_written_as_in_a_shell(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    read = environment.read({"AUTOPALLAS_CACHE_DIR": "~/cache", "AUTOPALLAS_REPORT": "~/report.html"})
    assert (read.cache_dir, read.report) == (str(tmp_path / "cache"), str(tmp_path / "report.html"))


def test_every_variable_of_the_table_reaches_the_parsed_environment(tmp_path):
    accepted = {
        "AUTOPALLAS_OPS": "attention",
        "AUTOPALLAS_OBJECTIVE": "memory",
        "AUTOPALLAS_NUMERICS": "identical",
        "AUTOPALLAS_ONLY": "model.py",
        "AUTOPALLAS_DENY": "model.py:94",
        "AUTOPALLAS_CACHE_DIR": str(tmp_path),
        "AUTOPALLAS_REPORT": "report.html",
    }
    empty = environment.read({})
    for variable in VARIABLES:
        text = accepted.get(variable.name, "xla" if "BACKEND" in variable.name else "1")
        assert environment.read({variable.name: text}) != empty, variable.name
