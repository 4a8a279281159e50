"""How to write code so that a near miss becomes a site, where that can be said."""

from __future__ import annotations

import re

__all__ = ["hint"]

_HINTS: tuple[tuple[str, str], ...] = (
    (
        r"numbers of experts are in range",
        "A gather takes a number out of range for the last expert, or for NaN, and a mixture for no expert. Take the "
        "numbers from jax.lax.top_k or jnp.argmax over the experts, or clip them to 0 and the last one with jnp.clip.",
    ),
    (
        r"numbers are counted in",
        "Compare with jnp.arange of the number of experts in int32, and cast the comparison.",
    ),
    (
        r"by a scatter and a gather",
        "Pick rows, y[chosen, place], of what experts compute for their slots, each slot by itself, with one gather "
        "for all choices of a token. Or sort the tokens by expert and call jax.lax.ragged_dot with the number of "
        "tokens of each: no slots, and no token is dropped.",
    ),
    (
        r"tokens of each expert are gathered|rows that are gathered for their slots",
        "Sort the tokens by expert, repeated for each of their choices, and call jax.lax.ragged_dot with the number of "
        "tokens of each expert: it computes no rows but those of tokens.",
    ),
    (
        r"choose their tokens, by products",
        "Gather each expert's tokens, x[chosen], and add what they give with .at[chosen].add: products with one-hot "
        "vectors cost more. Each expert computes its own tokens alone either way, and no kernel of this library does "
        "that better.",
    ),
    (
        r"choose their tokens, by gathers",
        "Nothing has to be changed: products with a batch of experts, as they are written, are all that there is to "
        "compute.",
    ),
    (
        r"matrices of a token's experts are gathered",
        "Give each row's expert by one integer that all its gathers share, from jax.lax.top_k or jnp.argmax.",
    ),
    (
        r"computes every token",
        "jax.lax.ragged_dot over tokens sorted by expert computes what is chosen and nothing else. Where every expert "
        "computes every token, choose with top_k, make the weights of the others exactly zero (one_hot, or where with "
        "0), and sum over the experts at the end.",
    ),
    (
        r"with a capacity",
        "Number the slots by jnp.cumsum of the one-hot mask along the tokens, in int32 or float32, times that mask; "
        "count second choices on from the sum of the first mask, and dispatch where the weights are not zero "
        "(combine.astype(bool)). Or sort the tokens by expert and call jax.lax.ragged_dot with the number of tokens of "
        "each: no slots, and no token is dropped.",
    ),
    (
        r"mask on the probabilities|weighted probabilities|exponentials are weighted",
        "Mask the scores, before the softmax, with -inf; or the probabilities with jnp.where(mask, p, 0), with a mask "
        "that does not depend on the scores.",
    ),
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
        r"epsilon",
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
        r"normalised along another axis too|labels of columns are compared",
        "Logits may be normalised along whole rows and along whole columns, not along a part of them. Or write two "
        "products, a @ b.T for one softmax and b @ a.T for the other: each is found by itself.",
    ),
    (
        r"a maximum that something is added to",
        "Add to the scores first, and subtract the maximum of what is exponentiated.",
    ),
    (
        r"hidden after the maximum is subtracted",
        "Mask the scores, with -inf, before their maximum is taken: jax.nn.softmax(scores, where=mask).",
    ),
    (
        r"a maximum that is infinite in",
        "Take the maximum in the scores' own dtype, or mask with -inf.",
    ),
    (
        r"waits for what another site computes",
        "Where both are products of logits, write one product of the concatenated weights: its softmax runs over all "
        "of them.",
    ),
    (
        r"computed again only where",
        "Let the checkpoint's policy recompute the head's product (do not save it), or leave the head outside of the "
        "checkpoint.",
    ),
    (
        r"computed once and read inside a loop|in pieces of the vocabulary",
        "Write the loss without the loop, as one product and one log-softmax: the kernel works piece by piece itself.",
    ),
    (
        r"gathered|picked from the logits|several labels",
        "Pick the label's logit with take_along_axis(logits, labels[..., None], -1), or with a one_hot and a sum.",
    ),
    (
        r"several blocks of scores",
        "Concatenate the keys, the values and the masks along the keys, and write one softmax over all of them.",
    ),
    (
        r"several blocks of keys",
        "Compute the queries once, and give the same array to the product with each block of keys; or concatenate the "
        "keys, the values and the masks along the keys, and write one softmax over all of them.",
    ),
    (
        r"product that is added",
        "Add products to the scores and read them nowhere else: what masks or weighs them is a value of its own.",
    ),
    (
        r"column beside the keys",
        "Write a sink as one more column of scores: concatenate it to them, take the softmax, drop the column.",
    ),
    (
        r"through the maximum",
        "Subtract jax.lax.stop_gradient of the maximum, or use jax.nn.softmax, which does.",
    ),
    (
        r"factor of the (row|result|exponentials)|maximum (is taken )?over|the denominator",
        "Normalise with jax.nn.softmax(scores), and multiply what comes after it by whatever else the row needs.",
    ),
    (
        r"score program|pass(es)? through|parameter that cannot be compared|value beside the logits",
        "Between the two products of a site may stand what works element by element (scales, masks, biases, caps, "
        "activations) and what only moves axes. Anything else belongs before the first or after the second.",
    ),
    (
        r"numbers per row|scattered into|by index|gradient is multiplied|sums? (the|their) exponentials",
        "Take the loss of each row from jax.nn.log_softmax(logits), or optax's softmax_cross_entropy; weigh, mask and "
        "average these losses, not the logits.",
    ),
    (
        r"a statistic needs|would need its own results|in the pass that finds it|argmax counts",
        "Let the loss need the logits for a log-softmax, labels and an argmax alone; compute what else is wanted of "
        "them in a function of its own.",
    ),
    (
        r"runs over (a part|rows)|over another axis at|repeated along|second contraction|side input with a gradient",
        "Keep to one axis for the keys, or for the vocabulary, from the first product to the last: what slices, "
        "repeats or contracts it in between hides it.",
    ),
    (
        r"axis of the \w+(, of size \w+,)? is missing|axis twice|ragged axis|index has the mode",
        "Write the product with jnp.einsum, each axis named: those of the batch, one that is summed over, the rest.",
    ),
    (
        r"logits of several products",
        "Give all heads the same rows and the same vocabulary, in the same order, before the loss reads their logits "
        "together; another head's logits may also be computed outside, with jax.lax.stop_gradient around them.",
    ),
    (
        r"precision",
        "Ask for one precision (DEFAULT, HIGH or HIGHEST) in all products of the site, or for none.",
    ),
    (
        r"custom rule|derivative of its own",
        "The function has a derivative of its own (custom_jvp or custom_vjp). Without it, JAX's derivative is found.",
    ),
    (
        r"gradient is stopped|backward|cotangents",
        "Take the gradient of the whole loss inside the optimized function, jax.value_and_grad(loss)(parameters), so "
        "that forward and backward are one program.",
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
        r"enclosing body|lacks an operand where",
        "Compute the operand where it is used, in the body of the loop or the checkpoint; or hand it to the body as it "
        "is read there, as one of its arguments.",
    ),
    (
        r"at hand only after|read along a diagonal|two layouts",
        "Compute the operand where it is used, in the same function and before it.",
    ),
    (
        r"assume_finite is off",
        "jax.nn.softmax and jax.nn.logsumexp subtract the largest number that counts, with a mask before it or by "
        "their argument where; then nothing has to be assumed. Or leave assume_finite on.",
    ),
    (
        r"whole numbers .* are summed",
        "Count with a comparison, as in jnp.sum(logits > limit), which is exact; other sums of whole numbers that are "
        "made of logits are left to the program.",
    ),
    (
        r"no elements",
        "An axis of size 0 leaves nothing to compute.",
    ),
    (
        r"more than .* operations",
        "A kernel evaluates what stands between a product and the exponential on each tile; what does not depend on "
        "the scores can be computed before, and repeated steps can often be one.",
    ),
    (
        r"captured array is read (in|behind) a loop over experts",
        "Hand the array to the function as an argument: what it holds is not known while the function is traced.",
    ),
)


def hint(reason: str) -> str:
    """What a reader may do about a near miss.

    Args:
      reason: the near miss's.

    Returns:
      One or two sentences, or an empty string where nothing general can be said.

    Example:
      >>> hint("dropout is active on the probabilities").startswith("Dropout on the probabilities")
      True
    """
    return next((advice for pattern, advice in _HINTS if re.search(pattern, reason)), "")
