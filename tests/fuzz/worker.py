"""A process that judges programs: reads a seed a line, with choices to be taken plainly, and answers a line of JSON."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile


def main() -> None:
    """Reads and answers until its input ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default=None)
    fault = parser.parse_args().fault
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what programs print is no answer
    with tempfile.TemporaryDirectory(prefix="autopallas-fuzz-") as folder:
        os.environ["AUTOPALLAS_CACHE_DIR"] = folder
        import jax

        from .judge import judge
        from .mutations import put_back
        from .program import random_program

        if fault is not None:
            put_back(fault)
        for number, line in enumerate(sys.stdin):
            seed, plain = json.loads(line)
            verdict = judge(random_program(seed, frozenset(plain)))
            print(json.dumps(dataclasses.asdict(verdict)), file=answers, flush=True)
            if number % 25 == 24:
                jax.clear_caches()


if __name__ == "__main__":
    main()
