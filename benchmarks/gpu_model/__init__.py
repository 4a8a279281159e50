"""``python -m benchmarks gpu --model``: estimates times of the GPU kernels from their compiled code, without a GPU.

:mod:`.listing` reads loops and instructions from the machine code, :mod:`.model` makes cycles of them, and
:mod:`.cases` says how often each loop is run. :mod:`.anchors` holds what the constants were fitted to. Nothing here is
measured.
"""
