"""``--xla-dump-dir``: dumps the compiled programs into a folder, with the flags that they were compiled under."""

from __future__ import annotations

import json
import os
import platform
import sys

from autopallas import compat
from autopallas.cli import CommandError

__all__ = ["dump_to"]

_RECORDED = ("AUTOPALLAS_", "CUDA_", "JAX_", "LIBTPU_", "NVIDIA_TF32", "OMP_", "TPU_", "XLA_")


def dump_to(folder: str) -> None:
    """Makes XLA write each program into a folder; must be called before JAX first compiles anything.

    The TPU's compiler writes its log there too, unless ``TPU_LOG_DIR`` names another place.  ``flags.json`` has the
    command line, versions, the variables in force, and the place of the log: without these a dump cannot be compared.

    Args:
      folder: the folder, which is created if it does not exist.

    Raises:
      CommandError: nothing can be written there.
    """
    place = os.path.abspath(folder)
    changed = {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={place}".strip(),
        "TPU_LOG_DIR": os.environ.get("TPU_LOG_DIR", place),
    }
    told = {
        "command": sys.orig_argv,
        "versions": compat.versions(),
        "machine": platform.platform(),
        "flags": {k: v for k, v in sorted((os.environ | changed).items()) if k.startswith(_RECORDED)},
        "compiler_log": changed["TPU_LOG_DIR"],
    }
    try:
        os.makedirs(place, exist_ok=True)
        with open(os.path.join(place, "flags.json"), "w", encoding="utf-8") as file:
            json.dump(told, file, indent=2)
    except OSError as error:
        raise CommandError(f"nothing can be written to {folder}: {error.strerror or error}") from None
    os.environ.update(changed)
