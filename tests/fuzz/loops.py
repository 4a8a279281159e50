"""Random loops that respellings replace: of JAX, and of steps that Python writes one after the other."""

from __future__ import annotations

from .writing import Writer

__all__ = [
    "associative_scan",
    "expanded_scan",
    "gated_loop",
    "indexed_loop",
    "long_loop",
    "looped_bfloat16",
    "network",
    "repeated_steps",
    "summed_exponentials",
    "unrolled_loop",
    "written_loop",
]


def indexed_loop(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """A loop that reads the array at its own step, and sometimes writes there."""
    c = w.choices
    count = f"{x}.shape[1]"
    places = ["i", f"{count} - 1 - i", "2 * i", "i + 1", "jnp.maximum(i - 1, 0)", f"i - {count}", "i // 2"]
    here, there = (f"{x}[:, {c.pick(f'{at}.place {n}', places, 0.6)}]" for n in range(2))
    forms = [f"0.9 * h + {here}", f"jnp.tanh(h) + {here} * 0.1 * {there}", f"{here} * jnp.tanh(h + {there})"]
    step = c.pick(f"{at}.step", forms, 0.6)
    first = f"jnp.zeros_like({x}[:, 0])"
    if c.chance(f"{at}.lagged", 0.4):
        return _lagged_loop(w, at, x, count)
    if c.chance(f"{at}.writes", 0.5):
        place = c.pick(f"{at}.written", ["i", f"{count} - 1 - i", "i // 2"], 0.3)
        w.features.add("indexed loop, written")
        return (
            f"lax.fori_loop(0, {count}, lambda i, c: (lambda h: (h, c[1].at[:, {place}].set(h)))"
            f"((lambda h: {step})(c[0])), ({first}, jnp.zeros_like({x})))[1]"
        )
    reverse = c.chance(f"{at}.reverse", 0.3)
    w.features.add("indexed loop")
    return (
        f"jnp.moveaxis(lax.scan(lambda h, i: ({step},) * 2, {first}, jnp.arange({count}), reverse={reverse})[1], 0, 1)"
    )


def _lagged_loop(w: Writer, at: str, x: str, count: str) -> str:
    """A loop that reads of what it writes the slices of a few steps before, or others."""
    c = w.choices
    before = ["y[:, i - 1]", "y[:, i - 2]", "y[:, jnp.maximum(i - 1, 0)]", "y[:, i - 9]", "y[:, i // 2]", "y[:, 0]"]
    one, two = (c.pick(f"{at}.before {n}", before, 0.5) for n in range(2))
    step = c.pick(f"{at}.lagged step", [f"0.9 * {one}", f"jnp.tanh({one}) * {two}", f"{one} - 0.3 * {two}"], 0.6)
    bounds = c.pick(f"{at}.lagged bounds", ["1, {}", "0, {}", "2, {}", "1, {} - 1"], 0.5).format(count)
    write = c.pick(f"{at}.lagged write", ["set({})", "add({})", "set({}).at[:, i].multiply(0.5)"], 0.3)
    start = c.pick(f"{at}.lagged start", [x, f"jnp.zeros_like({x})"], 0.3)
    w.features.add("indexed loop, lagged")
    row = f"({step} + {x}[:, i]).astype({x}.dtype)"
    if c.chance(f"{at}.lagged reverse", 0.3):
        body = f"(lambda i, y: y.at[:, i].{write.format(row)})({count} - 1 - n, y)".replace("i - ", "i + ")
        return f"lax.fori_loop({bounds}, lambda n, y: {body}, {start})"
    return f"lax.fori_loop({bounds}, lambda i, y: y.at[:, i].{write.format(row)}, {start})"


def expanded_scan(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """A scan of what is expanded, of whose results less is read, or all."""
    c = w.choices
    decay = c.pick(f"{at}.decay", [f"jnp.exp(-jnp.abs({x})[..., None] * z)", f"jnp.tanh({x}[..., None] + z)"], 0.4)
    added = c.pick(f"{at}.added", [f"{x}[..., None] * z", f"jnp.cumsum({x}, 1)[..., None] * jnp.cos(z)"], 0.3)
    step = c.pick(f"{at}.step", ["a * h + b", "jnp.maximum(a * h, b)", "a * jnp.tanh(h) + b"], 0.5)
    read = c.pick(f"{at}.read", [".sum(-1)", " @ z", ".max(-1)", "[..., 0]", "[..., ::512].sum(-1)"], 0.5)
    inside = c.chance(f"{at}.inside", 0.5)
    reverse = c.chance(f"{at}.reverse", 0.3)
    first = f"jnp.zeros({x}[:, 0].shape + (512,), {x}.dtype)"
    given = ", ".join(f"jnp.moveaxis({own}, 1, 0)" for own in (decay, added))
    gives = f"(h{read})" if inside else "h"
    scan = (
        f"lax.scan(lambda h, own: (lambda a, b: (lambda h: (h, {gives}))(({step}).astype(h.dtype)))(*own), "
        f"{first}, ({given}), reverse={reverse})[1]"
    )
    w.features.add("expanded scan")
    whole = f"jnp.moveaxis({scan}, 0, 1){'' if inside else read}"
    return f"(lambda z: {x} + ({whole}).astype({x}.dtype) * 0.1)(jnp.linspace(0.1, 1.0, 512).astype({x}.dtype))"


def associative_scan(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """A linear recurrence, or something that looks like one."""
    c = w.choices
    decay = c.pick(f"{at}.decay", [f"jnp.tanh({x})", f"jnp.cos({x})", f"jnp.ones_like({x}) * 0.9"], 0.5)
    added = c.pick(f"{at}.added", [x, f"jnp.sin({x})", f"{x} * {x}"], 0.4)
    forms = [
        "(l[0] * r[0], r[0] * l[1] + r[1])", "(r[0] * l[0], r[1] + l[1] * r[0])", "(l[0] * r[0], l[0] * r[1] + l[1])",
        "(l[0] * r[0], r[0] * l[1] - r[1])", "(l[0] * r[0], jnp.maximum(r[0] * l[1], r[1]))",
    ]  # fmt: skip
    combine = c.pick(f"{at}.combine", forms, 0.5)
    axis, reverse = c.pick(f"{at}.axis", [1, 2, 0], 0.3), c.chance(f"{at}.reverse", 0.3)
    w.features.add("associative scan")
    return (
        f"lax.associative_scan(lambda l, r: {combine}, (({decay}).astype({x}.dtype), ({added}).astype({x}.dtype)), "
        f"axis={axis}, reverse={reverse})[1]"
    )


def looped_bfloat16(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """A loop that stacks bfloat16, or sets slices of an array of it and reads there."""
    c = w.choices
    dtype = c.pick(f"{at}.dtype", ["jnp.bfloat16", f"{x}.dtype"], 0.15)
    first = w.set("first", f"jnp.tanh({x} / 8).mean(1).astype({dtype})")
    if c.chance(f"{at}.carries", 0.6):
        return _cached(w, at, x, ids, first)
    steps = c.pick(f"{at}.steps", [64, 65, 100, 40], 0.5)
    forms = {
        "elementwise": "jnp.tanh(0.9 * h + a)", "product": f"jnp.tanh(h @ h.T @ {first} * a)",
        "gated": "h * jax.nn.sigmoid(a) + jnp.sin(h)", "cumulative": "jnp.tanh(lax.cumsum(h, axis=1) + a)",
        "branch": "lax.cond(a > 0, jnp.sin, jnp.cos, h + a)", "jitted": "jax.jit(jnp.tanh)(0.9 * h + a)",
    }  # fmt: skip
    step = c.pick(f"{at}.step", forms, 0.6)
    stacked = c.pick(f"{at}.stacked", ["h", "h * h", "(h, h.astype(jnp.float32))", "(h, a)", "h.sum()"], 0.5)
    reverse, unroll = c.chance(f"{at}.reverse", 0.3), c.pick(f"{at}.unroll", [1, 3], 0.2)
    slices = f"jnp.cos(jnp.arange({steps}.0)).astype({dtype})"
    w.features.add("looped bfloat16: stacked")
    ys = w.set(
        "ys",
        f"lax.scan(lambda h, a: (lambda h: (h, {stacked}))(({step}).astype(h.dtype)), {first}, {slices}, "
        f"reverse={reverse}, unroll={unroll})",
    )
    weights = f"jnp.sin(jnp.arange({steps}.0))"
    total = f"sum(jnp.tensordot({weights}, y.astype(jnp.float32), 1).mean() for y in jax.tree.leaves({ys}[1]))"
    return f"{x} + (0.1 * {total} + {ys}[0].mean()).astype({x}.dtype)"


def _cached(w: Writer, at: str, x: str, ids: str, first: str) -> str:
    """A loop that carries rows, and sets one after the other, or those that numbers say."""
    c = w.choices
    rows = c.pick(f"{at}.rows", [16, 24, 9, 7], 0.5)
    steps = c.pick(f"{at}.steps", [16, 20, 64, 15], 0.5)
    here = {
        "own": f"i % {rows}", "turned": f"(5 * i + 3) % {rows}", "data": f"({ids}.sum() + 3 * i) % {rows}",
        "beyond": "i", "before": "i - 4",
    }  # fmt: skip
    place, there = (c.pick(f"{at}.{name}", here, 0.6) for name in ("place", "there"))
    reads = {
        "slice": f"rows[:, {there}]", "dynamic": f"lax.dynamic_index_in_dim(rows, {there}, 1, False)",
        "filled": f"rows.at[:, {there}].get(mode='fill', fill_value=0.25)",
        "two": f"rows[:, {there}] - 0.5 * rows[:, 0]", "nothing": "h",
        "product": "jnp.einsum('bn,bnd->bd', jax.nn.softmax(jnp.einsum('bd,bnd->bn', h, rows)), rows)",
        "whole": "jnp.tanh(rows).mean(1)", "cumulative": "lax.cumsum(rows, axis=1)[:, 2]",
    }  # fmt: skip
    read = c.pick(f"{at}.read", reads, 0.7)
    writes = {
        "set": f"rows.at[:, {place}].set(h)",
        "update": f"lax.dynamic_update_slice_in_dim(rows, h[:, None], {place}, 1)",
        "dropped": f"rows.at[:, {place}].set(h, mode='drop')", "add": f"rows.at[:, {place}].add(h)",
        "twice": f"rows.at[:, {place}].set(h).at[:, {there}].set(0.5 * h)",
        "at times": f"jnp.where(h.sum() > 0, rows.at[:, {place}].set(h), rows)",
        "many": "rows.at[:, jnp.array([0, 3, 5])].set(h[:, None])", "one example": f"rows.at[1, {place}].set(h[0])",
    }  # fmt: skip
    write = c.pick(f"{at}.write", writes, 0.5)
    w.features.add("looped bfloat16: carried")
    with w.block("def step(i, carried):"):
        w.line("rows, h = carried")
        if c.chance(f"{at}.reads first", 0.6):
            w.line(f"h = jnp.tanh(0.5 * h + {read}).astype(h.dtype)")
            w.line(f"rows = {write}")
        else:
            w.line(f"rows = {write}")
            w.line(f"h = jnp.tanh(0.5 * h + {read} + 0.1).astype(h.dtype)")
        w.line("return rows, h")
    begin = c.pick(f"{at}.begin", ["jnp.zeros", "jnp.ones"], 0.3)
    start = f"{begin}(({first}.shape[0], {rows}, {first}.shape[1]), {first}.dtype)"
    ends = w.set("ends", f"lax.fori_loop(0, {steps}, step, ({start}, {first}))")
    weights = f"jnp.sin(jnp.arange({rows}.0))"
    total = f"jnp.einsum('n,bnd->bd', {weights}, {ends}[0].astype(jnp.float32)) + {ends}[1]"
    return f"{x} + (0.1 * ({total}))[:, None].astype({x}.dtype)"


def long_loop(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """A loop whose gradient reads much of each step, with the gradient, or that of what is around it."""
    c = w.choices
    steps = c.pick(f"{at}.steps", [48, 33, 64, 24, 100, 15], 0.5)
    weights = w.normal("w", (size["d"], size["d"]), "float32", 0.5)
    forms = {
        "gated": ["g = jax.nn.sigmoid(h + a)", "h = g * h + (1 - g) * jnp.tanh(h * a + n / 8)"],
        "product": ["g = jnp.tanh(h @ w.astype(h.dtype) + a)", "h = 0.5 * h + jnp.sin(g) * jax.nn.sigmoid(g + n)"],
        "drawn": [
            "k = jax.random.fold_in(jax.random.PRNGKey(3), n.astype(jnp.int32))",
            "g = jnp.where(jax.random.bernoulli(k, 0.7, h.shape), jnp.tanh(h + a), 0)", "h = jnp.sin(g) + 0.5 * h * g",
        ],
        "checkpointed": ["h = jax.checkpoint(lambda h: jnp.sin(jnp.tanh(h + a) * jax.nn.sigmoid(h)))(h)"],
        "inner loop": ["h = lax.fori_loop(0, 3, lambda _, h: jnp.tanh(jnp.sin(h) * a + 0.5 * h), h)"],
        "branch": ["g = jnp.tanh(h * a)", "h = lax.cond(n % 3 < 1, jnp.sin, lambda h: jnp.cos(h) * g, h)"],
        "affine": ["h = 0.9 * h + a"],
    }  # fmt: skip
    kind = c.pick(f"{at}.step", {name: name for name in forms}, 0.7)
    counter = c.pick(f"{at}.counter", ["jnp.float32", "jnp.int32", "jnp.bfloat16", "jnp.uint8"], 0.4)
    gives = c.pick(f"{at}.gives", ["h", "(h, n)", "jnp.cos(h)", "h.sum()", "None"], 0.6)
    reverse, unroll = c.chance(f"{at}.reverse", 0.3), c.pick(f"{at}.unroll", [1, 3], 0.2)
    with w.block(f"def long_loop(x, w={weights}):"):
        with w.block("def step(carried, a):"):
            w.line("h, n = carried")
            for line in forms[kind]:
                w.line(line.replace("n / 8", "n.astype(h.dtype) / 8").replace("g + n", "g + n.astype(h.dtype)"))
            w.line("h, n = h.astype(a.dtype), n + jnp.ones_like(n)")
            w.line(f"return (h, n), {gives}")
        slices = f"x[:, jnp.arange({steps}) % {size['t']}] * jnp.cos(jnp.arange({steps}.0))[:, None].astype(x.dtype)"
        w.line(f"slices = jnp.moveaxis({slices}, 1, 0)")
        w.line(
            f"(h, n), ys = lax.scan(step, (jnp.zeros_like(x[:, 0]), jnp.zeros((), {counter})), slices, "
            f"reverse={reverse}, unroll={unroll})"
        )
        w.line("return h.astype(jnp.float32), ys")
    total = "lambda x: sum(jnp.sin(1.0 * y).mean() for y in jax.tree.leaves({}(x)) if y.dtype.kind not in 'iu')"
    whole = total.format(c.pick(f"{at}.loop", ["long_loop", "jax.jit(long_loop)", "jax.checkpoint(long_loop)"], 0.3))
    found = {
        "gradient": f"jax.grad({whole})({x})",
        "both": f"(lambda value, g: g * value)(*jax.value_and_grad({whole})({x}))",
        "loss": f"{x} + ({whole})({x})",
        "read again": f"long_loop({x})[0][:, None] + jax.grad({whole})({x})",
    }
    own = c.pick(f"{at}.own gradient", {name: name for name in found}, 0.6)
    w.features.add(f"long loop: {own}")
    return f"({found[own]}).astype({x}.dtype)"


def _wide_weights(w: Writer, d: int, x: str) -> str:
    """Writes a matrix of twice as many columns as rows."""
    return w.set("weights", f"{w.normal('w', (d, 2 * d), 'float32', 0.5)}.astype({x}.dtype)")


def _copied(w: Writer, at: str, x: str) -> str:
    """Returns the slices that a loop reads of an array, perhaps again and again."""
    return f"jnp.concatenate([jnp.moveaxis({x}, 1, 0)] * {w.choices.pick(f'{at}.copies', [1, 3, 30], 0.5)})"


def _scan(w: Writer, at: str, step: str, gives: str, first: str) -> str:
    """Returns a loop over the slices ``xs``, whose step makes a new ``h`` of ``h`` and a slice ``a``."""
    reverse, unroll = w.choices.chance(f"{at}.reverse", 0.3), w.choices.pick(f"{at}.unroll", [1, 3], 0.2)
    return f"lax.scan(lambda h, a: (lambda h: (h, {gives}))({step}), {first}, xs, reverse={reverse}, unroll={unroll})"


def _loss_of(loop: str) -> str:
    """Returns a number that all results of a loop have a part in."""
    return f"sum(jnp.sin(1.0 * y).mean() for y in jax.tree.leaves({loop}))"


def network(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Gradients of weights that each step of a loop multiplies by, whole, in parts, turned or more than once."""
    c, d = w.choices, size["d"]
    weights = _wide_weights(w, d, x)
    forms = {
        "plain": f"jnp.tanh((h @ w)[..., :{d}] + a)",
        "gated": f"(lambda g: jax.nn.sigmoid(g[..., :{d}]) * jnp.tanh(g[..., {d}:] + a))(h @ w)",
        "parts": f"jax.nn.sigmoid(h @ w[:, :{d}]) * jnp.tanh(a @ w[:, {d}:])",
        "turned": f"0.5 * h + jnp.tanh(jnp.einsum('...d,de->...e', h, w) + a[..., :1]) @ w.T / {d}",
        "twice": f"jnp.tanh(a + jnp.sin(h @ w[:, :{d}]) @ w[:, :{d}])",
        "given alone": "jnp.tanh(0.5 * h + (a @ w).mean(-1, keepdims=True))",
        "wide": f"jnp.tanh(a + (h.astype(jnp.float32) @ w.astype(jnp.float32))[..., {d}:]).astype(h.dtype)",
    }
    step = c.pick(f"{at}.step", forms, 0.8)
    w.features.add(f"network: {'parts' if step == forms['parts'] else 'whole'}")
    gives = c.pick(f"{at}.gives", ["h", "jnp.cos(h)", "h.sum()", "(h, a)"], 0.5)
    loop = _scan(w, at, f"({step}).astype(h.dtype)", gives, "jnp.zeros_like(xs[0])")
    loss, slices = _loss_of(loop), _copied(w, at, x)
    ways = {
        "grad": f"jax.grad(lambda w, xs: {loss})({weights}, {slices})",
        "examples": f"jax.vmap(jax.grad(lambda w, xs: {loss}), (None, 1))({weights}, {slices}).sum(0)",
        "summed": f"jax.grad(lambda w, xs: jax.vmap(lambda xs: {loss}, 1)(xs).sum())({weights}, {slices})",
    }
    return f"({x} + jnp.sin({c.pick(f'{at}.way', ways, 0.6)}).reshape(2, {d}, {d}).sum((0, 1))).astype({x}.dtype)"


def gated_loop(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """A loop, or its gradients, whose steps compute gates of slices, or multiply slices or what they give."""
    c, d = w.choices, size["d"]
    weights = _wide_weights(w, d, x)
    forms = {
        "gates": f"jax.nn.sigmoid(a[..., :{d}]) * h + jnp.tanh(a[..., {d}:])",
        "gates of sums": f"(lambda g: jax.nn.sigmoid(g[..., :{d}]) * h + jnp.exp(-jnp.abs(g[..., {d}:])))(a + h @ w)",
        "split": "(lambda f, g: f * h + (1 - f) * jnp.tanh(g))(*jnp.split(jax.nn.sigmoid(a), 2, -1))",
        "products": f"jnp.tanh(a[..., :{d}] @ w[:, :{d}] + h)",
        "both": f"jnp.tanh(a[..., {d}:] @ w[:, {d}:]) * jax.nn.sigmoid(a[..., :{d}] + h @ w[:, :{d}])",
        "together": f"jnp.tanh((jnp.concatenate([h, a], -1) @ jnp.concatenate([w, w, w]))[..., {d}:])",
        "layers": f"jnp.tanh(jnp.maximum(a @ jnp.concatenate([w, w]), 0)[..., :{d}] @ w[:, {d}:] - h)",
    }
    form = c.pick(f"{at}.step", {name: name for name in forms}, 0.8)
    w.features.add(f"gated loop: {form}")
    gives = c.pick(f"{at}.gives", ["h", "h @ w", "(h, a @ w.T)", f"(lambda y: (y[..., :{d}], h))(h @ w)"], 0.6)
    loop = _scan(w, at, f"({forms[form]}).astype(h.dtype)", gives, f"xs[0][..., :{d}]")
    total, slices = _loss_of(loop), _copied(w, at, f"jnp.concatenate([{x}, jnp.cos({x})], -1)")
    ways = {
        "value": f"(lambda w, xs: {loop}[0].sum(0))({weights}, {slices})",
        "gradient": f"jax.grad(lambda w, xs: {total})({weights}, {slices}).reshape(2, {d}, {d}).sum((0, 1))",
        "slices": f"jax.grad(lambda xs, w: {total})({slices}, {weights})[..., :{d}].sum((0, 1))",
        "examples": f"jax.vmap(lambda xs, w: {loop}[0], (1, None))({slices}, {weights}).sum(0)",
    }
    return f"({x} + jnp.sin({c.pick(f'{at}.way', ways, 0.6)})).astype({x}.dtype)"


def summed_exponentials(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Runs a loop whose steps take a logsumexp of sums of arrays that lack axes, or its gradient."""
    c, d = w.choices, size["d"]
    matrix = w.set("matrix", f"{w.normal('w', (d, d), 'float32', c.pick(f'{at}.scale', [1.0, 30.0, 300.0], 0.4))}")
    if c.chance(f"{at}.masked", 0.3):
        matrix = w.set(
            "matrix",
            f"jnp.where(jnp.tri({d}, dtype=bool), {matrix}, {c.pick(f'{at}.fill', ['-jnp.inf', '-1e4'], 0.5)})",
        )
    scores = c.pick(
        f"{at}.scores",
        [
            "h[..., :, None] + m", "m.T - h[..., :, None]", "(h[..., :, None] + m) / 3",
            "h[..., :, None] + (m + a[..., None, :])", "-(m - jnp.sin(h)[..., :, None] - a[..., :, None])",
            "h[..., :, None] * m",
        ],
        0.8,
    )  # fmt: skip
    sums = {
        "logsumexp": "jax.nn.logsumexp({x}, -2)",
        "kept": "jax.nn.logsumexp({x}, -2, keepdims=True)[..., 0, :]",
        "by hand": "(lambda s: jnp.log(jnp.exp(s - s.max(-2, keepdims=True)).sum(-2)) + s.max(-2))({x})",
        "softmax": "(jax.nn.softmax({x}, -2) * a[..., :, None]).sum(-2)",
        "epsilon": "(lambda s: jnp.log(jnp.exp(s - s.max(-2, keepdims=True)).sum(-2) + 1e-3) + s.max(-2))({x})",
        "other axis": "jax.nn.logsumexp({x}, -1)",
    }
    step = c.pick(f"{at}.sum", sums, 0.8).format(x=scores)
    after = c.pick(f"{at}.after", ["{s} + a", "a - {s}", "jax.nn.log_softmax({s} + a)", "jnp.tanh({s}) + a"], 0.5)
    gives = c.pick(f"{at}.gives", ["h", "jnp.cos(h)", "h.sum()", "(h, a)", "None"], 0.5)
    loop = _scan(w, at, after.format(s=step), gives, "xs[0]")
    loss = _loss_of(loop)
    slices = w.set("slices", f"jnp.moveaxis({x}, 1, 0).astype(jnp.float32)")
    ways = {
        "value": f"(lambda m, xs: {loop}[0].sum(0))({matrix}, {slices})",
        "gradient": f"jax.grad(lambda m, xs: {loss})({matrix}, {slices}).sum(0)",
        "slices": f"jax.grad(lambda xs, m: {loss})({slices}, {matrix}).sum((0, 1))",
        "examples": f"jax.vmap(jax.grad(lambda m, xs: {loss}), (None, 1))({matrix}, {slices}).sum((0, 1))",
    }
    own = c.pick(f"{at}.way", {name: name for name in ways}, 0.6)
    w.features.add(f"summed exponentials: {own}")
    return f"({x} + jnp.sin({ways[own]})).astype({x}.dtype)"


def unrolled_loop(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """A loop that compiles several steps as one, and its gradient."""
    c = w.choices
    steps, unroll = c.pick(f"{at}.steps", [8, 19, 32], 0.6), c.pick(f"{at}.unroll", [4, 8, 16, 3], 0.5)
    first = w.set("first", f"jnp.tanh({x} / 8).mean(1)")
    forms = {
        "elementwise": "jnp.tanh(0.9 * h + a)", "product": f"jnp.tanh(h @ h.T @ {first} * a)",
        "sum": "jnp.tanh(h + a * h.sum(0))", "gated": "h * jax.nn.sigmoid(a) + jnp.sin(h)",
        "checkpoint": "jax.checkpoint(lambda h: jnp.sin(h + a))(h)", "largest": "h - a * h.max(1, keepdims=True)",
        "swapped": "jnp.flip(h, 0) * jnp.cos(a)", "branch": "lax.cond(a > 0, jnp.sin, jnp.cos, h + a)",
    }  # fmt: skip
    step = c.pick(f"{at}.step", forms, 0.7)
    stacked = c.pick(f"{at}.stacked", ["h", "(h, a)", "h.sum()", "(h > 0, h.astype(jnp.float16))"], 0.5)
    slices = f"jnp.cos(jnp.arange({steps}.0))"
    loop = (
        f"lax.scan(lambda h, a: (lambda h: (h, {stacked}))(({step}).astype(h.dtype)), h, {slices}, "
        f"reverse={c.chance(f'{at}.reverse', 0.3)}, unroll={unroll})"
    )
    total = f"lambda h: {_loss_of(loop)}"
    ways = {"value": f"({total})({first})", "gradient": f"jax.grad({total})({first}).mean()"}
    return f"{x} + ({ways[c.pick(f'{at}.way', {name: name for name in ways}, 0.6)]}).astype({x}.dtype)"


def repeated_steps(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Steps of a Python loop, most of them equal, whose results a program may read."""
    c = w.choices
    count = c.pick(f"{at}.steps", [4, 5, 8, 3], 0.5)
    first, other = w.set("first", f"jnp.tanh({x} / 8).mean(1)"), w.set("other", f"jnp.cos({x} / 8).mean(1)")
    forms = {
        "elements": "(jnp.sin(u) * v + jnp.cos(u) * 0.5, v)", "last two": "(1.2 * u - 0.4 * v + 0.1 * jnp.sin(u), u)",
        "rolls": "(u + 0.1 * (jnp.roll(u, 1, 1) - 2 * u + jnp.roll(u, -1, 0)) * v, v)",
        "slices": "(0.5 * jnp.pad(u[:, 1:], ((0, 0), (0, 1))) + jnp.tanh(u) * v, v)",
        "numbered": "(jnp.sin(u) * (1 + i) + jnp.cos(u) * v, v)", "swapped": "(jnp.sin(v) + 0.1 * u, jnp.cos(u) - v)",
        "branch": "(jnp.where(u > v, jnp.sin(u), u * 0.5 + v), v - 0.1)", "sums": "(jnp.sin(u) / (1 + u.sum()) + v, v)",
        "last three": "(jnp.sin(u) + 0.2 * v, u if i % 2 else v)",
    }  # fmt: skip
    step = c.pick(f"{at}.step", forms, 0.8)
    kept = {
        "last": "s[-1][0]",
        "both": "s[-1][0] + s[-1][1]",
        "one": "s[-1][0] + s[2][0]",
        "all": "sum(u for u, _ in s)",
    }
    given = c.pick(f"{at}.kept", kept, 0.4)
    states = f"list(itertools.accumulate(range({count}), lambda s, i: (lambda u, v: {step})(*s), initial=(u, v)))"
    run = f"(lambda u, v: (lambda s: {given})({states}))"
    ways = {"value": f"{run}({first}, {other})", "gradient": f"jax.grad(lambda u: {run}(u, {other}).sum())({first})"}
    return f"{x} + {ways[c.pick(f'{at}.way', {name: name for name in ways}, 0.7)]}.mean().astype({x}.dtype)"


def written_loop(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Steps of a Python loop that multiply or add up, each of which may read a slice, a number or a weight of its own,
    and whose states a program may read; and their gradients."""
    c = w.choices
    count = c.pick(f"{at}.steps", [6, 5, 9, 14, 3], 0.5)
    rows = w.set("rows", f"jnp.tanh({x} / 8)")
    first, other = w.set("first", f"{rows}.mean(1)"), w.set("other", f"jnp.cos({rows}).mean(1)")
    square = f"({first}.T @ {other} / 4)"
    gate = "jax.nn.sigmoid(a[i] + h @ u)"
    both = "jnp.split(jnp.concatenate([h, a[i]], 1) @ jnp.concatenate([u, v], 0), 1, 1)"
    forms = {
        "cell": "(jnp.tanh(a[i] @ v + h @ u), g)", "last two": "(jnp.tanh(g @ u + h @ v), h)",
        "gates": f"((lambda z: z * h + (1 - z) * jnp.tanh(h @ v))({gate}), g)",
        "numbered": "(h - 0.1 * (i + 1) * jnp.tanh(h @ u), g)", "alternating": "(jnp.tanh(h @ u) @ u.T, g)",
        "descent": "(h - 0.1 * jax.grad(lambda h: (jnp.tanh(h @ u) ** 2).sum())(h), g)",
        "own weights": "(jnp.tanh(h @ (u * (i + 1))), g)", "swapped": "(jnp.tanh(g @ u), h @ v)",
        "carried weights": "(jnp.tanh(h @ g), g - 0.01 * (h.T @ h))", "relu": "(jax.nn.relu(h @ u + a[i]) * 0.5, g)",
        "sums": "(jnp.sin(h) - h.max(0) + 0.1 * h.sum(1, keepdims=True), g)",
        "split": f"(sum(jnp.tanh(z) for z in {both}), g)",
    }  # fmt: skip
    name = c.pick(f"{at}.step", {name: name for name in forms}, 0.8)
    reads = {"slices": "a", "reversed": "a[::-1]", "a stack": "[*a]", "an input": "[a[0]] * 20"}
    kept = {
        "last": "s[-1][0]", "all": "sum(h for h, _ in s)", "stacked": "jnp.stack([h for h, _ in s]).max(0)",
        "one": "s[-1][0] + s[2][0]", "losses": "sum((h * h).mean() for h, _ in s) * s[-1][0]",
    }  # fmt: skip
    given = c.pick(f"{at}.kept", kept, 0.5)
    second = "u" if name == "carried weights" else "v" if name == "descent" else "h"
    step = f"lambda s, i: (lambda h, g: {forms[name]})(*s)"
    states = f"list(itertools.accumulate(range({count}), {step}, initial=(h, {second})))"
    slices = c.pick(f"{at}.reads", reads, 0.4)
    wide = f"jnp.stack([{first} * k for k in range(1, 21)])"
    run = f"(lambda h, u, v: (lambda a: (lambda s: {given})({states}))({slices.replace('a', wide, 1)}))"
    total = f"lambda h, u: {run}(h, u, {square}.T).sum()"
    ways = {
        "value": f"{run}({first}, {square}, {square}.T)",
        "gradient": f"jax.grad(lambda u: {run}({first}, u, {square}).sum())({square})",
        "both": f"sum(jnp.sin(y).mean() for y in jax.grad({total}, (0, 1))({first}, {square}))",
    }
    way = ways[c.pick(f"{at}.way", {name: name for name in ways}, 0.8)]
    return f"{x} + jnp.mean({way}).astype({x}.dtype)"
