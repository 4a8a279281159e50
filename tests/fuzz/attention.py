"""Random attentions: how scores are made, what happens to them, how they become probabilities, and where it rounds."""

from __future__ import annotations

from dataclasses import dataclass

from . import positions
from .norms import normed
from .writing import Writer

__all__ = ["SIZES", "Layout", "body", "operands"]

SIZES = (5, 7, 3, 8, 12, 17, 24)
"""Lengths of sequences: odd ones, and one that is a multiple of nothing that a kernel likes."""


@dataclass(frozen=True)
class Layout:
    """Letters of the operands of both contractions.  Scores end in t, s."""

    q: str
    k: str
    scores: str
    v: str
    out: str


_LAYOUTS = {
    "one head": Layout("td", "sd", "ts", "se", "te"),
    "batch": Layout("btd", "bsd", "bts", "bse", "bte"),
    "heads second": Layout("bntd", "bnsd", "bnts", "bnse", "bnte"),
    "heads third": Layout("btnd", "bsnd", "bnts", "bsne", "btne"),
    "grouped": Layout("btkgd", "bskd", "bkgts", "bske", "btkge"),
    "one key head": Layout("btnd", "bsd", "bnts", "bse", "btne"),
}


def operands(w: Writer, at: str) -> tuple[Layout, dict[str, int], list[str]]:
    """Queries, keys and values as arguments, in dtypes and sizes of their own."""
    c = w.choices
    layout = c.pick(f"{at}.layout", _LAYOUTS, 0.6)
    size = {"b": 2, "n": 2, "k": 2, "g": 2, "d": c.pick(f"{at}.d", [4, 3, 8, 1], 0.4)}
    size["t"] = c.pick(f"{at}.t", SIZES, 0.6)
    size["s"] = c.pick(f"{at}.s", SIZES, 0.6) if c.chance(f"{at}.cross", 0.4) else size["t"]
    size["e"] = c.pick(f"{at}.e", [5, 3], 0.4) if c.chance(f"{at}.other values", 0.2) else size["d"]
    large = c.pick(f"{at}.magnitude", [1.0, 30.0, 1000.0, 5.0, 100.0], 0.5)
    w.features.add(f"magnitude {large:g}")
    offset = c.pick(f"{at}.offset", [0.0, 1.0, 30.0], 0.15)
    names = []
    for name, letters in (("q", layout.q), ("k", layout.k), ("v", layout.v)):
        dtype = w.dtype(f"{at}.{name}", 0.35)
        scale = large if name == "q" else 1.0
        if name == "v":
            scale, offset = c.pick(f"{at}.v.scale", [1.0, 30.0, 1000.0], 0.2), 0.0
        names.append(w.normal(name, tuple(size[x] for x in letters), dtype, scale, offset))
    return layout, size, names


def body(w: Writer, at: str, layout: Layout, size: dict[str, int], q: str, k: str, v: str) -> str:
    """Writes an attention of three named values, and gives the name of its result."""
    q, k = (normed(w, f"{at}.{name} norm", x, size["d"]) for name, x in (("q", q), ("k", k)))
    s = _scores(w, at, layout, size, q, k)
    return _weighted(w, at, layout, size, s, v)


# ---------------------------------------------------------------------- scores


def _scores(w: Writer, at: str, layout: Layout, size: dict[str, int], q: str, k: str) -> str:
    c = w.choices
    q, k = w.cast(f"{at}.q cast", q, 0.12), w.cast(f"{at}.k cast", k, 0.12)
    result = c.pick(f"{at}.scores in", {"own": "", "float32": "float32"}, 0.2)
    asked = f", preferred_element_type=jnp.{result}" if result else ""
    forms = {
        "einsum": f'jnp.einsum("{layout.q},{layout.k}->{layout.scores}", {q}, {k}{asked})',
        "scaled before": f'jnp.einsum("{layout.q},{layout.k}->{layout.scores}", {q} * {size["d"]}**-0.5, {k}{asked})',
        "keys first": f'jnp.einsum("{layout.k},{layout.q}->{layout.scores}", {k}, {q}{asked})',
        "by sum": _scores_by_sum(layout, q, k),
    }
    s = w.set("s", c.pick(f"{at}.product", forms, 0.4))
    if c.chance(f"{at}.masked", 0.4):
        dtype = c.pick(f"{at}.mask of", ["float32", "bfloat16", "float16"], 0.2)
        s = w.set("s", positions.filled(w, f"{at}.mask", s, size["t"], size["s"], dtype))
        s = w.set("s", cast) if (cast := w.cast(f"{at}.masked cast", s, 0.25)) != s else s
    for n in range(4):
        s = _step(w, f"{at}.step {n}", s, size)
    return s


def _scores_by_sum(layout: Layout, q: str, k: str) -> str:
    if layout.q not in ("td", "btd"):
        return f'jnp.einsum("{layout.q},{layout.k}->{layout.scores}", {q}, {k})'
    return f"({q}[..., :, None, :] * {k}[..., None, :, :]).sum(-1)"


def _step(w: Writer, at: str, s: str, size: dict[str, int]) -> str:
    """One elementwise step of the scores."""
    c, rows, keys = w.choices, size["t"], size["s"]
    kinds = [
        "none", "cast", "scale", "mask", "subtract", "bias", "mask", "distance", "cap", "twice", "cast", "clip",
        "noise", "row again", "subtract",
    ]  # fmt: skip
    kind = c.pick(f"{at}", {f"{name} {n}" if n else name: name for n, name in enumerate(kinds)}, 0.45 * w.busy)
    if kind == "none":
        return s
    w.features.add(f"step: {kind}")
    if kind == "cast":
        return w.set("s", w.cast(f"{at}.to", s, 1.0))
    if kind == "scale":
        by = c.pick(f"{at}.by", [" * 0.5", " / 3.0", " * jnp.float32(0.25)", " / 2**0.5", " * -1.5"])
        masked = any(feature.startswith("fill: ") for feature in w.features)  # what is hidden stays hidden
        return w.set("s", s + (by.replace("-", "") if masked else by))
    if kind == "mask":
        dtype = c.pick(f"{at}.of", ["float32", "bfloat16", "float16"], 0.3)
        return w.set("s", positions.filled(w, at, s, rows, keys, dtype))
    if kind == "subtract":
        return w.set("s", f"{s} - {_row(w, at, s)}")
    if kind == "row again":
        m = w.set("m", f"{s}.max(-1, keepdims=True)")
        for n in range(c.pick(f"{at}.doublings", [1, 2, 6], 0.5)):
            m = w.set("m", f"{m} + {m}" if n % 2 == 0 else f"jnp.float32(0.25) * {m}")
        return w.set("s", f"{s} - {m}")
    if kind == "bias":
        shape = c.pick(f"{at}.shape", {"full": (rows, keys), "keys": (keys,), "rows": (rows, 1)}, 0.5)
        scale = c.pick(f"{at}.large", [1.0, 30.0, 1000.0], 0.3)
        return w.set("s", f"{s} + {w.normal('bias', shape, w.dtype(f'{at}.dtype', 0.3), scale)}")
    if kind == "distance":
        dtype = c.pick(f"{at}.in", ["float32", "int32", "bfloat16", "int8", "uint8"], 0.5)
        i, j = (f"jnp.arange({n}, dtype=jnp.{dtype})" for n in (rows, keys))
        return w.set("s", f"{s} - 0.25 * ({i}[:, None] - {j})")
    if kind == "cap":
        cap = c.pick(f"{at}.cap", ["2.0", "30.0", "50.0"])
        return w.set("s", f"{cap} * jnp.tanh({s} / {cap})")
    if kind == "twice":
        twice = w.set("s", f"{s} + {s}")
        return w.set("s", f"{twice} * 0.5")
    if kind == "clip":
        return w.set("s", f"jnp.clip({s}, -20.0, {c.pick(f'{at}.high', ['20.0', '3.0'])})")
    return w.set("s", f"{s} + 0.5 * jax.random.normal(jax.random.key(1), {s}.shape, {s}.dtype)")


def _row(w: Writer, at: str, s: str) -> str:
    """A number per row, to be subtracted."""
    c = w.choices
    rows = {
        "max": f"{s}.max(-1, keepdims=True)",
        "stopped max": f"lax.stop_gradient({s}.max(-1, keepdims=True))",
        "mean": f"{s}.mean(-1, keepdims=True)",
        "first": f"{s}[..., :1]",
        "logsumexp": f"jax.nn.logsumexp({s}, -1, keepdims=True)",
        "min": f"{s}.min(-1, keepdims=True)",
        "half of the maximum": f"0.5 * {s}.max(-1, keepdims=True)",
    }
    return w.cast(f"{at}.row cast", c.pick(f"{at}.row", rows, 0.6), 0.3)


# ---------------------------------------------------------------------- probabilities


def _weighted(w: Writer, at: str, layout: Layout, size: dict[str, int], s: str, v: str) -> str:
    c, rows, keys = w.choices, size["t"], size["s"]
    v = w.cast(f"{at}.v cast", v, 0.15)
    kind = c.pick(
        f"{at}.softmax",
        ["softmax", "by hand", "late division", "logsumexp", "log_softmax", "where", "by hand again", "exp2"],
        0.8,
    )
    kind = "by hand" if kind == "by hand again" else kind
    w.features.add(f"softmax: {kind}")
    late = None
    if kind == "softmax":
        p = w.set("p", f"jax.nn.softmax({s}, -1)")
    elif kind == "log_softmax":
        log = w.set("log_p", w.cast(f"{at}.log cast", f"jax.nn.log_softmax({s}, -1)"))
        p = w.set("p", f"jnp.exp({log})")
    elif kind == "where":
        p = w.set("p", f"jax.nn.softmax({s}, -1, where={positions.mask(w, f'{at}.where', rows, keys)})")
    elif kind == "logsumexp":
        p = _by_logsumexp(w, at, s)
    else:
        e, normaliser = _by_hand(w, at, s, size, "jnp.exp2" if kind == "exp2" else "jnp.exp")
        if kind == "late division":
            p, late = e, normaliser
        else:
            p = w.set("p", _divided(w, at, e, normaliser))
    for n in range(2):
        p = _weight_step(w, f"{at}.weights {n}", p, rows, keys, 0.3)
    result = c.pick(f"{at}.result in", {"own": "", "float32": "float32"}, 0.2)
    asked = f", preferred_element_type=jnp.{result}" if result else ""
    o = w.set("o", f'jnp.einsum("{layout.scores},{layout.v}->{layout.out}", {p}, {v}{asked})')
    if late is not None:
        axes = f'jnp.einsum("{layout.scores}->{layout.out[:-1]}", {late})[..., None]'
        o = w.set("o", _divided(w, at, o, axes))
    return w.set("o", cast) if (cast := w.cast(f"{at}.result cast", o, 0.2)) != o else o


def _by_hand(w: Writer, at: str, s: str, size: dict[str, int], exp: str) -> tuple[str, str]:
    """(exponentials, their sum): the maximum subtracted or not, rounded or not, with weights, a floor, an epsilon."""
    c = w.choices
    shift = c.pick(f"{at}.shift", ["maximum", "none", "maximum with gradient", "twice"], 0.4)
    x = s
    if shift != "none":
        form = "{}.max(-1, keepdims=True)" if shift == "maximum with gradient" else (
            "lax.stop_gradient({}.max(-1, keepdims=True))"
        )  # fmt: skip
        coarse = c.chance(f"{at}.coarse maximum", 0.12)
        if coarse:  # so far that rounding it makes a difference
            x = s = w.set("s", f"{s} * 40.0")
        rounded = ".astype(jnp.bfloat16).astype(jnp.float32)"
        m = form.format(s) + rounded if coarse else w.cast(f"{at}.max cast", form.format(s), 0.35)
        floor = c.pick(f"{at}.max floor", ["", "-jnp.inf", "-1e30", "0.0", "-1e4"], 0.15)
        m = w.set("m", f"jnp.maximum({m}, {floor})" if floor else m)
        x = f"{s} - {m}" + (f" - {m} + {m}" if shift == "twice" else "")
        cast = w.cast(f"{at}.difference cast", f"({x})", 0.3)
        x = w.set("x", x if cast == f"({x})" else cast)
        x = _step(w, f"{at}.after", x, size) if c.chance(f"{at}.step after", 0.2) else x
        x = _filled_after(w, at, x, size) if c.chance(f"{at}.filled after", 0.6 if w.x64 else 0.1) else x
    else:
        coarse = False
        w.features.add("no maximum")
        if spread := c.pick(f"{at}.spread", ["", "20.0", "60.0"], 0.6):  # as far as exponentials are in range
            w.features.add("no maximum, far apart")
            x = w.set("x", f"jnp.clip({s} * {spread}, -80.0, 80.0)")
    e = w.set("e", w.cast(f"{at}.exp cast", f"{exp}({x})", 0.2))
    e = _weight_step(w, f"{at}.inner weights", e, size["t"], size["s"], 0.4 if shift != "none" else 0.8)
    total = c.pick(
        f"{at}.sum", {"sum": f"{e}.sum(-1, keepdims=True)", "dot": f"({e} @ jnp.ones(({size['s']}, 1)))"}, 0.1
    )
    total = w.cast(f"{at}.sum cast", total, 0.25)
    if coarse:  # the largest exponential is no longer 1
        w.features.add("coarse maximum")
        return e, w.set("total", f"jnp.maximum({total}, {c.pick(f'{at}.under', ['1.0', '0.9', '0.5'])})")
    other = _rounded_again(w, at, s, shift, exp)
    return e, w.set("total", _floored(w, at, other or total))


def _filled_after(w: Writer, at: str, x: str, size: dict[str, int]) -> str:
    """A mask of what is left after a row was subtracted, perhaps before a cast to a wider dtype."""
    w.features.add("filled after the maximum")
    keep = positions.mask(w, f"{at}.after", size["t"], size["s"])
    if w.choices.chance(f"{at}.after.row", 0.5):  # in which nothing is kept
        keep = f"({keep} & (jnp.arange({size['t']})[:, None] != 1))"
        w.features.add("empty rows")
    if w.x64 and w.choices.chance(f"{at}.widened", 0.7):  # where exp of what is 0 in float32 is not
        w.features.add("filled before a wider cast")
        fill = w.choices.pick(f"{at}.widened.fill", ["-250.0", "-300.0", "-700.0", "-1e9", "-100.0"])
        x = w.set("x", f"jnp.where({keep}, {x}, {fill})")
        return w.set("x", f"{x}.astype(jnp.float64)")
    fill = w.choices.pick(f"{at}.after.fill", ["-1e9", "-250.0", "-300.0", "-100.0", "-700.0", "-jnp.inf", "-1e4"], 0.8)
    return w.set("x", f"jnp.where({keep}, {x}, {fill})")


def _rounded_again(w: Writer, at: str, s: str, shift: str, exp: str) -> str | None:
    """A sum of other exponentials, whose maximum is the same but for rounding."""
    if shift == "none" or not w.choices.chance(f"{at}.other maximum", 0.12 * w.busy):
        return None
    w.features.add("two roundings of a row")
    m = w.cast(f"{at}.other max", f"lax.stop_gradient({s}.max(-1, keepdims=True))", 0.8)
    return f"{exp}({s} - {m}).sum(-1, keepdims=True)"


def _floored(w: Writer, at: str, total: str) -> str:
    c = w.choices
    kinds = {
        "none": "{}",
        "floor": "jnp.maximum({}, {})",
        "epsilon": "{} + {}",
        "if zero": "jnp.where({0} == 0, 1.0, {0})",
        "one more": "1.0 + {}",
    }
    name = c.pick(f"{at}.guard", {name: name for name in kinds} | {"floor again": "floor"}, 0.5 * w.busy)
    if name == "none":
        return total
    w.features.add(f"guard: {name}")
    number = c.pick(f"{at}.guard.number", ["1e-9", "1e-30", "1.0", "0.5", "0.9", "1e-6", "1e-12"], 0.8)
    if name == "if zero":
        total = w.set("total", total)
    return kinds[name].format(total, number)


def _by_logsumexp(w: Writer, at: str, s: str) -> str:
    """exp(s - logsumexp), where the logsumexp may be rounded, as a whole or the maximum in it."""
    if w.choices.chance(f"{at}.lse by hand", 0.5):
        m = w.set("m", f"lax.stop_gradient({s}.max(-1, keepdims=True))")
        inside = w.cast(f"{at}.inner max cast", m, 0.3)
        outside = w.cast(f"{at}.outer max cast", m, 0.3)
        lse = f"jnp.log(jnp.exp({s} - {inside}).sum(-1, keepdims=True)) + {outside}"
        lse = w.cast(f"{at}.lse cast", f"({lse})", 0.3)
    else:
        lse = w.cast(f"{at}.lse cast", f"jax.nn.logsumexp({s}, -1, keepdims=True)", 0.4)
    lse = w.set("lse", lse)
    x = w.cast(f"{at}.difference cast", f"({s} - {lse})", 0.3)
    return w.set("p", f"jnp.exp({x})")


def _divided(w: Writer, at: str, x: str, by: str) -> str:
    forms = {"divided": f"{x} / {by}", "reciprocal": f"{x} * (1.0 / {by})", "power": f"{x} * ({by})**-1"}
    return w.choices.pick(f"{at}.division", forms, 0.3)


def _weight_step(w: Writer, at: str, p: str, rows: int, keys: int, often: float) -> str:
    """A mask, a factor or a cast of exponentials or probabilities."""
    kind = w.choices.pick(at, ["none", "cast", "where", "float mask", "factor", "guard", "random mask"], often * w.busy)
    if kind == "none":
        return p
    w.features.add(f"weights: {kind}")
    name = p.rstrip("0123456789")
    if kind == "cast":
        return w.set(name, w.cast(f"{at}.to", p, 1.0))
    if kind == "where":
        return w.set(name, f"jnp.where({positions.mask(w, f'{at}.mask', rows, keys)}, {p}, 0.0)")
    if kind == "guard":
        return w.set(name, f"jnp.where(jnp.isnan({p}), 0.0, {p})")
    if kind == "random mask":
        keep = f"jax.random.bernoulli(jax.random.key(7), 0.6, ({rows}, {keys}))"
        return w.set(name, f"{p} * {keep}.astype(jnp.float32)")
    if kind == "factor":
        return w.set(name, f"{p} * {w.normal('factor', (keys,), 'float32', 1.0)}")
    dtype = w.choices.pick(f"{at}.in", ["float32", "bfloat16"], 0.2)
    if w.choices.chance(f"{at}.argument", 0.5):
        empty = w.choices.chance(f"{at}.empty", 0.2)
        return w.set(name, f"{p} * {w.mask('keep', (rows, keys), dtype, empty)}")
    return w.set(name, f"{p} * {positions.mask(w, f'{at}.mask', rows, keys)}.astype(jnp.{dtype})")
