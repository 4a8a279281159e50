"""``python -m benchmarks gpu --all``: everything that half an hour on a Hopper GPU can show, in calls of nine minutes.

The command of :mod:`.command` goes through the tasks of :mod:`.tasks` in stages.  It touches no GPU itself: a child
process (:mod:`.worker`) runs one task after another, so that a kernel that hangs, or that leaves the GPU in a state in
which nothing runs any more, costs one row and a new child.  Each row is appended to a journal (:mod:`.journal`) at
once; a later call, on another machine too, goes on where the journal ends.
"""
