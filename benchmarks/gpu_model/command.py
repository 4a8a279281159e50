"""The command ``python -m benchmarks gpu --model``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from autopallas.compile.gpu import Compiler, Kernel, missing
from benchmarks.gpu_model import orders
from benchmarks.gpu_model.anchors import anchors
from benchmarks.gpu_model.model import BANDWIDTH, CONSTANTS, Case, Part, Streams, Tiles, Work, occupancy
from benchmarks.gpu_model.present import estimated

__all__ = ["main"]


def main(arguments: Sequence[str]) -> int:
    """Runs the command line; returns 2 where nothing can be compiled."""
    options = _parser().parse_args(arguments)
    if options.anchors:
        for anchor in anchors():
            rate = anchor.case.teraflops()
            kind = "measured" if anchor.measured else "estimated by a review"
            print(f"{anchor.case.name}: {anchor.teraflops:.0f} TFLOP/s ({kind}), estimated {rate:.0f} "
                  f"({100 * (rate / anchor.teraflops - 1):+.1f}%, {anchor.role})")  # fmt: skip
        return 0
    if (reason := missing()) is not None:
        print(reason)
        return 2
    with Compiler() as compiler:
        if options.orders:
            print(*orders.estimates(compiler), sep="\n")
            return 0
        for name, case, kernels in estimated(compiler, options.filter):
            print(f"{name}: estimated {_rate(case)}, {case.seconds() * 1e3:.3f} ms", flush=True)
            for work in {work.code: work for work in case.works}.values():
                print(*(f"  {line}" for line in _described(work, kernels[work.code])), sep="\n", flush=True)
    return 0


def _rate(case: Case) -> str:
    """Returns what is multiplied, or, of kernels that are bound by it, what is moved, in a second."""
    streams = [work for work in case.works if isinstance(work, Streams)]
    if not streams:
        return f"{case.teraflops():.0f} TFLOP/s"
    moved = sum(work.moved for work in streams)
    shares = [moved / seconds / BANDWIDTH for seconds in (case.seconds(), sum(w.seconds(CONSTANTS) for w in streams))]
    return f"{shares[0]:.0%} of {BANDWIDTH / 1e12} TB/s, {shares[1]:.0%} in its kernel"


def _described(work: Work, kernel: Kernel) -> Iterator[str]:
    code, threads = work.code, 128 * (1 + work.warpgroups)
    blocks = occupancy(kernel.registers, threads, kernel.shared_bytes)
    yield (
        f"{kernel.name}: {kernel.registers} registers, {kernel.shared_bytes} bytes of shared memory, {blocks} block"
        f"{'s' * (blocks > 1)} per multiprocessor, estimated {work.seconds(CONSTANTS) * 1e3:.3f} ms"
    )
    for part in code.loops:
        yield f"  loop: {_counts(part)}; wgmma {part.products:.0f} cycles; {part.way}"
    if isinstance(work, Tiles) and code.tile is not None:
        cycles = work.epilogue(CONSTANTS)
        yield f"  tile: {_counts(code.tile)}; {code.tile.fences} fences; estimated {cycles:.0f} cycles"


def _counts(part: Part) -> str:
    kinds = f"special {part.special}, half rate {part.half}, full rate {part.full}"
    return f"{part.instructions} instructions ({kinds}), stalls of {part.stalls} cycles"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    parser.add_argument("--model", action="store_true", help="estimate the kernels' times from their compiled code")
    parser.add_argument("--anchors", action="store_true", help="only compare the model with the times it was fitted to")
    parser.add_argument("--orders", action="store_true", help="only estimate other orders of attention's blocks")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="WORDS", help="only cases with all these words"
    )
    return parser
