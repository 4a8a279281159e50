"""Random linear attentions: masks that are triangles or almost, decays, running sums, quotients, and casts anywhere."""

from __future__ import annotations

from .attention import Layout
from .writing import Writer

__all__ = ["body", "operands"]

_LAYOUTS = {
    "one head": Layout("td", "sd", "ts", "se", "te"),
    "heads second": Layout("ntd", "nsd", "nts", "nse", "nte"),
    "heads third": Layout("btnd", "bsnd", "bnts", "bsne", "btne"),
    "one key head": Layout("btnd", "bsd", "bnts", "bse", "btne"),
    "one query head": Layout("td", "snd", "nts", "sne", "tne"),
    "transposed": Layout("dt", "ds", "ts", "es", "et"),
}
_MASKS = {
    "lower": "jnp.tril(jnp.ones(({t}, {t}), bool))",
    "upper": "jnp.triu(jnp.ones(({t}, {t}), bool))",
    "strictly lower": "jnp.tril(jnp.ones(({t}, {t}), bool), -1)",
    "strictly upper": "jnp.arange({t})[None] > jnp.arange({t})[:, None]",
    "by later steps": "~(jnp.arange({t})[None] > jnp.arange({t})[:, None])",
    "by floats": "jnp.arange(1, {t} + 1.0)[:, None] >= jnp.arange(1, {t} + 1.0)[None]",
    "one step more": "jnp.tril(jnp.ones(({t}, {t}), bool), 1)",
    "a window": "jnp.abs(jnp.arange({t})[None] - jnp.arange({t})[:, None]) < 3",
    "a hole": "jnp.tril(jnp.ones(({t}, {t}), bool)) & (jnp.arange({t})[None] != 2)",
    "columns": "jnp.broadcast_to(jnp.arange({t})[None] <= 3, ({t}, {t}))",
    "wrapped": "jnp.arange({t}, dtype='uint8')[:, None] - jnp.uint8(1) >= jnp.arange({t}, dtype='uint8')[None]",
}
_DECAYS = {
    "none": "",
    "powers": "{g} ** ({r} - {c})",
    "powers of seen steps": "{g} ** jnp.maximum({r} - {c}, 0)",
    "powers of distances": "{g} ** jnp.abs({r} - {c})",
    "rates": "jnp.exp(-{g} * ({r} - {c}))",
    "rates at each step": "jnp.exp({g} * {c} - {g} * {r})",
    "a number": "0.95 ** ({r} - {c})",
    "a number of halves": "jnp.exp2(({c} - {r}) / 16)",
    "sums": "jnp.exp({sums}[..., :, None] - {sums}[..., None, :])",
    "hidden in the exponent": "jnp.exp(jnp.where({mask}, {sums}[..., :, None] - {sums}[..., None, :], -jnp.inf))",
    "hidden by large numbers": "jnp.exp(jnp.where({mask}, {sums}[..., :, None] - {sums}[..., None, :], -1e9))",
    "segments": "jnp.exp(jnp.cumsum(jnp.where({r} > {c}, {logs}[..., :, None], 0), -2))",
    "segments with the first": "jnp.exp(jnp.cumsum(jnp.where({r} >= {c}, {logs}[..., :, None], 0), -2))",
    "segments of the other step": "jnp.exp(jnp.cumsum(jnp.where({r} > {c}, {logs}[..., None, :], 0), -2))",
    "of another sequence": "jnp.exp({sums}[..., :, None] - jnp.cumsum({logs} / 2, -1)[..., None, :])",
    "of a shifted sequence": "jnp.exp({sums}[..., :, None] - jnp.roll({sums}, 1, -1)[..., None, :])",
    "one step more": "{g} ** ({r} - {c} + 1)",
    "of sums of positions": "{g} ** ({r} + {c})",
    "both": "{g} ** jnp.abs({r} - {c}) * jnp.exp({sums}[..., :, None] - {sums}[..., None, :])",
}


def operands(w: Writer, at: str) -> tuple[tuple[Layout, dict[str, int]], list[str]]:
    """Queries, keys and values as arguments; chunks have 64 steps."""
    c = w.choices
    layout = c.pick(f"{at}.layout", _LAYOUTS, 0.6)
    size = {"b": 2, "n": 2, "t": c.pick(f"{at}.t", [9, 64, 65, 130, 2, 16], 0.6)}
    size |= {"s": size["t"], "d": c.pick(f"{at}.d", [4, 8, 3, 1], 0.4), "e": c.pick(f"{at}.e", [4, 3, 8, 1], 0.4)}
    large = c.pick(f"{at}.magnitude", [1.0, 30.0, 1e-3], 0.3)
    w.features.add(f"magnitude {large:g}")
    offset = c.pick(f"{at}.offset", [0.0, 1.0, 30.0], 0.2)
    names = []
    for name, letters in (("q", layout.q), ("k", layout.k), ("v", layout.v)):
        scale = large if name == "q" else 1.0
        shape = tuple(size[letter] for letter in letters)
        names.append(w.normal(name, shape, w.dtype(f"{at}.{name}", 0.3), scale, offset))
    decay = c.pick(f"{at}.decay", {name: name for name in _DECAYS}, 0.6)
    w.features.add(f"decay: {decay}")
    if "{g}" in _DECAYS[decay]:
        heads = "n" if "n" in layout.scores and c.chance(f"{at}.heads", 0.7) else ""
        names.append(w.normal("g", tuple(size[letter] for letter in heads)))
    if "{sums}" in _DECAYS[decay] or "{logs}" in _DECAYS[decay]:
        names.append(w.normal("logs", tuple(size[letter] for letter in layout.scores if letter != "s")))
    return (layout, size), names


def _decay(w: Writer, at: str, size: int, mask: str, names: list[str]) -> str:
    """Writes the decays between all pairs of steps; an empty string where there are none."""
    text = _DECAYS[w.choices.pick(f"{at}.decay", {name: name for name in _DECAYS}, 0.6)]
    given = dict(zip([kind for kind in ("g", "logs") if names and _reads(text, kind)], names, strict=True))
    if "g" in given:
        axes = "[..., None, None]"
        given["g"] = w.set("gamma", f"jax.nn.sigmoid({given['g']} + 2){axes}")
    if "logs" in given:
        strength = w.choices.pick(f"{at}.strength", [0.1, 1.0, 10.0, 1e-3, -0.1], 0.4)
        given["logs"] = w.set("logs", f"-{strength} * jax.nn.softplus({given['logs']})")
        given["sums"] = w.set("sums", f"jnp.cumsum({given['logs']}, -1)") if "{sums}" in text else ""
    if not text:
        return ""
    r, c = f"jnp.arange({size})[:, None]", f"jnp.arange({size})[None]"
    return w.set("decays", text.format(r=r, c=c, mask=mask, **{"g": "", "sums": "", "logs": ""} | given))


def _reads(text: str, kind: str) -> bool:
    return f"{{{kind}}}" in text or (kind == "logs" and "{sums}" in text)


def body(w: Writer, at: str, given: tuple[Layout, dict[str, int]], q: str, k: str, v: str, *decay: str) -> str:
    """Writes one linear attention, by scores or by running sums."""
    c = w.choices
    layout, size = given
    positive = c.chance(f"{at}.positive", 0.5)
    if positive:
        q, k = (w.set(name, f"jax.nn.elu({x}) + 1") for name, x in (("q", q), ("k", k)))
    if not decay and c.chance(f"{at}.states", 0.35):
        return _by_states(w, at, layout, q, k, v)
    s = w.set("s", w.cast(f"{at}.cast", f"jnp.einsum('{layout.q},{layout.k}->{layout.scores}', {q}, {k})", 0.2))
    if c.chance(f"{at}.scaled", 0.4):
        s = w.set("s", c.pick(f"{at}.scale", [f"{s} * 0.25", f"{s} / 3", f"-{s}"], 0.5))
    name = c.pick(f"{at}.mask", {name: name for name in _MASKS}, 0.7)
    w.features.add(f"mask: {name}")
    mask = _MASKS[name].format(t=size["t"])
    decays = _decay(w, at, size["t"], mask, [*decay])
    if decays:
        s = w.set("s", w.cast(f"{at}.decay cast", f"{s} * {decays}", 0.1))
    spellings = {
        "where": f"jnp.where({mask}, {s}, 0)",
        "product": f"{s} * ({mask})",
        "of ones": f"{s} * jnp.where({mask}, 1.0, 0.0).astype({s}.dtype)",
        "else": f"jnp.where(jnp.logical_not({mask}), jnp.zeros_like({s}), {s})",
        "twice": f"jnp.where({mask}, {s}, 0) * ({mask})",
        "ones": f"jnp.where({mask}, {s}, 1)",
    }
    s = w.set("s", c.pick(f"{at}.spelling", spellings, 0.5))
    quotients = {
        "none": s,
        "sum": f"{s} / {s}.sum(-1, keepdims=True)" if positive else s,
        "sum and more": f"{s} / ({s}.sum(-1, keepdims=True) + 1e-3)" if positive else s,
        "absolute": f"{s} / (1 + jnp.abs({s}.sum(-1, keepdims=True)))",
        "of squares": f"{s} / (1 + ({s} ** 2).sum(-1, keepdims=True))",
        "other axis": f"{s} / (1 + jnp.abs({s}).sum(-2, keepdims=True))",
    }
    quotient = c.pick(f"{at}.quotient", {name: name for name in quotients}, 0.5)
    w.features.add(f"quotient: {quotient}")
    s = w.set("s", w.cast(f"{at}.weight cast", quotients[quotient], 0.15))
    y = w.set("y", f"jnp.einsum('{layout.scores},{layout.v}->{layout.out}', {s}, {v})")
    return w.set("y", f"{y} + {s}.sum()") if c.chance(f"{at}.further", 0.1) else y


def _by_states(w: Writer, at: str, layout: Layout, q: str, k: str, v: str) -> str:
    c = w.choices
    key, value = (letters.replace("s", "t") for letters in (layout.k, layout.v))
    states = "".join(dict.fromkeys(key.replace("d", "") + value.replace("e", ""))) + c.pick(
        f"{at}.order", ["de", "ed"], 0.5
    )
    added = w.set("kv", w.cast(f"{at}.cast", f"jnp.einsum('{key},{value}->{states}', {k}, {v})", 0.2))
    if c.chance(f"{at}.scaled", 0.3):
        added = w.set("kv", f"{added} * 0.5")
    axis = states.index(c.pick(f"{at}.axis", ["t", states[-1], states[0]], 0.2))
    reverse = c.chance(f"{at}.reverse", 0.3)
    w.features |= {"running sums"} | ({"reversed"} if reverse else set())
    total = w.set("total", f"lax.cumsum({added}, axis={axis}, reverse={reverse})")
    return w.set("y", f"jnp.einsum('{layout.q},{states}->{layout.out}', {q}, {total})")
