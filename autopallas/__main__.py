"""Runs the command line: ``python -m autopallas`` and the console script ``autopallas``."""

from __future__ import annotations

import sys

from autopallas.cli import main

if __name__ == "__main__":
    sys.exit(main())
