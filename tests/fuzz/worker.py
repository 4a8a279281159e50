"""A process that judges programs: reads lines of JSON, and answers each with one.

A line holds a seed, the names of choices to be taken plainly, and faults to be put back one at a time; without any the
answer has the verdict on the program as it is.
"""

from __future__ import annotations

import argparse
import contextlib
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

        from .judge import judge, judge_faults
        from .mutations import put_back
        from .program import random_program

        with put_back(fault) if fault else contextlib.nullcontext():
            for number, line in enumerate(sys.stdin):
                seed, plain, faults = json.loads(line)
                program = random_program(seed, frozenset(plain))
                verdicts = judge_faults(program, faults) if faults else [judge(program)]
                print(json.dumps([dataclasses.asdict(v) for v in verdicts]), file=answers, flush=True)
                if number % 25 == 24:
                    jax.clear_caches()


if __name__ == "__main__":
    main()
