"""Makes the matches of respellings that are several sites, such as a loop and its backward: one for each part."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import jax

from autopallas import array_types, compat
from autopallas.graph import Body, Graph, Node
from autopallas.kernels.respelling.operation import OPERATION
from autopallas.kernels.respelling.site import RespellingSite
from autopallas.kernels.respelling.spec import Plain, RespellingSpec
from autopallas.patterns.match import Match

__all__ = ["match_of_part"]


def match_of_part(
    graph: Graph,
    kind: str,
    parameters: Mapping[str, Plain],
    original: Callable[[RespellingSpec, Sequence[jax.Array]], Sequence[jax.Array]],
    operands: Sequence[int],
    results: Sequence[int],
    equations: Sequence[Node],
    home: Body,
    location: str,
    made: Sequence[int] = (),
) -> Match:
    """Returns the match of a part.

    Args:
      graph: the program.
      kind: the name of the respelling's kind.
      parameters: those of the part.
      original: computes what the program computes in its place, of its spec and operands.
      operands, results: numbers of what it reads and gives.
      equations: what it replaces.
      home: the body in which it stands.
      location: where the code is that it replaces.
      made: numbers of the results that the program lacks.
    """
    reads, gives = (tuple((graph.shape(n), graph.dtype(n)) for n in numbers) for numbers in (operands, results))
    spec = RespellingSpec(kind, tuple(sorted(parameters.items())), reads, gives)
    avals = [graph.avals[n] for n in operands]
    with array_types.on_mesh_of(avals):
        program = compat.make_jaxpr(lambda *arrays: tuple(original(spec, arrays)), *map(array_types.typed_like, avals))
    return Match(
        op=OPERATION.name,
        site=RespellingSite(spec),
        direction="forward",
        operands=tuple(operands),
        results=tuple(results),
        equations=tuple(equations),
        original=program,
        body=equations[0].body,
        location=location,
        homes=(home,),
        made=tuple(made),
        in_body=True,
    )
