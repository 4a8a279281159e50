"""The files that ahead-of-time compilation starts and reads lie where it looks for them, on machines without the
compilers too."""

import ast

from autopallas.compile import gpu, tpu


def test_the_programs_of_the_compiling_processes_are_there():
    for path in (gpu._PROCESS, tpu._PROCESS):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert "__name__" in names, path  # it is a script


def test_the_description_of_the_target_is_there():
    assert "gpu_device_info" in gpu._TARGET.read_text(encoding="utf-8")
