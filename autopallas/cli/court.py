"""``autopallas court``: puts a function, an own pattern or the kernels of this package on trial."""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from autopallas.cli import CommandError
from autopallas.cli.numbers import at_least, seconds
from autopallas.compat import ArrayFunction, Dtype, PyTree
from autopallas.errors import one_line

if TYPE_CHECKING:
    from autopallas.court.case import Inputs
    from autopallas.numerics.classes import Numerics

__all__ = ["add"]

_DEVICES = 4
"""Number of host devices that JAX is asked for, so that a kernel can be divided over them."""
_QUESTIONS = ("sizes", "dtypes", "magnitudes", "special", "runs", "eager", "vmap", "devices")
_DTYPES = ("float64", "float32", "bfloat16", "float16")


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of this command."""
    parser.add_argument("kernel", metavar="MODULE:KERNEL", nargs="?", help="the function, or an autopallas.pattern")
    parser.add_argument("--reference", metavar="MODULE:FUNCTION", help="what it has to compute; a pattern has its own")
    parser.add_argument(
        "--shapes",
        help='typical arguments, such as "f32[8,128],f32[128]"; equal sizes are one axis, so give axes that may differ '
        "different sizes",
    )
    parser.add_argument("--inputs", metavar="MODULE:FUNCTION", help="inputs(types, seed) gives flat arguments")
    parser.add_argument(
        "--dtypes", metavar="DTYPE", nargs="+", choices=_DTYPES, default=None, help="dtypes to try beside the given"
    )
    parser.add_argument("--only", metavar="QUESTION", nargs="+", choices=_QUESTIONS, help="ask these questions alone")
    parser.add_argument("--no-gradients", action="store_true", help="compare results alone")
    parser.add_argument(
        "--identical", action="store_true", help="compare bit by bit as well, as for a pattern that claims so"
    )
    parser.add_argument(
        "--runs", type=at_least(2), default=10, metavar="N", help="repetitions that show races, 2 or more (default 10)"
    )
    parser.add_argument("--seconds", type=seconds, default=300.0, help="time for each kernel (default 300)")
    parser.add_argument("--shipped", action="store_true", help="try the kernels of this package that run here")
    parser.add_argument("--ops", metavar="OP", nargs="+", help="with --shipped: those of these operations alone")
    parser.add_argument("--interpret", action="store_true", help="with --shipped: also TPU kernels, interpreted")
    parser.add_argument("-o", "--output", metavar="FILE", help="write the verdicts to a JSON file")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


class _Subject(NamedTuple):
    """What is on trial: both functions, types of the arguments, what they hold, and both names."""

    kernel: ArrayFunction
    reference: ArrayFunction
    arguments: Sequence[PyTree]
    inputs: Inputs | None
    names: tuple[str, str]
    special: ArrayFunction | None = None
    numerics: Numerics = "tolerance"


def _run(options: argparse.Namespace) -> int:
    if options.shipped == (options.kernel is not None):
        raise CommandError("name one kernel, or write --shipped for those of this package")
    _ask_for_devices()
    from autopallas.court.trial import DTYPES, QUESTIONS, judge
    from autopallas.progress import Progress

    subjects = _shipped(options) if options.shipped else [_given(options)]
    questions = QUESTIONS if options.only is None else [QUESTIONS[_QUESTIONS.index(name)] for name in options.only]
    dtypes = DTYPES if options.dtypes is None else _dtypes(options.dtypes)
    verdicts = []
    with Progress("autopallas court") as say:
        for subject in subjects:
            verdict = judge(
                subject.kernel,
                subject.reference,
                subject.arguments,
                inputs=subject.inputs,
                dtypes=dtypes,
                questions=questions,
                gradients=not options.no_gradients,
                runs=options.runs,
                seconds=options.seconds,
                names=subject.names,
                numerics=subject.numerics,
                special=subject.special,
                progress=functools.partial(_say, say, subject.names[0]),
            )
            verdicts.append(verdict)
            if options.shipped and not options.json:
                failed = sum(tally.failed for tally in verdict.tallies.values())
                refused = sum(tally.refused for tally in verdict.tallies.values())
                print(f"{verdict.kernel}: {verdict.heard} cases, {failed} wrong, {refused} refused", flush=True)
    data = [verdict.to_dict() for verdict in verdicts]
    if options.output:
        from autopallas import compat
        from autopallas.sites.device import Device

        device = Device.current()
        whole = {"versions": compat.versions(), "platform": device.platform, "verdicts": data}
        try:
            Path(options.output).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{options.output} cannot be written: {error.strerror or error}") from None
    if options.json:
        print(json.dumps(data if options.shipped else data[0], indent=2))
    else:
        for verdict in verdicts:
            if not options.shipped or not verdict.ok:
                print(f"\n{verdict}" if options.shipped else verdict)
    return int(not all(verdict.ok for verdict in verdicts))


def _say(say: Callable[[str], None], name: str, line: str) -> None:
    say(f"{name}: {line}")


def _ask_for_devices() -> None:
    """Asks JAX for several host devices, where it has not begun yet and nothing else was asked for."""
    import jax

    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", _DEVICES)
        except RuntimeError:  # it has begun
            pass


def _dtypes(names: Sequence[str]) -> Sequence[Dtype]:
    import jax
    import jax.numpy as jnp

    if "float64" in names:
        jax.config.update("jax_enable_x64", True)
    return [jnp.dtype(name) for name in names]


def _given(options: argparse.Namespace) -> _Subject:
    """Returns the kernel of the command line, and its reference, by names."""
    from autopallas.cli.program import function_of, shapes_of
    from autopallas.court.patterns import subject_of
    from autopallas.custom.registry import Pattern

    kernel = function_of(options.kernel)
    arguments: Sequence[PyTree] | None = None if options.shapes is None else shapes_of(options.shapes)
    if isinstance(kernel, Pattern):
        replacement, reference, types, inputs = subject_of(kernel)
        names = (options.kernel, "its reference")
        typical = types if arguments is None else arguments
        subject = _Subject(replacement, reference, typical, inputs, names, numerics=kernel.numerics)
    else:
        if options.reference is None or arguments is None:
            raise CommandError("give --reference MODULE:FUNCTION and --shapes; an autopallas.pattern has its own")
        subject = _Subject(kernel, kernel, arguments, None, (options.kernel, options.reference))
    if options.reference is not None:
        names = (options.kernel, options.reference)
        subject = subject._replace(reference=function_of(options.reference), names=names)
    if options.identical:
        subject = subject._replace(numerics="identical")
    if options.inputs is not None:
        subject = subject._replace(inputs=function_of(options.inputs))
    _check(subject)
    return subject


def _check(subject: _Subject) -> None:
    """Raises CommandError if the reference does not accept the given arguments."""
    import jax

    try:
        jax.eval_shape(subject.reference, *subject.arguments)
    except Exception as error:
        name = subject.names[1]
        raise CommandError(f"{name} cannot be traced with these shapes: {one_line(error)}") from None


def _shipped(options: argparse.Namespace) -> list[_Subject]:
    from autopallas.court.shipped import shipped
    from autopallas.optimize import optimize
    from autopallas.sites.operation import operation_names

    unknown = [name for name in options.ops or () if name not in operation_names()]
    if unknown:
        raise CommandError(f"there is no operation {unknown[0]}; there are {', '.join(operation_names())}")
    if options.interpret:
        os.environ["AUTOPALLAS_INTERPRET"] = "1"  # kernels are lowered after their functions are traced
    return [_Subject(*subject) for subject in shipped(optimize, options.ops, options.interpret)]
