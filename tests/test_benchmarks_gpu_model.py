"""The model of GPU kernels: what it reads of machine code, and how far it is from the times it was fitted to."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from autopallas.compile.gpu import H100, Compiler, missing
from benchmarks.gpu_model import command, orders
from benchmarks.gpu_model.anchors import anchors, codes
from benchmarks.gpu_model.cases import cross_entropy, grouped_matmul
from benchmarks.gpu_model.listing import Listing
from benchmarks.gpu_model.model import CONSTANTS, Code, Tiles, occupancy
from benchmarks.gpu_model.present import CASES, compiled

PERSISTENT = """
.text.kernel:
   -:-:-:Y:01        /*0000*/                   MOV R1, c[0x0][0x28]
   -:-:-:Y:05        /*0010*/               @P1 EXIT
.L_x_5:
   -:-:-:Y:02        /*0020*/                   IADD3 R2, R2, 0x1, RZ
.L_x_2:
   -:-:1:Y:02        /*0030*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R7
   1:-:-:Y:05        /*0040*/              @!P0 BRA `(.L_x_9)
.L_x_10:
   -:-:-:Y:01        /*0050*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12].tnspB, R24
   -:-:-:Y:03        /*0060*/                   HGMMA.64x256x16.F32.BF16 R24, gdesc[UR12].tnspB, R24, gsb0
   -:-:-:Y:02        /*0070*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1
   -:-:-:Y:05        /*0080*/               @P2 BRA `(.L_x_2)
   -:-:-:Y:04        /*0090*/                   MUFU.EX2 R5, R5
   -:-:-:Y:05        /*00a0*/               @P3 BRA `(.L_x_3)
   -:-:-:Y:04        /*00b0*/                   FADD R6, R6, R5
   -:-:-:Y:04        /*00c0*/                   FADD R6, R6, R5
   -:2:-:Y:06        /*00d0*/                   MEMBAR.ALL.CTA
   -:2:-:Y:01        /*00e0*/                   @UP1 UTMASTG.4D [UR24], [UR14]
.L_x_3:
   -:-:-:Y:05        /*00f0*/               @P4 BRA `(.L_x_4)
   -:-:-:Y:04        /*0100*/                   F2F.BF16.F32 R6, R6
   -:-:-:Y:04        /*0110*/                   F2F.BF16.F32 R6, R6
.L_x_4:
   -:-:-:Y:05        /*0120*/               @P5 BRA `(.L_x_5)
   -:-:-:Y:05        /*0130*/                   EXIT
.L_x_9:
   -:-:1:Y:02        /*0140*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R7
   1:-:-:Y:05        /*0150*/              @!P0 BRA `(.L_x_9)
   -:-:-:Y:05        /*0160*/                   BRA `(.L_x_10)
"""


def test_a_tile_stores_once_and_skips_what_is_rare():
    """Waiting again, which is laid out behind the end, is no loop of its own around the rest."""
    tile, products, waiting = Listing.of(PERSISTENT).loops
    assert (tile.depth, products.depth, waiting.depth) == (0, 1, 2)
    assert tile.inside
    assert not products.inside
    assert products.products == {"64x256x16": 2}
    assert (products.overlaps, products.waits) == (1, 1)
    assert tile.operations == {"IADD3": 1, "MUFU": 1, "BRA": 3, "FADD": 2, "MEMBAR": 1, "UTMASTG": 1}
    assert tile.cycles == 2 + 4 + 5 + 4 + 4 + 6 + 1 + 5 + 5


def test_transfers_into_the_memory_of_both_blocks_are_counted():
    loads = """   -:2:-:Y:01        /*0028*/                   @UP1 UTMALDG.4D [UR16], [UR26]
   -:2:-:Y:01        /*002c*/                   @UP1 UTMALDG.4D.MULTICAST [UR24], [UR36], UR16
"""
    again = PERSISTENT.replace(".L_x_5:\n", f".L_x_5:\n{loads}", 1)
    assert [Code.of(listing, 168, 200_000).multicasts for listing in (PERSISTENT, again)] == [0, 1]


def test_a_listing_becomes_parts_of_the_model():
    code = Code.of(PERSISTENT, 168, 200_000)
    (step,) = code.loops
    assert step.products == 256
    assert step.way == "overlapped"
    assert code.tile is not None
    assert (code.tile.special, code.tile.fences) == (1, 1)


@pytest.mark.parametrize("role, least", [("fitted", 0.08), ("held out", 0.10)])
def test_known_times_are_met(role, least):
    """What was fitted within 8%; measured times that were not fitted within 10%."""
    chosen = [anchor for anchor in anchors() if anchor.role == role]
    assert len(chosen) >= 20
    wrong = {a.case.name: a.case.teraflops() / a.teraflops - 1 for a in chosen}
    assert {name: error for name, error in wrong.items() if abs(error) > least} == {}


def test_all_that_was_measured_counts():
    assert all(not anchor.measured for anchor in anchors() if anchor.role == "missed")


def test_less_work_takes_less_time():
    code = codes()["e24747c cross_entropy statistics"]
    assert code.tile is not None
    shape = 32768, 2560, 128256
    lean = replace(code, tile=code.tile._replace(instructions=1800, special=128, stalls=3000))
    before, after = (cross_entropy("", c, shape).teraflops() for c in (code, lean))
    assert after > before
    forward = codes()["e24747c grouped_matmul forward"]
    far, columns, rows = (
        grouped_matmul("", replace(forward, multicasts=n), (8192, 4096, 4096, 8), row_tiles=68).teraflops()
        for n in range(3)
    )
    assert columns > rows > far
    assert Tiles(forward, 132, 64).seconds(CONSTANTS) < Tiles(forward, 133, 64).seconds(CONSTANTS), "a round more"
    (step,) = forward.loops
    halved = replace(forward, loops=(step, step._replace(products=step.products / 2)))
    for count, fewer in ((132, False), (133, True), (198, True), (199, False)):
        assert (Tiles(halved, count, 64).seconds(CONSTANTS) < Tiles(forward, count, 64).seconds(CONSTANTS)) is fewer


def test_registers_and_shared_memory_limit_how_many_blocks_there_are():
    assert occupancy(168, 384, 49_152) == 1
    assert occupancy(64, 128, 100_000) == 2
    assert occupancy(64, 128, 1_000) == 8


def test_everything_printed_is_called_estimated(capsys):
    assert command.main(["--model", "--anchors"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 50
    assert all("estimated" in line for line in lines)


@pytest.mark.skipif(
    os.environ.get("FULL_GRID") != "1" or missing() is not None,
    reason=f"make check-gpu runs it, with the compiler ({missing() or 'which is here'})",
)
@pytest.mark.parametrize(
    "name, kernel, instructions, special",
    [
        ("grouped matmul drhs G8", "autopallas_grouped_matmul_drhs", 300, 10),
        ("cross-entropy forward", "autopallas_cross_entropy_statistics", 1500, 150),
    ],
)
def test_a_tile_takes_no_more_instructions_than_it_should(name, kernel, instructions, special):
    with Compiler() as compiler:
        timed, case = CASES[name]()
        compilation = compiled(compiler, timed)
    found = {k.name: Code.of(k.listing, k.registers, k.shared_bytes) for k in compilation.kernels}
    tile = found[kernel].tile
    assert tile is not None
    assert 100 < tile.instructions <= instructions
    assert tile.special <= special
    assert 100 < case(name, found, compilation.copied_bytes).teraflops() < 800


@pytest.mark.parametrize("kernel", ["forward", "query", "key_value"])
def test_the_times_of_steps_and_blocks_follow_from_two_lengths(kernel):
    """With which the simulated processors, that each take the next block, need as long as was measured."""
    step, block = 2.0, 7.0
    with H100.targeted():
        long, short = (
            step * orders._order(kernel, shape, "").dealt(orders._visits(kernel, shape), block / step)[1]
            for shape in orders._SHAPES
        )
        found = orders.fitted(kernel, long, short)
    assert found == (pytest.approx(step, rel=0.01), pytest.approx(block, rel=0.05))


def test_what_an_h100_took_is_read_of_the_last_rows():
    found = orders._measured()
    assert {kernel for kernel, _ in found} == {"forward", "query", "key_value"}
    assert found["forward", 16384] > 3 * found["forward", 4096]
