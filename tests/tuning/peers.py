"""One process of a distributed program; run as ``python peers.py ADDRESS PROCESSES NUMBER FOLDER``.

Prints one JSON object: per scenario, the block sizes that this process uses, where they come from, and the counters.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from pathlib import Path

import jax
from places import attend, attend_all, entry_for, match_of, qkv

import autopallas
from autopallas.autotune.probe import Prober
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.tuning.cache import Cache
from autopallas.tuning.distributed import agreement


def chosen(function, length):
    optimized = autopallas.optimize(function, objective="always", autotune=True, strict=True)
    optimized.lower(*qkv(length))
    (site,) = optimized.report().sites
    return [site.block_sizes, site.block_sizes_from, optimized.report().tuning]


def probed(function, length, fault):
    """The verdict on the site, and the stages that failed, where this process finds ``fault`` in a probe."""
    Prober.wanted = lambda self, name: True
    Prober._probed = lambda self, match, name, block_sizes: fault
    optimized = autopallas.optimize(function, objective="always")
    optimized.lower(*qkv(length))
    (site,) = optimized.report().sites
    return [site.verdict, [stage for _, stage, _ in site.attempts]]


def main(address: str, processes: int, number: int, folder: Path) -> None:
    jax.distributed.initialize(address, processes, number)
    assert jax.process_count() == processes
    os.environ["AUTOPALLAS_CACHE_DIR"] = str(folder / str(number))
    # Each process has another result for the same site, the last one also for a site that process 0 does not know.
    cache = Cache.current()
    cache.put(entry_for(match_of(attend, *qkv(200)), BlockSizes(40 + 8 * number, 48)))
    if number == processes - 1:
        cache.put(entry_for(match_of(attend_all, *qkv(200)), BlockSizes(40, 40)))
    found = {"process 0 knows": chosen(attend, 200), "another knows": chosen(attend_all, 200)}
    agreed = agreement()
    assert agreed is not None
    agreed.store.wait_at_barrier("begin", 60_000)  # type: ignore[attr-defined]
    agreed._patience = 0.2
    if number == 0:
        cache.put(entry_for(match_of(attend, *qkv(100)), BlockSizes(16, 16)))
        time.sleep(1.5)
    found["process 0 comes late"] = chosen(attend, 100)
    warnings.simplefilter("ignore")
    fault = ("compile", "no such instruction") if number == processes - 1 else None
    found["works in all"] = probed(attend_all, 60, None)
    found["fails in one"] = probed(attend, 60, fault)
    print(json.dumps(found), flush=True)
    agreed.store.wait_at_barrier("end", 60_000)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
