"""Programs that several processes run together: each process compiles the same, with the results of one device."""

import json
import os
import socket
import subprocess
import sys

import pytest

from sharding.peers import UNANSWERED


def free_address():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return f"localhost:{probe.getsockname()[1]}"


def outcomes(processes, devices, scenario):
    """What each process prints, each with so many devices."""
    flags = f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}"
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)}
    address = free_address()
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "sharding.peers", address, str(processes), str(number), scenario],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for number in range(processes)
    ]
    try:
        finished = [process.communicate(timeout=150) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, err) in zip(running, finished, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [json.loads(out.splitlines()[-1]) for out, _ in finished]


def verdicts(outcome):
    return {(op, verdict) for op, verdict, _ in outcome["verdicts"]}


def assert_same_programs_and_results(found):
    for name in found[0]:
        assert len({of_process[name]["program"] for of_process in found}) == 1, name
        # Sums over parts are added in another order than on one device.
        assert max(of_process[name]["error"] for of_process in found) <= 2e-5, name


@pytest.mark.parametrize(("processes", "devices"), [(2, 2), pytest.param(4, 1, marks=pytest.mark.nightly)])
def test_sites_are_divided_over_processes(processes, devices):
    found = outcomes(processes, devices, "alike")
    assert_same_programs_and_results(found)
    for of_process in found:
        assert verdicts(of_process["attention backward: data and heads"]) == {("attention", "applied")}
        assert verdicts(of_process["explicit axes"]) == {("attention", "applied")}
        assert verdicts(of_process["spelled loss backward: tokens and vocabulary"]) == {("cross_entropy", "applied")}
        assert verdicts(of_process["train step: tensor"]) == {("attention", "applied"), ("cross_entropy", "applied")}


def test_what_one_process_cannot_do_none_does():
    found = outcomes(2, 1, "failing")
    assert_same_programs_and_results(found)
    sites = [site for of_process in found for site in of_process["attention backward: data and heads"]["verdicts"]]
    assert [verdict for _, verdict, _ in sites] == ["kept", "kept"]
    assert sites[0][2].endswith("the processes made different programs")
    assert "no such dialect" in sites[1][2]


def test_a_process_that_does_not_answer_is_not_waited_for_forever():
    found = outcomes(2, 1, "absent")
    assert_same_programs_and_results(found)
    ((_, verdict, reason),) = found[0]["attention backward: data and heads"]["verdicts"]
    assert (verdict, reason) == ("kept", UNANSWERED)


@pytest.mark.nightly
def test_a_program_that_one_process_lowers_alone_is_not_waited_for_as_long():
    found = outcomes(2, 1, "lowered")
    assert_same_programs_and_results(found)
    sites = [site for of_process in found for site in of_process["attention backward: data and heads"]["verdicts"]]
    assert [(verdict, reason) for _, verdict, reason in sites] == [("kept", UNANSWERED)] * 2
