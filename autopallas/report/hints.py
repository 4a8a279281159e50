"""How to write code so that a near miss becomes a site, where that can be said."""

from __future__ import annotations

import re

__all__ = ["hint"]

_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"(scores|probabilities).*also (returned|used)",
        "Return or log the probabilities from a function of its own, called where they are looked at; a train step "
        "that needs them has to store them.",
    ),
    (
        r"dropout is active",
        "Dropout on the probabilities keeps all of them in memory. If the model allows it, set its rate to 0, or drop "
        "parts of the attention's output instead.",
    ),
    (
        r"epsilon|added to the denominator|function of the row of scores",
        "jax.nn.softmax needs no epsilon: it subtracts the largest score, so that the sum is at least 1. Without the "
        "epsilon this is found.",
    ),
    (
        r"softmax runs over another axis|not the key axis|lack the key axis|does not carry the key axis",
        "In attention the softmax runs over the keys, the axis that the second product sums over. Check its axis=.",
    ),
    (
        r"normaliser",
        "Divide by the sum of exactly the exponentials that weigh the values: jax.nn.softmax(scores, where=mask), or "
        "the mask inside the scores, with -inf.",
    ),
    (
        r"depends? on the (query|scores)|values do",
        "The values have to be the same for all queries. What depends on the query belongs after the second product.",
    ),
    (
        r"logits are also used by|apart from the rest|not reduced",
        "Compute what else needs the logits (samples, metrics, histograms) in a function of its own. Accuracy by "
        "argmax may stay: the kernel gives it.",
    ),
    (
        r"computed once and read inside a loop|piece by piece",
        "Write the loss without the loop, as one product and one log-softmax: the kernel works piece by piece itself.",
    ),
    (
        r"gathered|picked from the logits|several labels",
        "Pick the label's logit with take_along_axis(logits, labels[..., None], -1), or with a one_hot and a sum.",
    ),
    (
        r"precision",
        "Ask for one precision (DEFAULT, HIGH or HIGHEST) in all products of the site, or for none.",
    ),
    (
        r"custom rule",
        "The function has a derivative of its own (custom_jvp or custom_vjp). Without it, JAX's derivative is found.",
    ),
    (
        r"gradient is stopped|backward|cotangents",
        "Take the gradient of the whole loss inside the optimized function, jax.value_and_grad(loss)(parameters), so "
        "that forward and backward are one program.",
    ),
    (
        r"explicit sharding",
        "Leave the result's sharding to the compiler (no out_sharding), or call the operation inside shard_map.",
    ),
    (
        r"group sizes of dtype|group offset",
        "Give group sizes as int32 that sum to at most the number of rows, without an offset.",
    ),
    (
        r"dtype",
        "Use float32, bfloat16 or float16 for the arrays of the site.",
    ),
    (
        r"side effects",
        "Print, log and call back outside of the site: an effect fixes the order of everything around it.",
    ),
    (
        r"enclosing body|at hand only after|read along a diagonal|two layouts",
        "Compute the operand where it is used, in the same function and before it.",
    ),
)


def hint(reason: str) -> str:
    """What a reader may do about a near miss.

    Args:
      reason: the near miss's.

    Returns:
      One or two sentences, or an empty string where nothing general can be said.

    Example:
      >>> hint("dropout is active on the probabilities or scores").startswith("Dropout on the probabilities")
      True
    """
    return next((advice for pattern, advice in _HINTS if re.search(pattern, reason)), "")
