"""Puts functions on trial: a kernel is compared with its reference on whatever kernels get wrong.

:func:`autopallas.court.trial.judge` is the court; ``autopallas court`` is its command.  What this package ships
(:mod:`autopallas.court.shipped`), the replacements of own patterns before their first use, and any function of a user
are heard by the same code.
"""
