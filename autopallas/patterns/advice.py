"""Lists advice on near misses that several reasons share; other advice stands beside its reason."""

from __future__ import annotations

# ---------------------------------------------------------------------- any operation

ASSUME_FINITE = (
    "Use jax.nn.softmax or jax.nn.logsumexp, with the mask before it or as its argument where: it subtracts the "
    "largest number that counts, so that nothing has to be assumed. Or leave assume_finite on."
)
AT_HAND = "Compute the operand in the same function, before the place where the result is computed."
CAPTURED = "Pass the array to the function as an argument: what it holds is not known while the function is traced."
DIAGONAL = "Take the diagonal first, with jnp.diagonal, and read the result in the operand's place."
EMPTY = "An axis of size 0 leaves nothing to compute: nothing has to be changed."
FLOATS = "Use float32, bfloat16 or float16 for the arrays of the products."
IN_THE_BODY = (
    "Compute the operand where it is used, in the body of the loop or the checkpoint. Or pass it to the body as one "
    "of its arguments, in the form in which the body reads it."
)
OWN_DERIVATIVE = (
    "The function has a derivative of its own (custom_jvp or custom_vjp). Write it without one: the derivative that "
    "JAX makes is recognised."
)
PRECISION = "Ask for one precision (DEFAULT, HIGH or HIGHEST) in all products of the computation, or for none."
SIDE_DTYPES = "Use booleans, integers or real floating-point numbers for what masks, shifts or scales."
QUANTISED = "Cast operands of 8 bits to bfloat16, which holds all of their values, before the products."
SIDE_EFFECTS = "Print, log and call back outside of the computation: an effect fixes the order of everything around it."
WHOLE_GRADIENT = (
    "Take the gradient of the whole loss inside the optimized function, jax.value_and_grad(loss)(parameters), so that "
    "forward and backward are one program."
)

# ---------------------------------------------------------------------- attention

BETWEEN_PRODUCTS = (
    "Between the product that gives the scores and the last step of the computation, write only what works element by "
    "element (scales, masks, biases, caps, activations), what only moves axes, and the softmax. Anything else "
    "belongs before that product or after the result."
)
CHOSEN_KEYS = (
    "Choose the keys without a gradient, and compute the scores of the chosen ones again: "
    "jnp.einsum('qd,qkd->qk', queries, keys[numbers]) is attention over gathered keys, which is recognised."
)
DISTANCES = (
    "If queries and keys are as small as their differences, write the scores as a product: the softmax of -|q - k|**2 "
    "is that of 2 * q @ k.T - |k|**2, a bias of each key, which is recognised."
)
EDGES = (
    "A graph with few edges is computed best as it is. Where most nodes are neighbours, write the scores of all pairs, "
    "mask those without an edge with -inf, and take jax.nn.softmax over them: that is recognised."
)
EINSUM = (
    "Write both products with jnp.einsum, each axis named once per operand, and keep every batch axis (examples, "
    "heads) in the result: sum over it afterwards."
)
EPSILON = (
    "jax.nn.softmax needs no epsilon and no floor: it subtracts the largest score, so that the sum is at least 1. "
    "Without the epsilon this is recognised."
)
MASK_SCORES = (
    "Mask the scores, before the softmax, with -inf; or the probabilities with jnp.where(mask, p, 0), with a boolean "
    "mask that does not depend on the scores."
)
NORMALISE = (
    "Normalise with jax.nn.softmax(scores), and multiply the result of the second product by whatever else the row "
    "needs."
)
POINTWISE = (
    "The kernels compute softmax attention: jax.nn.softmax(scores), if that will do. Other weights are computed as "
    "they are written."
)
OVER_THE_KEYS = (
    "Take the softmax over the keys, the axis that the second product sums over: check its axis=. A product that mixes "
    "the probabilities of several heads needs them stored: there, nothing has to be changed."
)
OWN_DTYPE = "Take the maximum in the scores' own dtype, or mask with -inf."
QUERIES_ONCE = (
    "Compute the queries once, and give the same array to the product with each block of keys; or concatenate the "
    "keys, the values and the masks along the keys, and write one softmax over all of them."
)
MAPS_ALIKE = "Give all of the softmaxes the same mask, scale and dtypes; or multiply each of them with the values."
PRODUCTS_APART = (
    "Compute each by a product of its own, x @ w[:, :d] and x @ w[:, d:]: then the columns of the first matrix are "
    "queries, and the rows of x keys. Or leave it: where the softmaxes are features of linear attention, the work "
    "grows with the length alone already."
)
SAME_SUM = (
    "Divide by the sum of exactly the exponentials that weight the values: jax.nn.softmax(scores, where=mask), or "
    "mask the scores with -inf before the softmax."
)
SAME_VALUES = (
    "Let the values be the same for all queries, and independent of the scores. What depends on the query belongs "
    "after the second product."
)
SIDE_INPUT_ONCE = (
    "Read the side input (a bias, a scale) in one place between the two products: combine all that is read of it into "
    "one array first."
)
SINK = "Write a sink as one more column of scores: concatenate it to the scores, take the softmax, drop the column."
SOFTMAX_AT_ONCE = (
    "Take the softmax of all scores at once, without the loop, or compute both products within it: the kernel works "
    "piece by piece itself, and stores no scores."
)
STOP_EARLIER = (
    "Stop the gradient of the queries and the keys, before the first product. Inside the softmax, stop that of the "
    "maximum alone, as jax.nn.softmax does."
)

# ---------------------------------------------------------------------- cross-entropy

BETWEEN_LOGITS = (
    "Between the product that gives the logits and the softmax, write only what works element by element (scales, "
    "masks, biases, caps) and what only moves axes. Anything else belongs before the product, or in a separate "
    "function."
)
COUNT = (
    "Count with a comparison, as in jnp.sum(logits > limit), which is exact; other sums of whole numbers that are "
    "made of logits are left to the program."
)
LOGITS_APART = (
    "Compute what else needs the logits (samples, metrics, histograms) in a separate function, called only where its "
    "result is needed. Accuracy by argmax may stay: the kernel computes it."
)
JOINED = (
    "Take the logsumexp of the logits of each product, and combine these numbers with jnp.logaddexp, instead of the "
    "logits. Join rows of the activations before the product, or losses after it."
)
IN_SHARD_MAP = (
    "Compute the loss in the same shard_map, and return its sum or mean over the devices (lax.psum, lax.pmean); or "
    "leave out the shard_map, and shard the operands of a jitted function."
)
COLUMNS = (
    "Set elements of the logits by their position, with jnp.where(jnp.arange(V) == token, value, logits), in the place "
    "of logits.at[..., token].set(value)."
)
ROWS_BEFORE = (
    "Select, pad, reorder or join rows of the activations, before the product that gives the logits; or the losses of "
    "the tokens, after it."
)
OF_PIXELS = (
    "Write a convolution whose kernel has one pixel as the product that it is: x @ kernel[0, 0] for x of pixels and "
    "channels, or a dense layer in the place of the convolution."
)
SIGMOIDS = (
    "A loss of sigmoids is left to the compiler, which keeps its logits. Where they take too much memory, compute it "
    "for a block of rows at a time: jax.lax.map over jax.checkpoint of the loss of a block."
)
LOGITS_RETURNED = (
    "Return the logits from a separate function. If the array is the gradient of soft labels, put "
    "jax.lax.stop_gradient around these; or, where that gradient is needed, take the weight's in the same function: "
    "one kernel gives both."
)
LOGITS_AS_A_PRODUCT = "Write the logits as one product of matrices: x @ y.T, or jnp.einsum('id,jd->ij', x, y)."
LOGITS_OF_DISTANCES = (
    "If rows and prototypes are as small as their differences, write the logits as a product: the softmax of "
    "-|x - c|**2 is that of 2 * x @ c.T - |c|**2, a bias of each column, which is recognised."
)
LOSSES_OF_A_RULE = (
    "Return the loss of each row from the function with a derivative of its own (custom_vjp), and average outside. Or "
    "write it without one: the derivative that JAX makes is recognised."
)
MATRIX = (
    "Let the vector be a matrix of one column, (x @ w[:, None])[..., 0]: then the gradient is a product with it, which "
    "is recognised."
)
LOGITS_ONCE = (
    "Read the logits for a log-softmax, labels and an argmax alone; compute what else is wanted of them in a separate "
    "function."
)
LOSS_PER_ROW = (
    "Take the loss of each row from jax.nn.log_softmax(logits), or from optax.softmax_cross_entropy; weight, mask and "
    "average these losses, not the logits."
)
NO_LOOP = "Write the loss without the loop, as one product and one log-softmax: the kernel works piece by piece itself."
NO_LOOP_OVER_KEYS = (
    "Write the attention without the loop, as one softmax of all scores: the kernel goes through them block by block "
    "itself, and leaves out blocks that a mask hides."
)
ONE_LABEL = (
    "Pick one logit per row, with jnp.take_along_axis(logits, labels[..., None], -1), or with a one_hot and a sum."
)
OWN_PRODUCTS = (
    "Take one loss of all rows, and divide its numbers afterwards; or give each loss a product of its own: of the "
    "start and the end of a span, (x @ w[:, :1])[..., 0] and (x @ w[:, 1:])[..., 0], each with its softmax over the "
    "positions."
)
SAME_HEADS = (
    "Give all heads the same rows and the same vocabulary, in the same order, before the loss reads their logits "
    "together; or compute the loss of each head by itself."
)
WHOLE_COLUMNS = (
    "Normalise logits along whole rows and along whole columns, not along a part of them. Or write two products, a @ "
    "b.T for one softmax and b @ a.T for the other: each is recognised by itself."
)
WHOLE_ROWS = (
    "Keep the rows of logits whole: select rows of the activations before the product, or mask the losses; leave "
    "columns out by masking them with -inf. Where several losses have columns of their own, give each a product of its "
    "own, such as x @ w[:, :n]."
)
OWN_LOGITS = (
    "Let each loss read the result of a product of its own, and not a part of an array in which several results are "
    "joined: a list of logits, in the place of jnp.stack."
)
GRADIENTS_OF_EXAMPLES = (
    "Sum the losses of all rows, and differentiate the sum. Where each example needs a gradient of its own, this is "
    "larger than the logits, and nothing has to be changed."
)
NO_FURTHER_PRODUCT = (
    "Where a product with one-hot vectors picks the elements of labels, as for CTC, pick them with "
    "jnp.take_along_axis(logs, labels, -1): up to 16 labels of each row are recognised. Any other product of all "
    "elements of a row keeps the logits, and nothing has to be changed."
)

# ---------------------------------------------------------------------- grouped matmul, mixtures of experts

ALL_TOKENS_AT_ONCE = (
    "Compute all tokens at once, with jax.vmap in place of the loop, jax.lax.map or scan: it is recognised, and no "
    "matrix is copied for a token."
)
BOTH_ENDS = (
    "Give each interval both ends, jnp.where((start[e] <= row) & (row < end[e]), expert(rows), 0), and add up the "
    "results. Or call jax.lax.ragged_dot with the sorted rows and the number of rows of each expert."
)
BETWEEN_EXPERTS = (
    "Between the products of an expert, write only what works element by element (activations, gates, scales, "
    "biases). Normalise tokens before the experts or after their weighted sum."
)
CHOOSE_FEW = (
    "jax.lax.ragged_dot over tokens sorted by expert computes what is chosen and nothing else. Where every expert "
    "computes every token, choose with top_k, make the weights of the others exactly zero (one_hot, or where with 0), "
    "and sum over the experts at the end."
)
WEIGHTS_FIRST = (
    "Add up the weights of each expert first, and add its results once: out += expert(x) * jnp.where(chosen == e, "
    "weights, 0).sum(-1, keepdims=True)."
)
EXPERTS_APART = (
    "Compute what else needs the results of the experts in a separate function, called only where its result is "
    "needed: the kernel gives their weighted sum alone."
)
WEIGHTS_APART = (
    "Compute what else needs the weights, such as a loss of balance, from the router's probabilities or from the "
    "weights of the chosen experts alone: jnp.zeros(experts).at[chosen].add(weights) sums them for each. Where "
    "its gradient is not needed, put jax.lax.stop_gradient around the weights that it reads."
)
GROUP_SIZES = "Give group sizes as int32 that sum to at most the number of rows, without an offset."
NUMBER_SLOTS = (
    "Number the slots by jnp.cumsum of the one-hot mask along the tokens, in int32 or float32, times that mask; count "
    "second choices on from the sum of the first mask, and dispatch where the weights are not zero "
    "(combine.astype(bool)). Or sort the tokens by expert and call jax.lax.ragged_dot with the number of tokens of "
    "each: no slots, and no token is dropped."
)
NO_BRANCHES = (
    "Loop over stacked matrices with jax.lax.scan, and add up each expert's result times its weights; or sort the "
    "tokens by expert, and call jax.lax.ragged_dot: then no expert computes what nobody chose."
)
ONE_TOKEN = (
    "Compute several tokens at once; or pick the matrices of the token's experts, and multiply with these alone: "
    "jnp.take(matrices, chosen, axis=0)."
)
ONE_NUMBER = "Give each row's expert by one integer that all its gathers share, from jax.lax.top_k or jnp.argmax."
PICK_ROWS = (
    "Pick rows, y[chosen, place], of what the experts compute for their slots, each slot by itself, with one gather "
    "for all choices of a token. Or sort the tokens by expert and call jax.lax.ragged_dot with the number of tokens "
    "of each: no slots, and no token is dropped."
)
SORT_TOKENS = (
    "Sort the tokens by expert, repeated for each of their choices, and call jax.lax.ragged_dot with the number of "
    "tokens of each expert: it computes no rows but those of tokens."
)

# ---------------------------------------------------------------------- linear attention

LINEAR_SCORES = (
    "Multiply the products of queries and keys by numbers, by one mask, jnp.tril of ones (or its transpose), and by "
    "one decay alone: gamma ** (t - s), jnp.exp(rate * (t - s)), or jnp.exp(c[:, None] - c[None]) with c = "
    "jnp.cumsum(log_decays), made in the function. Put other factors into queries, keys or values, and further decays "
    "into a jax.lax.scan over the steps."
)
LINEAR_ROWS = (
    "Divide by the sum of the scores of each row, or by jnp.maximum(jnp.abs(sum), number), which running sums give; or "
    "divide what is computed for each row afterwards, such as by a norm: a maximum of scores, or a sum of their "
    "absolute values, needs all scores."
)
LINEAR_STATES = (
    "Multiply the third array into keys or values before their outer product: what is summed is then a product of two "
    "arrays, as jnp.einsum('btn,btp->btnp', keys, values) is."
)

# ---------------------------------------------------------------------- recurrences

STATE = (
    "Write a step's state as decay * state + key[:, None] * value[None, :], in one type of at least 32 bits, with a "
    "decay that does not read the state and is the same along its columns."
)
TRANSITIONS = (
    "Where the matrix is an identity or a diagonal and outer products, write these in the step: state - rate * "
    "key[:, None] * (key @ state)[None, :]. What it consists of is not looked for before the loop."
)
CASCADE = (
    "Where the numbers stay the same from step to step, and the matrix has real eigenvalues p and r, two loops of the "
    "first order give the same, one after the other: g = p * g + x, then h = r * h + g, for y = (p + r) * y1 - p * r * "
    "y2 + x. Otherwise nothing has to be changed: such a loop stays as it is."
)
READOUT = "Read the state by one sum over all its rows, query @ state, and compute the rest from the result."
OWN_ROWS = (
    "Write one whole row in each step, at a position that follows from the number of the step alone, and read of those "
    "that other steps write the ones before it, at a fixed distance: y = y.at[i].set(a * y[i - 1] + x[i])."
)
COUNTED = "Let the loop run a known number of times: jax.lax.scan, or jax.lax.fori_loop with Python numbers as bounds."
FEW_STEPS = (
    "Nothing has to be changed: a loop of few steps costs little. Where its steps are chunks of a sequence, "
    "let it go through the sequence step by step."
)
SCANNED = (
    "Combine a decay and an input alone, (a, b) and (c, d) to (a * c, c * b + d). A state that is reset has a decay of "
    "0 there: jnp.where(reset, 0, decay) before the scan."
)
SCANNED_LOGARITHMS = (
    "Where the numbers themselves stay in range, scan these and not their logarithms: a pair (a, b) and the next one "
    "(c, d) to (a * c, c * b + d), for h[t] = a[t] h[t-1] + b[t]. Without a gradient, jax.lax.cumlogsumexp is replaced."
)
STEP_ALONE = "Keep in the loop what depends on the state, and compute everything else before it, for all steps at once."
FIRST_VARIES = (
    "Give the loop a first value that varies as its steps do, such as an argument of the function in the shard_map, or "
    "zeros computed from one: x[0] * 0."
)
LOOP_GRADIENT = (
    "Take the gradient of one loss of the loop's stacked result, in the same function, with "
    "jax.value_and_grad(loss)(parameters)."
)
