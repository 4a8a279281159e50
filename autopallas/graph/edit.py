"""Turns a tree of bodies back into a jaxpr, with edits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from jax.sharding import PartitionSpec

from autopallas import compat, jaxprs
from autopallas.compat import JaxprEqn, JaxprLike, Literal, Var
from autopallas.graph.custom_rules import CUSTOM_RULES
from autopallas.graph.equation_keys import Node
from autopallas.graph.flatten import Body
from autopallas.graph.needs import Needs, Unknown
from autopallas.graph.numbering import Graph, computes

__all__ = ["Edit", "check", "rebuild", "surviving", "without_results"]


@dataclass(slots=True)
class Edit:
    """Changes to one body.

    Attributes:
      replaced: equations, by position, with their replacements.
      added: new equations; they are placed where their operands are known.
      renamed: variables, with those to read in their place.
      given: for a scan's body: further loop constants, as (variable in the body, variable outside).
      read: further operands of the equation that holds the body, as (variable in the body, variable outside); for a
        scan, arrays that it reads slice by slice.
      stacked: further results of that equation, likewise; for a scan, arrays that it stacks.
      specs: for a shard_map's body: how these are spread over the mesh, by the variable in the body.
    """

    replaced: dict[int, list[JaxprEqn]] = field(default_factory=dict)
    added: list[JaxprEqn] = field(default_factory=list)
    renamed: dict[Var, Var] = field(default_factory=dict)
    given: list[tuple[Var, Var | Literal]] = field(default_factory=list)
    read: list[tuple[Var, Var | Literal]] = field(default_factory=list)
    stacked: list[tuple[Var, Var]] = field(default_factory=list)
    specs: dict[Var, PartitionSpec] = field(default_factory=dict)


def rebuild(body: Body, edits: dict[Body, Edit]) -> JaxprLike:
    """Returns the body as a jaxpr of its kind, with the edits in it and below it."""
    edit = edits.get(body, Edit())
    equations: list[JaxprEqn] = []
    for position, equation in enumerate(body.equations):
        if position in edit.replaced:
            equations += edit.replaced[position]
        elif position in body.children and any(
            inner in edits or inner.renamed for child in body.children[position] for inner in child.body.walk()
        ):
            equations.append(_with_children(body, position, equation, edits))
        else:
            equations.append(equation)
    equations += edit.added
    if edit.renamed:
        equations = [_with_names(e, edit.renamed) for e in equations]
    results = [*body.outvars, *(inner for inner, _ in edit.stacked)]
    outvars = jaxprs.renamed(results, edit.renamed)
    if edit.added:
        equations = _in_order(_read(equations, outvars))
    invars = [*(inner for inner, _ in edit.given), *body.invars, *(inner for inner, _ in edit.read)]
    return jaxprs.rebuild(body.source, body.constvars, body.consts, invars, outvars, equations)


def _with_names(equation: JaxprEqn, names: dict[Var, Var]) -> JaxprEqn:
    if names.keys().isdisjoint([atom for atom in equation.invars if isinstance(atom, Var)]):
        return equation
    return jaxprs.with_operands(equation, jaxprs.renamed(equation.invars, names))


def _with_children(body: Body, position: int, equation: JaxprEqn, edits: dict[Body, Edit]) -> JaxprEqn:
    params = dict(equation.params)
    children = body.children[position]
    if equation.primitive.name == "cond":
        edits = edits | _alike([child.body for child in children], edits)
    for child in children:
        new = rebuild(child.body, edits)
        if child.position is None:
            params[child.parameter] = new
        else:
            bodies = list(params[child.parameter])
            bodies[child.position] = new
            params[child.parameter] = type(params[child.parameter])(bodies)
    edit = edits.get(children[0].body)
    if edit is None or not (edit.given or edit.read or edit.stacked):
        return equation.replace(params=params)
    read, stacked = [outer for _, outer in edit.read], [outer for _, outer in edit.stacked]
    if equation.primitive.name == "scan":
        params = compat.extended_scan(params, len(edit.given), len(read), len(stacked))
    elif equation.primitive.name == "shard_map":
        params["in_specs"] = (*params["in_specs"], *(edit.specs[inner] for inner, _ in edit.read))
        params["out_specs"] = (*params["out_specs"], *(edit.specs[inner] for inner, _ in edit.stacked))
    invars = [*(outer for _, outer in edit.given), *equation.invars, *read]
    return equation.replace(params=params, invars=invars, outvars=[*equation.outvars, *stacked])


def _alike(branches: Sequence[Body], edits: dict[Body, Edit]) -> dict[Body, Edit]:
    """Returns edits with which all branches take the operands and give the results that the edit of any branch adds."""
    taken, given = ([p for b in branches if b in edits for p in getattr(edits[b], n)] for n in ("read", "stacked"))
    if not (taken or given):
        return {}
    zeros = {dtype: jaxprs.zeros(dtype) for dtype in dict.fromkeys(inner.aval.dtype for inner, _ in given)}
    found: dict[Body, Edit] = {}
    for branch in branches:
        own = edits.get(branch, Edit())
        fillers: list[tuple[JaxprEqn | None, Var]] = [
            (None, inner)
            if (inner, outer) in own.stacked
            else jaxprs.zeros_equation(inner.aval, zeros[inner.aval.dtype])
            for inner, outer in given
        ]
        found[branch] = replace(
            own,
            added=[*own.added, *(equation for equation, _ in fillers if equation is not None)],
            read=[(inner if (inner, outer) in own.read else Var(inner.aval), outer) for inner, outer in taken],
            stacked=[(inner, outer) for (_, inner), (_, outer) in zip(fillers, given, strict=True)],
        )
    return found


def _read(equations: list[JaxprEqn], results: Sequence[Var | Literal]) -> list[JaxprEqn]:
    """Returns the equations that results are computed from, in whatever order they stand, and those with effects."""
    producers = {v: i for i, e in enumerate(equations) for v in e.outvars}
    found = bytearray(len(equations))
    todo = [i for i, equation in enumerate(equations) if equation.effects]
    todo += [producers[a] for a in results if isinstance(a, Var) and a in producers]
    while todo:
        place = todo.pop()
        if not found[place]:
            found[place] = True
            for atom in equations[place].invars:
                if isinstance(atom, Var) and atom in producers and not found[producers[atom]]:
                    todo.append(producers[atom])
    return [equation for equation, needed in zip(equations, found, strict=True) if needed]


def _in_order(equations: list[JaxprEqn]) -> list[JaxprEqn]:
    """Orders the equations so that each finds its operands, otherwise unchanged; effects keep their order."""
    producers = {v: i for i, e in enumerate(equations) for v in e.outvars}
    placed: list[JaxprEqn] = []
    state = [0] * len(equations)  # 0 waiting, 1 being placed, 2 placed
    last_effect: int | None = None
    before: dict[int, int] = {}
    for i, equation in enumerate(equations):
        if compat.has_side_effects(equation):  # to name an axis of the mesh, as psum and axis_index do, is none
            if last_effect is not None:
                before[i] = last_effect
            last_effect = i
    for start in range(len(equations)):
        stack = [start] if state[start] != 2 else []
        while stack:
            i = stack[-1]
            if state[i] == 2:
                stack.pop()
                continue
            needs = [producers.get(a) for a in equations[i].invars if isinstance(a, Var)]
            waiting = [n for n in needs if n is not None and state[n] != 2]
            if i in before and state[before[i]] != 2:
                waiting.append(before[i])
            if not waiting:
                placed.append(equations[i])
                state[i] = 2
                stack.pop()
            else:
                if any(state[n] == 1 for n in waiting):
                    raise ValueError("the edited equations depend on each other in a circle")
                state[i] = 1
                stack += waiting
    return placed


def without_results(equation: JaxprEqn, results: Sequence[Var]) -> list[JaxprEqn]:
    """Returns what is left of an equation if some of its results are computed elsewhere."""
    if len(results) == len(equation.outvars):
        return []
    return [equation.replace(outvars=[Var(v.aval) if v in results else v for v in equation.outvars])]


def check(program: JaxprLike) -> None:
    """Checks that every variable is defined before it is read.

    Raises:
      ValueError: a variable is not.
    """
    jaxpr, _ = jaxprs.open_jaxpr(program)
    known = {*jaxpr.constvars, *jaxpr.invars}
    for equation in jaxpr.eqns:
        if not known.issuperset([atom for atom in equation.invars if not isinstance(atom, Literal)]):
            raise ValueError(f"an operand of {equation.primitive.name} is not defined in the rewritten program")
        known.update(equation.outvars)
        if not jaxprs.is_leaf(equation):
            for _, _, inner in jaxprs.bodies(equation):
                check(inner)
    if not all(isinstance(atom, Literal) or atom in known for atom in jaxpr.outvars):
        raise ValueError("a result of the rewritten program is not defined")


_NEEDS: WeakKeyDictionary[Graph, Needs | None] = WeakKeyDictionary()


def surviving(
    graph: Graph, given: Iterable[int] = (), reads: Mapping[int, Iterable[int]] | None = None, least: int = 0
) -> frozenset[int]:
    """Returns the numbers of all values that the program still computes if those in ``given`` are computed elsewhere.

    ``reads`` maps each of these to the values that it is computed from there, which are therefore needed. Numbers below
    ``least`` are not asked for: what is known of them does not count.
    """
    chosen = frozenset(given)
    if reads is not None and chosen:
        return _survivors(graph, chosen, reads) - chosen
    if least and graph.has_plain_bodies:
        return _remaining(graph, chosen, least)
    if chosen not in graph.survivors:
        graph.survivors[chosen] = _survivors(graph, chosen, {})
    return graph.survivors[chosen]


def _survivors(graph: Graph, given: frozenset[int], reads: Mapping[int, Iterable[int]]) -> frozenset[int]:
    if graph.has_plain_bodies:
        if not given:
            everything, graph.readers = _needed(graph)
            return everything
        return _walked(graph, given, reads) if reads else _remaining(graph, given)
    needs = _needs_of(graph)
    if needs is not None:
        return needs.reached(given, reads)
    return _without_dead_code(graph, given, reads)


def _needs_of(graph: Graph) -> Needs | None:
    """Returns what the variables of a program need; None where that is JAX's to know, or an equation has effects."""
    if graph not in _NEEDS:
        effects = (e for body in graph.numbers for e in body.equations if compat.has_side_effects(e))
        _NEEDS[graph] = None
        with contextlib.suppress(Unknown):
            _NEEDS[graph] = Needs(graph) if not any(True for _ in effects) else None
    return _NEEDS[graph]


def _without_dead_code(graph: Graph, given: frozenset[int], reads: Mapping[int, Iterable[int]]) -> frozenset[int]:
    """Computes the same by JAX's removal of dead code, for any program."""
    edits = {body: Edit() for body in graph.numbers}  # all bodies, since an unedited one would keep its inner calls
    for body, numbers in graph.numbers.items():
        for position, equation in enumerate(body.equations):
            if computes(body, position) and any(numbers[v] in given for v in equation.outvars):
                gone = [v for v in equation.outvars if numbers[v] in given]
                places = graph.positions[body]
                readers = []
                for variable in gone:  # defined in any case, since JAX may check programs that it removes dead code of
                    read = [places[n][1] for n in reads.get(numbers[variable], ()) if n in places]
                    readers.append(jaxprs.reader(equation, read, variable))
                edits[body].replaced[position] = [*without_results(equation, gone), *readers]
            elif equation.primitive.name == "scan":  # the values that it returns are read from elsewhere
                places = graph.positions[body]
                for variable in (v for v in equation.outvars if numbers[v] in given):
                    _, first = places.get(numbers[variable], (0, variable))
                    if first is not variable:  # it stacks its slices as they are: that array, and no further result
                        edits[body].renamed[variable] = edits[body].renamed.get(first, first)
                        continue
                    other = edits[body].renamed[variable] = Var(variable.aval)
                    read = [places[n][1] for n in reads.get(numbers[variable], ()) if n in places]
                    edits[body].added.append(jaxprs.reader(equation, read, other))
    alive: set[int] = set()
    owner = {v: n for numbers in graph.numbers.values() for v, n in numbers.items()}
    todo: list[JaxprLike] = [jaxprs.without_dead_code(rebuild(graph.root, edits))]
    while todo:
        jaxpr, _ = jaxprs.open_jaxpr(todo.pop())
        for equation in jaxprs.live_equations(jaxpr.eqns, jaxpr.outvars):  # JAX leaves dead ones in a while_loop
            if not jaxprs.is_reader(equation):
                alive.update(owner[v] for v in equation.outvars if v in owner)
            todo += [inner for _, _, inner in jaxprs.bodies(equation)]
    return frozenset(alive)


def _walked(graph: Graph, given: frozenset[int], reads: Mapping[int, Iterable[int]]) -> frozenset[int]:
    """Computes the same for a program with plain bodies alone, by one walk from the results."""
    numbers = graph.numbers[graph.root]
    alive: set[int] = set()
    read = {numbers[atom] for atom in graph.root.outvars if isinstance(atom, Var)}
    for node in reversed(graph.nodes):
        own: Sequence[int] = node.outputs
        if not given.isdisjoint(own):
            read.update(number for n in own if n in given and n in read for number in reads.get(n, ()))
            own = [n for n in own if n not in given]
        if not read.isdisjoint(own) or compat.has_side_effects(node.equation):
            if node.name not in CUSTOM_RULES:
                alive.update(own)
                read.update(node.inputs)
                continue
            alive.update(graph.kept(node, own, read))
            read.update([*graph.needs(node), *graph.results_needed(node, read.intersection(own))])
    return frozenset(alive)


def _remaining(graph: Graph, given: frozenset[int], least: int = 0) -> frozenset[int]:
    """Computes the same without a walk over the program: what all of it computes, less what loses its last reader.

    The steps are in proportion to the equations that go. A value is read by later ones alone, so that those before
    ``least`` tell nothing of the others.
    """
    everything = surviving(graph)
    readers = graph.readers
    lost: dict[int, int] = {}
    unread: set[int] = set()
    gone: set[int] = set()
    idle: set[Node] = set()
    todo = list(given & everything)
    while todo:
        number = todo.pop()
        if number < least:
            continue
        graph.steps.spend()
        node = graph.definitions[number]
        freed: list[int] = []
        if node.name in CUSTOM_RULES:
            if number not in unread and readers.get(number):
                freed += graph.results_needed(node, [number])
            if number not in graph.kept(node, [number]):
                gone.add(number)
        unread.add(number)
        for n in node.outputs:
            if n not in given and readers.get(n, 0) > lost.get(n, 0):
                break
        else:
            if node not in idle and not compat.has_side_effects(node.equation):
                idle.add(node)
                freed += graph.needs(node) if node.name in CUSTOM_RULES else {*node.inputs}
        for n in freed:
            count = lost[n] = lost.get(n, 0) + 1
            if readers.get(n, 0) == count and n in everything:
                todo.append(n)
    return everything.difference(given, gone, [number for node in idle for number in node.outputs])


def _needed(graph: Graph) -> tuple[frozenset[int], dict[int, int]]:
    """Returns, of a program with plain bodies alone, the values that it computes; and per number, how many computations
    that it needs read it, and one more for a result of the program."""
    numbers = graph.numbers[graph.root]
    readers = dict.fromkeys([numbers[atom] for atom in graph.root.outvars if isinstance(atom, Var)], 1)
    alive: list[int] = []
    for node in reversed(graph.nodes):
        own = node.outputs
        read = [n for n in own if n in readers]
        if not read and not compat.has_side_effects(node.equation):
            continue
        if node.name in CUSTOM_RULES:
            alive += graph.kept(node, own, read)
            needed = [*graph.needs(node), *graph.results_needed(node, read)]
        else:
            alive += own
            needed = [*node.inputs] if len(node.inputs) < 2 else [*{*node.inputs}]
        for number in needed:
            readers[number] = readers.get(number, 0) + 1
    return frozenset(alive), readers
