"""Candidates for a TPU that is not there: what compiles is ranked, what does not is a result."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from test_ahead_of_time import matmul, needs_compiler
from test_tables import PLAIN

from autopallas.autotune.search import candidates_of
from autopallas.cli import main
from autopallas.compile.tpu import GENERATIONS, Compilation, Compiler, Operation
from autopallas.kernels.attention import pallas_tpu
from autopallas.kernels.attention.block_sizes import BlockSizes as AttentionBlockSizes
from autopallas.kernels.grouped_matmul.block_sizes import BlockSizes
from autopallas.sites.device import Device
from autopallas.workbench import ranking, tune
from autopallas.workbench.ranking import ranked

BLOCKS = (128, 256, 512)


def kernel_module(buffers):
    """An implementation: the blocks of a matmul; ``buffers`` by block makes some need more VMEM than there is."""

    def forward(block_sizes, a, b):
        block = block_sizes.row_block
        return matmul(block, buffers.get(block, 1))(a, b)

    return SimpleNamespace(forward=forward, candidates=lambda spec, device: [BlockSizes(n) for n in BLOCKS])


@dataclass(frozen=True)
class Site:
    """A matmul as a site of an operation that is made up."""

    kernel: int

    @property
    def operation(self):
        return SimpleNamespace(
            name="made_up",
            implementation=lambda name: MODULES[self.kernel],
            part=lambda name: SimpleNamespace(),  # its example inputs have nothing measured in the original's place,
            module=lambda name: SimpleNamespace(),  # and results are read as they are
        )

    def forward(self, kernel, block_sizes, operands):
        return (kernel.forward(block_sizes, *operands),), ()


MODULES = {0: kernel_module({}), 1: kernel_module({256: 600})}


def site(kernel: int, size: int = 512):
    x = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
    original = jax.make_jaxpr(lambda a, b: (a @ b).astype(a.dtype))(x, x)
    match = SimpleNamespace(op="grouped_matmul", site=Site(kernel), spec=None, original=original, backwards=())
    match.passes = (match,)
    return match


class Fake:
    """A compiler whose answers are given: of the original, not simulated; of the candidates; of the original again."""

    version = "compiler 3"

    def __init__(self, name, *answers):
        self.target = GENERATIONS[name]
        self.answers = iter(answers)
        self.asked = []

    def compile(self, function, arguments, seconds, simulate=None):
        self.asked.append(simulate)
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def compiled(cycles, temporary, name="tpu-v5e", **more):
    operations = (Operation("k", True, 4096, cycles, 1),)
    return Compilation(GENERATIONS[name], operations=operations, temporary_bytes=temporary, **more)


def rank(compiler, seconds=60.0):
    return ranked(site(0), "pallas_tpu", BlockSizes(128), compiler, seconds, lambda line: None)


def test_the_fewest_cycles_win_and_failures_are_recorded():
    failed = Compilation(GENERATIONS["tpu-v5e"], "RESOURCE_EXHAUSTED: vmem", "memory")
    candidates = compiled(4000, 10), failed, compiled(3000, 50)
    found = rank(Fake("tpu-v5e", compiled(None, 100), *candidates, compiled(9000, 100)))
    assert found.time.block_sizes["row_block"] == 512
    assert found.time.speedup == pytest.approx(3.0)
    assert found.time.evidence == "simulated"
    assert found.time.versions == f"jax {jax.__version__}, compiler 3"
    assert found.memory.block_sizes["row_block"] == 128, "fewer bytes, in bearable time"
    assert [(t.block_sizes["row_block"], t.stage, t.cycles) for t in found.tried] == [
        (128, "", 4000),
        (256, "memory", None),
        (512, "", 3000),
    ]


def test_traffic_counts_where_it_is_slower_than_the_cycles():
    slow = compiled(10, 1, bytes_accessed=8_190_000)  # 10 microseconds at 819 GB/s
    found = rank(Fake("tpu-v5e", compiled(None, 1), slow, compiled(1500, 1), compiled(1500, 1), compiled(30_000, 1)))
    assert [t.row.kernel_us for t in found.tried] == pytest.approx([10.0, 1.0, 1.0])
    assert found.time.block_sizes["row_block"] == 256
    equal = [compiled(cycles, 1, bytes_accessed=8_190_000) for cycles in (900, 1000, 800)]
    found = rank(Fake("tpu-v5e", compiled(None, 1), *equal, compiled(30_000, 1)))
    assert found.time.block_sizes["row_block"] == 512, "the fewest cycles of those that wait for memory"


def test_without_a_simulation_there_is_an_estimate_only():
    programs = [compiled(None, 10, "tpu-v4", operations_counted=275_000_000) for _ in range(4)]
    found = rank(Fake("tpu-v4", *programs))
    assert (found.time.evidence, found.time.kernel_us) == ("estimated", 1.0)
    assert found.time.block_sizes["row_block"] == 128, "the operation's best guess"


def test_what_is_not_simulated_gives_way_to_what_is():
    programs = [compiled(cycles, 10, operations_counted=197_000_000) for cycles in (None, 4000)]
    programs += [compiled(None, 10, operations_counted=197_000_000, note="k follows data")] * 2
    found = rank(Fake("tpu-v5e", *programs, compiled(9000, 10)))
    assert [t.cycles for t in found.tried] == [4000, None, None]
    assert "follows data" in found.tried[1].error
    assert (found.tried[1].row.evidence, found.tried[1].row.kernel_us) == ("estimated", 1.0)
    assert (found.time.block_sizes["row_block"], found.time.evidence) == (128, "simulated")


def test_an_original_that_cannot_be_simulated_has_a_bound_and_candidates_are_ranked_all_the_same():
    original = compiled(None, 10, operations_counted=197_000_000)
    late = dataclasses.replace(original, note="not done in time")
    fake = Fake("tpu-v5e", original, compiled(3000, 1), compiled(1500, 1), compiled(1800, 1), late)
    found = rank(fake)
    assert found.time.block_sizes["row_block"] == 256
    assert (found.time.evidence, found.time.kernel_us, found.time.original_us) == ("simulated", 1.0, 1.0)
    assert fake.asked == [False, None, None, None, None]
    assert found.note == "the original's time is a lower bound, from its arithmetic and its traffic: not done in time"


def test_an_original_is_not_simulated_where_its_bound_tells_that_a_candidate_is_faster():
    original = compiled(None, 10, operations_counted=197_000_000)
    fake = Fake("tpu-v5e", original, compiled(3000, 1), compiled(600, 1), compiled(900, 1))
    found = rank(fake)
    assert fake.asked == [False, None, None, None]
    assert (found.time.evidence, found.time.kernel_us, found.time.original_us) == ("simulated", 0.4, 1.0)


def test_what_cannot_be_lowered_or_has_no_turn_is_recorded():
    found = rank(Fake("tpu-v5e", compiled(9000, 1), *[ValueError("no such block")] * 3))
    assert found.time is None
    assert "none of 3 candidates compiles: lower: ValueError: no such block" in found.reason
    late = rank(Fake("tpu-v5e", compiled(9000, 1)), seconds=0.0)
    assert {t.stage for t in late.tried} == {"budget"}
    assert "the original cannot be compiled: ValueError: x" in rank(Fake("tpu-v5e", ValueError("x"))).reason


def test_an_implementation_offers_candidates_for_the_target_or_has_those_of_its_operation():
    match, target = tune.of_case(PLAIN["attention"]).match, GENERATIONS["tpu-v6e"].device
    tpu = candidates_of(match, "pallas_tpu", AttentionBlockSizes(8, 8), target)
    here = candidates_of(match, "xla", AttentionBlockSizes(8, 8), Device.current())
    assert tpu == [AttentionBlockSizes(8, 8), *pallas_tpu.candidates(match.spec, target)]
    assert here == [AttentionBlockSizes(8, 8), *AttentionBlockSizes.candidates(match.spec)]


@needs_compiler
def test_a_pallas_kernel_is_ranked_by_its_compiler():
    with Compiler("tpu-v5e", simulate=True) as compiler:
        found = ranked(site(1), "pallas_tpu", BlockSizes(128), compiler, 300.0, lambda line: None)
    by_block = {t.block_sizes["row_block"]: t for t in found.tried}
    assert by_block[256].stage == "memory"
    assert "vmem" in by_block[256].error
    assert by_block[512].cycles < by_block[128].cycles
    assert by_block[512].vmem_bytes > by_block[128].vmem_bytes > 0
    assert (found.time.block_sizes["row_block"], found.time.evidence) == (512, "simulated")


@needs_compiler
def test_an_operation_is_tuned_for_a_tpu_that_is_not_there(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(ranking, "candidates_of", lambda *site: candidates_of(*site)[:2])
    arguments = ["--target", "tpu-v5e", "--shapes", ", ".join(["f32[1,64,1,64]"] * 3), "--direction", "forward"]
    assert main(["tune", "attention", *arguments, "--output", str(tmp_path), "--budget", "200", "--json"]) == 0
    (result,) = json.loads(capsys.readouterr().out)
    assert result["evidence"] in ("simulated", "estimated"), "the compiler cannot simulate every original"
    assert result["searched"]
    rows = json.loads((tmp_path / "results.json").read_text())
    assert {row["device"] for row in rows} == {"TPU v5e"}
    assert any(row["cycles"] for row in rows)


def test_without_the_compiler_there_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(tune, "missing", lambda: "libtpu is not installed")
    assert main(["tune", "attention", "--target", "tpu-v6e"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
