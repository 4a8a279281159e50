"""Takes logits apart that are put together from several arrays before a loss.

A contrastive loss reads ``concatenate([positive, x @ queue.T], 1)``, one with sampled labels the true label's logit
beside those of the sample.  Elementwise functions of what is put together are the functions of its parts; a sum or a
maximum over all is made of those over the parts; and of the gradient, each product reads its own part.  What remains is
a loss of the logits that one product gives, and of numbers of its rows.
"""

from __future__ import annotations

import jax.numpy as jnp

from autopallas import compat
from autopallas.compat import Var
from autopallas.faults import contained
from autopallas.graph.custom_rules import ELEMENTWISE
from autopallas.graph.flatten import Body, is_contraction
from autopallas.graph.parts import MOST_PARTS, Cut, Parts
from autopallas.graph.rewritten_body import Atom

__all__ = ["LAYOUT", "take_logits_apart"]

_JOINS = ("concatenate", "stack")
LAYOUT = frozenset(
    {"transpose", "reshape", "broadcast_in_dim", "squeeze", "expand_dims", "copy", "slice", "split", "unstack"}
)
"""Primitives through which logits pass between a product and an exponential, with the elementwise ones."""


def take_logits_apart(root: Body) -> Body:
    """Takes logits apart that are put together, in place, in every body."""
    joined = {body: _joined(body) for body in root.walk()}
    attends = any(weights for _, weights in joined.values())
    for body, (found, _) in joined.items():
        if attends:  # a backward may compute an attention's weights again, and not what they weigh
            found = {variable for variable in found if not _in_backward(body, variable)}
        if found:
            with contained("logits that are put together", "cross_entropy", "graph"):
                Parts(body, {v: Cut.of(body.equations[body.defined[v]]) for v in found}).run()
    return root


def _in_backward(body: Body, variable: Var) -> bool:
    return body.transposed or compat.is_transposed(body.equations[body.defined[variable]])


def _joined(body: Body) -> tuple[set[Var], bool]:
    """Returns the arrays that are put together, one part of them by a product, for a softmax that weighs nothing, and
    whether there are some for one that does.

    They flow element by element into an exponential, and into no product but those of a backward.
    """
    names = {e.primitive.name for e in body.equations}
    if "dot_general" not in names or names.isdisjoint(_JOINS) or names.isdisjoint(("exp", "exp2")):
        return set(), False
    exponents: set[Atom] = set()
    weights: set[Atom] = set()
    for equation in reversed(body.equations):
        name, results = equation.primitive.name, equation.outvars
        through = name in ELEMENTWISE or name in LAYOUT or name in _JOINS
        if name in ("exp", "exp2") or (through and not exponents.isdisjoint(results)):
            exponents.update(a for a in equation.invars if isinstance(a, Var))
        weighs = is_contraction(equation) and not (body.transposed or compat.is_transposed(equation))
        if weighs or (through and not weights.isdisjoint(results)):
            weights.update(a for a in equation.invars if isinstance(a, Var))
    products: set[Atom] = set()
    found: set[Var] = set()
    attends = False
    for equation in body.equations:
        name = equation.primitive.name
        reads = any(isinstance(a, Var) and a in products for a in equation.invars)
        if is_contraction(equation) or ((name in ELEMENTWISE or name in LAYOUT) and reads):
            products.update(equation.outvars)
        elif name in _JOINS and reads and len(equation.invars) <= MOST_PARTS:
            (result,) = equation.outvars
            if result in exponents and jnp.issubdtype(result.aval.dtype, jnp.floating):
                attends |= result in weights
                found.update({result} - weights)
    return found, attends
