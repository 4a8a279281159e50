"""Which fault at which stage is tested by what, and which cannot be.

``python -m tests.faults.matrix`` prints the table.
"""

from __future__ import annotations

import ast
from pathlib import Path

STAGES = (
    "match",
    "plan",
    "probe",
    "trace",
    "lower",
    "compile",
    "launch",
    "run",
    "backward",
    "cache read",
    "cache write",
    "tune",
)
KINDS = ("exception", "wrong shape", "NaN", "wrong numbers", "hang", "out of memory", "kill -9")

_HERE = "test_faults_"
_CACHE, _TUNER, _SEARCH = (f"../tuning/test_{name}.py" for name in ("cache", "tuner", "search"))

TESTED: dict[tuple[str, str], str] = {
    ("match", "exception"): f"{_HERE}isolation.py::test_an_exception_in_one_candidate_costs_that_candidate",
    ("match", "out of memory"): f"{_HERE}program.py::test_a_pattern_that_fails",
    ("match", "wrong shape"): f"{_HERE}program.py::test_a_match_of_another_shape",
    ("match", "wrong numbers"): f"{_HERE}program.py::test_a_wrong_match_under_verify",
    ("plan", "exception"): f"{_HERE}isolation.py::test_an_exception_in_later_work_on_a_site_costs_that_site",
    ("plan", "out of memory"): f"{_HERE}program.py::test_a_plan_that_fails",
    ("plan", "wrong shape"): f"{_HERE}program.py::test_block_sizes_that_fit_nothing",
    ("probe", "exception"): f"{_HERE}probe.py::test_a_kernel_that_the_probe_cannot_use",
    ("probe", "wrong shape"): f"{_HERE}probe.py::test_a_kernel_that_the_probe_cannot_use",
    ("probe", "out of memory"): f"{_HERE}probe.py::test_a_kernel_that_the_probe_cannot_use",
    ("probe", "hang"): f"{_HERE}probe.py::test_a_probe_that_hangs_is_ended",
    ("probe", "kill -9"): f"{_HERE}probe.py::test_a_probe_that_is_killed",
    ("trace", "exception"): f"{_HERE}kernels.py::test_a_kernel_that_fails",
    ("trace", "wrong shape"): f"{_HERE}kernels.py::test_a_kernel_that_fails",
    ("trace", "out of memory"): f"{_HERE}kernels.py::test_a_kernel_that_fails",
    ("lower", "exception"): f"{_HERE}late.py::test_a_forward_that_cannot_be_lowered",
    ("lower", "wrong shape"): f"{_HERE}kernels.py::test_a_kernel_that_fails",
    ("lower", "out of memory"): f"{_HERE}kernels.py::test_a_kernel_that_fails",
    ("compile", "exception"): f"{_HERE}kernels.py::test_a_kernel_that_fails",
    ("compile", "out of memory"): f"{_HERE}kernels.py::test_a_compiler_that_runs_out_of_memory",
    ("compile", "hang"): f"{_HERE}probe.py::test_a_probe_that_hangs_is_ended",
    ("launch", "exception"): f"{_HERE}kernels.py::test_a_kernel_that_fails",
    ("launch", "out of memory"): f"{_HERE}kernels.py::test_a_kernel_that_fails",
    ("run", "exception"): f"{_HERE}kernels.py::test_a_kernel_that_fails",
    ("run", "NaN"): f"{_HERE}kernels.py::test_wrong_numbers_under_verify",
    ("run", "wrong numbers"): f"{_HERE}kernels.py::test_wrong_numbers_under_verify",
    ("run", "out of memory"): f"{_HERE}kernels.py::test_a_kernel_that_fails",
    ("run", "kill -9"): f"{_HERE}processes.py::test_the_process_after_a_killed_one",
    ("backward", "exception"): f"{_HERE}kernels.py::test_a_backward_that_fails",
    ("backward", "wrong shape"): f"{_HERE}kernels.py::test_a_backward_that_fails",
    ("backward", "NaN"): f"{_HERE}kernels.py::test_wrong_numbers_under_verify",
    ("backward", "wrong numbers"): f"{_HERE}kernels.py::test_wrong_numbers_under_verify",
    ("backward", "out of memory"): f"{_HERE}kernels.py::test_a_backward_that_fails",
    ("cache read", "exception"): f"{_HERE}cache.py::test_a_verdict_that_cannot_be_read",
    ("cache read", "wrong shape"): f"{_HERE}cache.py::test_a_verdict_that_cannot_be_read",
    ("cache read", "NaN"): f"{_HERE}cache.py::test_a_verdict_that_cannot_be_read",
    ("cache read", "wrong numbers"): f"{_TUNER}::test_absurd_block_sizes_in_the_cache_still_give_the_right_result",
    ("cache read", "hang"): f"{_HERE}cache.py::test_a_verdict_that_cannot_be_read",
    ("cache read", "out of memory"): f"{_HERE}cache.py::test_a_verdict_that_cannot_be_read",
    ("cache write", "exception"): f"{_HERE}cache.py::test_a_verdict_that_cannot_be_written",
    ("cache write", "out of memory"): f"{_CACHE}::test_a_long_entry_is_not_written",
    ("cache write", "kill -9"): f"{_CACHE}::test_killed_processes_leave_a_valid_cache",
    ("tune", "exception"): f"{_TUNER}::test_a_search_that_raises_costs_the_search_only",
    ("tune", "wrong shape"): f"{_SEARCH}::test_a_candidate_that_fails_leaves_the_others_in_the_race",
    ("tune", "NaN"): f"{_SEARCH}::test_nan_is_wrong",
    ("tune", "wrong numbers"): f"{_SEARCH}::test_a_wrong_candidate_is_never_chosen_and_is_remembered",
    ("tune", "out of memory"): f"{_SEARCH}::test_nothing_is_run_that_free_memory_cannot_hold",
    ("tune", "kill -9"): f"{_CACHE}::test_killed_processes_leave_a_valid_cache",
}
"""The test of each fault."""

_NO_NUMBERS = "nothing is computed yet"
_IN_PYTHON = "Python in this thread cannot be ended"

HOLES: dict[tuple[str, str], str] = {
    ("match", "hang"): _IN_PYTHON,
    ("plan", "hang"): _IN_PYTHON,
    ("trace", "hang"): f"{_IN_PYTHON}; the probe, where there is one, comes first and has a limit",
    ("lower", "hang"): f"{_IN_PYTHON}; the probe, where there is one, comes first and has a limit",
    ("launch", "hang"): "a launch that hangs cannot be ended inside the process; the probe runs the kernel elsewhere",
    ("run", "hang"): "a run that hangs cannot be ended inside the process; the probe runs the kernel elsewhere",
    ("backward", "hang"): "a run that hangs cannot be ended inside the process; the probe runs the kernel elsewhere",
    ("cache write", "hang"): "a write to a network's disk cannot be ended",
    ("tune", "hang"): "no step begins after the budget, and the one that runs is not broken off",
}
"""What is not protected against, or not tested, and why."""

NONE: dict[tuple[str, str], str] = {
    **{(stage, kind): _NO_NUMBERS for stage in ("match", "plan", "trace", "lower", "compile") for kind in ("NaN",)},
    **{(stage, "wrong numbers"): _NO_NUMBERS for stage in ("plan", "trace", "lower", "compile")},
    **{("probe", kind): "a probe looks at no numbers" for kind in ("NaN", "wrong numbers")},
    **{("launch", kind): "see run" for kind in ("NaN", "wrong numbers")},
    ("compile", "wrong shape"): "types are compared before and while lowering",
    ("launch", "wrong shape"): "types are compared before and while lowering",
    ("run", "wrong shape"): "types are compared before and while lowering",
    **{
        ("cache write", kind): "an entry is checked when it is read" for kind in ("wrong shape", "NaN", "wrong numbers")
    },
    **{
        (stage, "kill -9"): "nothing was written yet; see run"
        for stage in ("match", "plan", "trace", "lower", "compile", "launch", "backward", "cache read")
    },
}
"""What cannot happen, and why."""


def table() -> str:
    """The matrix as text, and the holes by name."""
    wide = max(map(len, STAGES))
    columns = [max(len(kind), 6) for kind in KINDS]
    lines = [" " * wide + "  " + "  ".join(kind.ljust(n) for kind, n in zip(KINDS, columns, strict=True))]
    for stage in STAGES:
        marks = []
        for kind in KINDS:
            cell = (stage, kind)
            marks.append("tested" if cell in TESTED else "HOLE" if cell in HOLES else "-" if cell in NONE else "?")
        cells = "  ".join(mark.ljust(n) for mark, n in zip(marks, columns, strict=True))
        lines.append(f"{stage:<{wide}}  {cells}".rstrip())
    lines += ["", f"{len(TESTED)} tested, {len(HOLES)} holes, {len(NONE)} that cannot happen. The holes:"]
    lines += [f"  {stage}, {kind}: {reason}" for (stage, kind), reason in HOLES.items()]
    return "\n".join(lines)


def missing() -> list[str]:
    """Cells of which nothing, or two things, are said, and tests that do not exist."""
    folder = Path(__file__).parent
    names: dict[str, set[str]] = {}
    wrong = []
    for stage in STAGES:
        for kind in KINDS:
            said = sum((stage, kind) in place for place in (TESTED, HOLES, NONE))
            if said != 1:
                wrong.append(f"{stage}, {kind}: said {said} times")
    for test in TESTED.values():
        file, _, name = test.partition("::")
        if file not in names:
            tree = ast.parse((folder / file).read_text(encoding="utf-8"))
            names[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        if name not in names[file]:
            wrong.append(f"there is no test {test}")
    return wrong


if __name__ == "__main__":
    print(table())
