"""Random programs of what respellings replace: convolutions, cumulative operations, windows, sorts, one-hot rows."""

from __future__ import annotations

import math

from . import layers, loops
from .writing import Writer

__all__ = [
    "FIRST_BROADCAST",
    "FIRST_COMPLEX",
    "FIRST_EXPONENTIALS",
    "FIRST_GATED",
    "FIRST_NETWORK",
    "FIRST_OF_EVERY_KIND",
    "FIRST_SPREAD",
    "FIRST_UNROLLED",
    "FIRST_WRITTEN",
    "body",
    "operands",
]

FIRST_OF_EVERY_KIND = 230_000
"""From this seed on every kind of respelling has a form."""
FIRST_EXPONENTIALS = 270_000
"""From here on steps sum exponentials of sums."""
FIRST_NETWORK = 260_000
"""From this seed on there are gradients of weights that loops multiply by."""
FIRST_BROADCAST = 280_000
"""From here on matrix products are written by broadcasting."""
FIRST_UNROLLED = 290_000
"""From here on loops compile several steps as one, and equal steps stand one after the other."""

FIRST_SPREAD = 300_000
"""From here on convolutions read zeros between elements."""
FIRST_WRITTEN = 310_000
"""From here on Python writes out loops whose steps multiply matrices."""
FIRST_GATED = 320_000
"""From here on loops multiply slices, or what they give, and compute gates of slices."""
FIRST_COMPLEX = 350_000
"""From here on there are products of complex matrices."""
FIRST_INTEGERS = 360_000
"""From here on there are products of integers and booleans."""


def operands(w: Writer, at: str) -> tuple[dict[str, int], list[str]]:
    """Rows of a sequence with channels, and ids as arguments."""
    c = w.choices
    size = {"t": c.pick(f"{at}.t", [6, 1, 5, 9, 16], 0.5), "d": c.pick(f"{at}.d", [4, 6, 2], 0.4), "v": 7}
    scale = c.pick(f"{at}.magnitude", [1.0, 30.0, 1000.0], 0.3)
    w.features.add(f"magnitude {scale:g}")
    x = w.normal("x", (2, size["t"], size["d"]), w.dtype(f"{at}.x", 0.4), scale)
    return size, [x, w.integers("ids", (2, size["t"]), -1, size["v"])]


def body(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Writes the steps; those that jump where a number changes a little stand on the argument itself."""
    c = w.choices
    first = c.pick(f"{at}.first", {"none": None, "sort": _sort, "argmax": _argmax}, 0.5)
    if first is not None:
        x = first(w, f"{at}.first", x)
    steps = {
        "convolution": _convolution, "cumulative": _cumulative, "window": _window, "one-hot": _one_hot,
        "indexed loop": loops.indexed_loop, "associative scan": loops.associative_scan,
        "expanded scan": loops.expanded_scan, "reduction": _reduction,
        "dropout": _dropout, "small matrices": _small_matrices, "elementwise": _elementwise,
        "triangular solve": _triangular_solve,
        "short sum": _short_sum,
    }  # fmt: skip
    if c.seed >= FIRST_OF_EVERY_KIND:
        steps |= {
            "volumes": layers.volumes, "looped convolution": layers.looped_convolution,
            "looped bfloat16": loops.looped_bfloat16, "long loop": loops.long_loop,
            "squared distances": _squared_distances,
        }  # fmt: skip
    if c.seed >= FIRST_NETWORK:
        steps["network"] = loops.network
    if c.seed >= FIRST_EXPONENTIALS:
        steps["summed exponentials"] = loops.summed_exponentials
    if c.seed >= FIRST_BROADCAST:
        steps["broadcast products"] = _broadcast_products
    if c.seed >= FIRST_UNROLLED:
        steps |= {"unrolled loop": loops.unrolled_loop, "repeated steps": loops.repeated_steps}
    if c.seed >= FIRST_SPREAD:
        steps["spread elements"] = layers.spread
    if c.seed >= FIRST_WRITTEN:
        steps["written loop"] = loops.written_loop
    if c.seed >= FIRST_GATED:
        steps["gated loop"] = loops.gated_loop
    if c.seed >= FIRST_COMPLEX:
        steps["complex products"] = _complex_products
    if c.seed >= FIRST_INTEGERS:
        steps["integer products"] = _integer_products
    for n in range(c.pick(f"{at}.count", [1, 2, 3], 0.6)):
        name = c.pick(f"{at}.step {n}", {name: name for name in steps}, 0.8)
        w.features.add(f"step: {name}")
        x = w.set("x", w.cast(f"{at}.cast {n}", steps[name](w, f"{at}.{n}", size, x, ids), 0.15))
        x = w.set("x", f"jnp.tanh({x} / 8)") if c.chance(f"{at}.tanh {n}", 0.4) else x
    return w.set("result", c.pick(f"{at}.result", [x, f"jnp.sin({x}).sum(-1)", f"{x}.mean((0, 1))"], 0.5))


def _sort(w: Writer, at: str, x: str) -> str:
    axis = w.choices.pick(f"{at}.axis", [-1, 1], 0.5)
    forms = {
        "sort": f"jnp.sort({x}, {axis})",
        "argsort": f"jnp.take_along_axis({x}, jnp.argsort({x}, {axis}), {axis})",
        "descending": f"jnp.flip(jnp.sort({x}, {axis}), {axis})",
        "two": f"lax.sort(({x}, jnp.cos({x})), dimension={axis} % 3, num_keys=1)[1]",
        "median": f"{x} - jnp.median({x}, {axis}, keepdims=True)",
    }
    w.features.add("first: sort")
    return w.set("x", w.choices.pick(f"{at}.form", forms, 0.7))


def _argmax(w: Writer, at: str, x: str) -> str:
    name = w.choices.pick(f"{at}.name", ["argmax", "argmin"], 0.4)
    axis = w.choices.pick(f"{at}.axis", [-1, 1], 0.5)
    w.features.add("first: argmax")
    return w.set("x", f"{x} + jnp.{name}({x}, {axis}, keepdims=True).astype({x}.dtype)")


def _reduction(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Takes the mean of groups of channels away, over the sequence and their channels, or over all sequences too."""
    axes = w.choices.pick(f"{at}.axes", ["(1, 3)", "(0, 3)", "(0, 1, 3)"], 0.5)
    groups = w.set("groups", f"{x}.reshape(*{x}.shape[:-1], 2, -1)")
    return w.set("x", f"({groups} - {groups}.mean({axes}, keepdims=True)).reshape({x}.shape)")


def _short_sum(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Adds up channels, or a sequence, of 1,024 numbers for each element, or three numbers of each of these."""
    forms = {
        "channels": "{}.sum(2).mean(-1)[..., None]",
        "sequence": "{}.mean(1).sum(-1)[:, None]",
        "rows": "({}[..., None] * jnp.array([1, -2, 3], {}.dtype)).sum(-1).mean(-1)",
        "squares": "jnp.sqrt(jnp.square({} - 0.5).sum((1, 2)) + 1).mean(-1)[:, None, None]",
    }
    wide = w.set("wide", f"(jnp.tanh({x} / 8)[..., None] * jnp.cos(jnp.arange(1024.0))).astype({x}.dtype)")
    w.features.add("short sum")
    return f"{x} + {w.choices.pick(f'{at}.form', forms, 0.7).format(wide, wide)}"


def _small_matrices(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Multiplies 20 small matrices, or matrices and vectors, for each element or each position."""
    c = w.choices
    forms = ["...ik,...kj->...ij", "...ik,...jk->...ij", "...ki,...kj->...ij", "...ki,...jk->...ij", "...ik,...k->...i"]
    forms += ["btdmik,btdmkj->dbtmij", "btdmik,bdtmjk->bdtmij", "btdmik,mkj->btdmij"]
    form = c.pick(f"{at}.form", forms, 0.7)
    rows, terms, columns = (c.pick(f"{at}.{name}", [3, 2, 4, 1, 7], 0.6) for name in ("rows", "terms", "columns"))
    sizes, operands = {"i": rows, "k": terms, "j": columns}, []
    for letters in form.partition("->")[0].split(","):
        own = [sizes[letter] for letter in letters if letter in sizes]
        numbers = (
            f"jnp.cos(jnp.arange(20 * {math.prod(own)})).reshape(20, {', '.join(map(str, own))}).astype({x}.dtype)"
        )
        if letters.startswith("m"):
            operands.append(numbers)
            continue
        given = f"{x}.swapaxes(1, 2)" if letters.startswith("bd") else x
        ones = "None, " * (1 + len(own))
        operands.append(f"jnp.tanh({given} / 8)[..., {ones.rstrip(', ')}] * {numbers}")
    w.features.add("small matrices")
    product = w.set("products", f"jnp.einsum('{form}', {', '.join(operands)})")
    axes = {"dbt": "(1, 2, 0)", "bdt": "(0, 2, 1)"}.get(form.partition("->")[2][:3])
    summed = f"{product}.sum({'(-1, -2)' if form.endswith('->...i') else '(-1, -2, -3)'})"
    return f"{x} + jnp.transpose({summed}, {axes})" if axes else f"{x} + {summed}"


def _complex_products(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Projects 64 numbers for each element to as many others, of which some or both parts are read."""
    c = w.choices
    wide = f"jnp.tanh({x} / 8).reshape(-1)[:, None] * jnp.cos(jnp.arange(64.0))"
    rows = w.set("rows", f"jnp.tile(({wide}).astype(jnp.float32), (8, 1))")
    left = c.pick(f"{at}.left", [f"{rows} * jnp.exp(1j * {rows})", f"{rows}.astype(jnp.complex64)", rows], 0.7)
    angles = "jnp.arange(4096, dtype=jnp.float32).reshape(64, 64)"
    real = f"jnp.cos({angles})" if c.chance(f"{at}.right real", 0.3) else f"jnp.exp(1j * {angles})"
    right = w.set("right", real)
    forms = ["{} @ {}", "jnp.einsum('rk,kc->cr', {}, {}).T", "jnp.einsum('rk,ck->rc', {}, {})"]
    product = w.set("product", c.pick(f"{at}.form", forms, 0.6).format(left, right))
    parts = ["jnp.real({})", "jnp.imag({})", "(jnp.real({}) - jnp.imag({}))", "(jnp.abs({}) ** 2)"]
    read = c.pick(f"{at}.part", parts, 0.7).format(product, product)
    w.features.add("complex products")
    return f"{x} + {read}.reshape(8, *{x}.shape, 64).mean((0, -1)).astype({x}.dtype)"


def _integer_products(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Multiplies 16 rows of integers or booleans for each element by 64 columns, in any layout."""
    c = w.choices
    dtype = c.pick(f"{at}.dtype", ["int8", "uint8", "bool", "int16", "uint32"], 0.7)
    waves = "100 * jnp.cos(jnp.arange(64 * {}) * {}).reshape({}, 64)"
    signs = f"jnp.sign({x}).reshape(-1, 1, 1)"
    own = w.set("integers", f"({waves.format(16, 1.7, 16)} * {signs}).astype(jnp.int32)")
    other = w.set("matrix", f"({waves.format(64, 0.3, 64)}).astype(jnp.int32)")
    left, right = (
        w.set("operand", f"{y} > 0" if dtype == "bool" else f"{y}.astype(jnp.{dtype})") for y in (own, other)
    )
    wide = ".astype(jnp.int32)" if c.chance(f"{at}.converted", 0.3) else ""
    forms = ["erk,kc->erc", "erk,ck->erc", "ekr,ekc->erc"]
    form = c.pick(f"{at}.form", forms, 0.7)
    if form == "ekr,ekc->erc":
        left, right = f"{left}.swapaxes(1, 2)", f"jnp.tile({right}[None], ({left}.shape[0], 1, 1))"
    given = ", preferred_element_type=jnp.int32" if c.chance(f"{at}.wide result", 0.5) else ""
    product = w.set("product", f"jnp.einsum('{form}', {left}{wide}, {right}{wide}{given})")
    w.features.add("integer products")
    return f"{x} + jnp.sin({product}.astype(jnp.float32)).mean((1, 2)).reshape({x}.shape).astype({x}.dtype)"


def _triangular_solve(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Solves 20 triangular systems for each element, with whatever in the other triangle."""
    c = w.choices
    rows, columns = c.pick(f"{at}.rows", [3, 2, 4, 5, 1], 0.6), c.pick(f"{at}.columns", [1, 3], 0.4)
    left, lower = c.chance(f"{at}.left", 0.7), c.chance(f"{at}.lower", 0.6)
    wide = w.set("wide", f"jnp.tanh({x} / 8).astype(jnp.float32)[..., None, None, None]")
    numbers = f"jnp.cos(jnp.arange({20 * rows * rows})).reshape(20, {rows}, {rows}).astype({wide}.dtype)"
    diagonal = c.pick(f"{at}.diagonal", ["2", "-1.5"], 0.4)
    matrix = w.set("matrix", f"{wide} * {numbers} + {diagonal} * jnp.eye({rows}, dtype={wide}.dtype)")
    shape = (20, rows, columns) if left else (20, columns, rows)
    given = f"{wide} + jnp.sin(jnp.arange({math.prod(shape)})).reshape({shape}).astype({wide}.dtype)"
    w.features.add("triangular solve")
    solved = (
        f"lax.linalg.triangular_solve({matrix}, {given}, left_side={left}, lower={lower}, "
        f"transpose_a={c.chance(f'{at}.transposed', 0.4)}, unit_diagonal={c.chance(f'{at}.unit', 0.3)})"
    )
    return f"{x} + 0.1 * {solved}.sum((-1, -2, -3)).astype({x}.dtype)"


def _dropout(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    c = w.choices
    key = f"jax.random.{c.pick(f'{at}.key', ['key', 'PRNGKey'], 0.5)}({c.pick(f'{at}.seed', [3, 0, 71], 0.5)})"
    derived = {
        "itself": key,
        "split": f"jax.random.split({key}, 3)[1]",
        "folded": f"jax.random.fold_in({key}, {ids}.sum().astype(jnp.uint32))",
    }
    key = w.set("key", c.pick(f"{at}.derived", derived, 0.4))
    mask = {
        "bernoulli": f"jax.random.bernoulli({key}, 0.75, {x}.shape)",
        "bits": f"(jax.random.bits({key}, {x}.shape, 'uint8') < 200)",
        "examples": f"jax.vmap(lambda k, x: jax.random.bernoulli(k, 0.75, x.shape))(jax.random.split({key}, 2), {x})",
    }
    return w.set("x", f"jnp.where({c.pick(f'{at}.mask', mask, 0.5)}, {x} / 0.75, 0)")


def _elementwise(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """A function of 256 numbers for each element: fewer are left as they are."""
    scaled = w.set("scaled", f"(jnp.tanh({x} / 8)[..., None] * jnp.arange(-128.0, 128.0) / 64).astype({x}.dtype)")
    forms = {
        "sin": f"jnp.sin({scaled})",
        "cos": f"jnp.cos({scaled} * {w.choices.pick(f'{at}.turns', [1, 7], 0.3)})",
        "tan": f"jnp.tan({scaled} / 4)",
        "power": f"jnp.abs({scaled}) ** {w.choices.pick(f'{at}.exponent', [1.5, 2.2, 0.75], 0.5)}",
        "inverse": f"(1 + jnp.abs({scaled})) ** -1.5",
        "exponential": f"1.7 ** {scaled}",
        "arcsine": f"(jnp.arcsin({scaled} / 4) + jnp.arccos({scaled} / 4))",
        "angle": f"jnp.arctan2({scaled}, 1 + {scaled} * {scaled})",
        "root": f"jnp.cbrt(1 + {scaled} * {scaled})",
        "gamma": f"lax.lgamma(jnp.abs({scaled}) + 0.5)",
        "remainder": f"jnp.abs({scaled} % 3 - 1.5)",  # which has no jump
        "wrapped": f"jnp.cos(jnp.fmod(3 * {scaled}, 2 * np.pi))",
    }
    w.features.add("elementwise")
    return f"({w.choices.pick(f'{at}.form', forms, 0.7)} @ jnp.full((256,), 1 / 256, {x}.dtype)).astype({x}.dtype)"


def _convolution(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    c, d = w.choices, size["d"]
    taps = c.pick(f"{at}.taps", [3, 1, 2, 4], 0.5)
    groups = c.pick(f"{at}.groups", [d, 2], 0.4)
    dilation = c.pick(f"{at}.dilation", [1, 2], 0.3)
    high = c.pick(f"{at}.high", [0, 1, -1], 0.3)
    low = (taps - 1) * dilation - high
    weights = w.normal("w", (taps, d // groups, d), "float32", 0.5)
    first = c.chance(f"{at}.channels first", 0.3)
    given, numbers = (f"{x}.swapaxes(1, 2)", "('NCW', 'WIO', 'NCW')") if first else (x, "('NWC', 'WIO', 'NWC')")
    w.features.add("depthwise" if groups == d else "grouped")
    call = (
        f"lax.conv_general_dilated({given}, {weights}.astype({x}.dtype), (1,), [({low}, {high})], "
        f"rhs_dilation=({dilation},), dimension_numbers={numbers}, feature_group_count={groups})"
    )
    return f"{call}.swapaxes(1, 2)" if first else call


def _cumulative(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    c = w.choices
    name = c.pick(f"{at}.name", ["cumsum", "cummax", "cummin", "cumlogsumexp", "cumprod"], 0.6)
    axis, reverse = c.pick(f"{at}.axis", [1, 2, 0], 0.5), c.chance(f"{at}.reverse", 0.3)
    given = f"jnp.cos({x})" if name == "cumprod" else x
    w.features.add(name)
    return f"lax.{name}({given}, axis={axis}, reverse={reverse})"


def _window(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    c = w.choices
    kind = c.pick(f"{at}.kind", {"add": "0.0, lax.add", "max": "-jnp.inf, lax.max", "min": "jnp.inf, lax.min"}, 0.6)
    width, across = c.pick(f"{at}.width", [2, 3], 0.5), c.pick(f"{at}.across", [1, 2], 0.3)
    return f"lax.reduce_window({x}, {kind}, (1, {width}, {across}), (1, 1, 1), 'SAME')"


def _one_hot(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    table = w.normal("table", (size["v"], size["d"]))
    forms = {
        "matmul": f"jax.nn.one_hot({ids}, {size['v']}) @ {table}",
        "einsum": f"jnp.einsum('vd,btv->btd', {table}, jax.nn.one_hot({ids}, {size['v']}))",
        "compared": f"({ids}[..., None] == jnp.arange({size['v']})).astype({table}.dtype) @ {table}",
        "summed": f"(jax.nn.one_hot({ids}, {size['v']}).reshape(-1, {size['v']}).T @ jnp.sin({x}).reshape(-1, "
        f"{size['d']}))[:1] + 0 * {table}[:1]",
    }
    w.features.add("one-hot")
    return f"{x} + ({w.choices.pick(f'{at}.form', forms, 0.6)}).astype({x}.dtype)"


# ---------------------------------------------------------------------- loops


def _squared_distances(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Weighs rows by their distances to others; these are relative to the mean one, of which rounding leaves enough."""
    c = w.choices
    centers = w.normal("centers", (5, size["d"]))
    dtype = c.pick(f"{at}.dtype", ["float32", "bfloat16"], 0.1)
    wide = w.set("wide", f"jnp.clip({x}.astype(jnp.{dtype}), -1e6, 1e6)")  # infinite rows are assumed away
    scaled = w.set("scaled", f"{wide} / (1 + jnp.abs({wide}).max())") if c.chance(f"{at}.scaled", 0.5) else wide
    rows = {"centers": f"{centers}[None].astype({wide}.dtype)", "own": f"jnp.sin({wide}) + {wide}[:, :1] / 2"}
    others = w.set("others", c.pick(f"{at}.rows", rows, 0.4))
    one, two = f"{scaled}[:, :, None]", f"{others}[:, None]"
    forms = {
        "power": f"(({one} - {two}) ** 2).sum(-1)", "square": f"jnp.square({two} - {one}).sum(-1)",
        "product": f"(({one} - {two}) * ({one} - {two})).sum(-1)",
        "weighted": f"({centers}[0].astype({wide}.dtype) ** 2 * ({one} - {two}) ** 2).sum(-1)",
        "scaled": f"((2 * {one} - 3 * {two}) ** 2).sum(-1)", "sums": f"(({one} + {two}) ** 2).sum(-1)",
        "shifted": f"(({one} - {two} - 1) ** 2).sum(-1)",
        "turned": f"(({scaled}.swapaxes(1, 2)[..., None] - {others}.swapaxes(1, 2)[:, :, None]) ** 2).sum(1)",
        "norm": f"jnp.linalg.norm({one} - {two}, axis=-1)", "absolute": f"jnp.abs({one} - {two}).sum(-1)",
        "third power": f"jnp.abs(({one} - {two}) ** 3).sum(-1)",
        "product of sums": f"jnp.abs((({one} - {two}) * ({one} + {two})).sum(-1))",
    }  # fmt: skip
    distances = w.set("distances", c.pick(f"{at}.form", forms, 0.7))
    read = {
        "kernel": f"jnp.exp(-{distances} / (1e-3 + {distances}.mean()))", "alone": f"{distances} * 1e-3",
        "normalised": f"jax.nn.softmax(-{distances} / (1e-3 + lax.stop_gradient({distances}).mean()), -1)",
        "inverse": f"1 / (1 + {distances} / (1e-3 + {distances}.mean()))",
    }  # fmt: skip
    weights = c.pick(f"{at}.read", read, 0.6)
    return f"{x} + ({weights} @ {others}).astype({x}.dtype)"


def _broadcast_products(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Multiplies all pairs of rows, of repeated ones, and adds what their gradients are."""
    c = w.choices
    dtype = c.pick(f"{at}.dtype", ["float32", "bfloat16"], 0.1)
    rows = w.set("rows", f"jnp.tile(jnp.tanh({x} / 8).astype(jnp.{dtype}).reshape(-1, {size['d']}), (64, 1))[:160]")
    scaled = f"jnp.cos(jnp.arange({size['d']}.0)).astype({rows}.dtype)"
    others = c.pick(f"{at}.others", {"own": rows, "scaled": f"{rows} * {scaled}", "fewer": f"{rows}[::3] + 1"}, 0.5)
    forms = {
        "last": "(a[:, None] * b[None]).sum(-1)", "first": "(b.T[:, None] * a.T[:, :, None]).sum(0)",
        "vmap": "jax.vmap(jax.vmap(lambda a, b: (a * b).sum(), (None, 0)), (0, None))(a, b)",
        "batches": "(a.reshape(4, -1, 1, a.shape[1]) * b[:4, None, None]).sum(-1)",
        "both": "(a[:, None] * b[None]).sum(-1) - (a[:, None] * jnp.sin(b)[None]).sum(-1)",
    }  # fmt: skip
    loss = f"jnp.sin(1.0 * {c.pick(f'{at}.form', forms, 0.7)}).mean()"
    ways = {
        "gradients": f"sum(g.sum(0) for g in jax.grad(lambda a, b: {loss}, (0, 1))(a, b))",
        "of one": f"jax.grad(lambda a: {loss})(a).sum(0)", "value": f"(lambda a, b: {loss})(a, b) + 0 * a[0]",
    }  # fmt: skip
    way = ways[c.pick(f"{at}.way", {name: name for name in ways}, 0.5)]
    return f"({x} + (lambda a, b: {way})({rows}, {others})).astype({x}.dtype)"
