"""Many processes on one cache; run as ``python processes.py crowd | kill FOLDER``.

One process imports everything and forks the others, which only read and write files.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

warnings.simplefilter("error")

from entries import key, tuned  # noqa: E402

from autopallas.tuning.cache import Cache  # noqa: E402

KEYS = 4


def fork(work: Callable[[], None]) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks; the children do not use it
        child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        os._exit(1)
    os._exit(0)


def crowd(folder: Path) -> int:
    """16 processes write and read the same keys; each must always find a whole entry."""

    def work() -> None:
        cache = Cache(folder)
        draw = random.Random(os.getpid())
        for _ in range(60):
            number = draw.randrange(KEYS)
            assert cache.put(tuned(number, query_block=draw.choice([64, 128, 256])))
            found = cache.get(key(number))
            assert found is not None
            assert found.block_sizes is not None
            assert found.block_sizes["query_block"] in (64, 128, 256)

    children = [fork(work) for _ in range(16)]
    return sum(os.waitpid(child, 0)[1] != 0 for child in children)


def kill(folder: Path) -> int:
    """Processes that write without end are killed; the time at which they are is drawn."""
    draw = random.Random(0)

    def work() -> None:
        cache = Cache(folder)
        while True:
            assert cache.put(tuned(draw.randrange(KEYS)))

    for _ in range(30):
        child = fork(work)
        time.sleep(draw.uniform(0.001, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    sys.exit({"crowd": crowd, "kill": kill}[sys.argv[1]](Path(sys.argv[2])))
