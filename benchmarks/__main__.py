"""``python -m benchmarks``: see :mod:`benchmarks.cli`."""

from __future__ import annotations

import sys

from benchmarks import cli, environment

if __name__ == "__main__":
    if "--no-allocator-settings" not in sys.argv:
        environment.restart_with_allocator_settings()
    sys.exit(cli.main(sys.argv[1:]))
