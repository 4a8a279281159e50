"""Random losses: logits of every dtype, normalisers that round, labels in and out of range."""

from __future__ import annotations

from .norms import normed
from .writing import Writer

__all__ = ["body", "operands"]


def operands(w: Writer, at: str) -> tuple[dict[str, int], list[str]]:
    """Hidden states, the weight of the head, and labels as arguments."""
    c = w.choices
    size = {"d": c.pick(f"{at}.d", [4, 3, 8], 0.4), "v": c.pick(f"{at}.v", [11, 7, 40, 33, 17], 0.6)}
    size["t"] = c.pick(f"{at}.t", [5, 3, 8, 13], 0.5)
    scale = c.pick(f"{at}.magnitude", [1.0, 30.0, 1000.0, 5.0, 100.0], 0.45)
    w.features.add(f"magnitude {scale:g}")
    x = w.normal(
        "x", (size["t"], size["d"]), w.dtype(f"{at}.x", 0.35), scale, c.pick(f"{at}.offset", [0.0, 30.0], 0.15)
    )
    head = w.normal("head", (size["d"], size["v"]), w.dtype(f"{at}.head", 0.35))
    return size, [x, head, labels(w, at, size)]


def labels(w: Writer, at: str, size: dict[str, int]) -> str:
    """Labels as an argument, of any integer dtype; some may be out of range."""
    c = w.choices
    dtype = c.pick(f"{at}.labels", ["int32", "uint8", "int8", "int16", "uint32", *(["int64"] if w.x64 else [])], 0.4)
    low = -2 if not dtype.startswith("u") and c.chance(f"{at}.negative labels", 0.2) else 0
    high = size["v"] + 2 if c.chance(f"{at}.high labels", 0.2) else size["v"] - 1
    if low or high >= size["v"]:
        w.features.add("labels out of range")
    return w.integers("labels", (size["t"],), low, high, dtype)


def body(w: Writer, at: str, size: dict[str, int], x: str, head: str, y: str) -> str:
    """Writes the losses of named values, and gives the name of the result."""
    c, v = w.choices, size["v"]
    x = normed(w, f"{at}.norm", x, size["d"])
    z = _logits(w, at, x, head, v)
    rows, count = _part(w, at, y, size["t"])
    late = bool(rows) and c.chance(f"{at}.part of probabilities", 0.3)
    if rows:
        y, size = w.set("y", rows.format(y)), {**size, "t": count}
        z = z if late else w.set("z", rows.format(z))
    normaliser, picked_from = _normaliser(w, at, z)
    if late:
        normaliser = normaliser if normaliser == "0.0" else rows.format(normaliser)
        picked_from, z = w.set("part", rows.format(picked_from)), rows.format(z)
    picked = _picked(w, at, picked_from, y, size)
    losses = w.set("losses", w.cast(f"{at}.losses cast", f"{normaliser} - {picked}", 0.15))
    return _rows(w, at, losses, normaliser, y, z, c)


def _logits(w: Writer, at: str, x: str, head: str, v: int) -> str:
    c = w.choices
    x, head = w.cast(f"{at}.x cast", x, 0.15), w.cast(f"{at}.head cast", head, 0.15)
    asked = c.pick(f"{at}.logits in", ["", ", preferred_element_type=jnp.float32"], 0.2)
    forms = {
        "dot": f"jnp.matmul({x}, {head}{asked})",
        "einsum": f'jnp.einsum("td,dv->tv", {x}, {head}{asked})',
        "transposed": f'jnp.einsum("td,vd->tv", {x}, {head}.T{asked})',
        "checkpointed": f"jax.checkpoint(lambda a, b: jnp.matmul(jnp.sin(a), b{asked}))({x}, {head})",
    }
    z = w.set("z", c.pick(f"{at}.product", forms, 0.4))
    kinds = ["none", "cast", "bias", "subtract", "scale", "vocabulary", "cap", "twice", "cast", "offset", "subtract"]
    for n in range(4):
        step = f"{at}.step {n}"
        kind = c.pick(step, {f"{name} {i}" if i else name: name for i, name in enumerate(kinds)}, 0.4 * w.busy)
        if kind == "none":
            continue
        w.features.add(f"step: {kind}")
        if kind == "cast":
            z = w.set("z", w.cast(f"{step}.to", z, 1.0))
        elif kind == "bias":
            z = w.set("z", f"{z} + {w.normal('bias', (v,), w.dtype(f'{step}.dtype', 0.3))}")
        elif kind == "subtract":
            rows = {
                "stopped max": f"lax.stop_gradient({z}.max(-1, keepdims=True))",
                "max": f"{z}.max(-1, keepdims=True)",
                "mean": f"{z}.mean(-1, keepdims=True)",
                "first": f"{z}[..., :1]",
            }
            row = w.cast(f"{step}.row cast", c.pick(f"{step}.row", rows, 0.5), 0.3)
            difference = w.cast(f"{step}.cast", f"({z} - {row})", 0.4)
            z = w.set("z", difference)
        elif kind == "scale":
            z = w.set("z", f"{z} {c.pick(f'{step}.by', ['/ 3.0', '* 0.5', '* jnp.float32(2.0)'])}")
        elif kind == "vocabulary":
            dtype = c.pick(f"{step}.in", ["int32", "uint8", "bfloat16"], 0.4)
            fill = c.pick(f"{step}.fill", ["-1e9", "-jnp.inf", "-1e4", "-30.0"], 0.6)
            z = w.set("z", f"jnp.where(jnp.arange({v}, dtype=jnp.{dtype}) < {v - 2}, {z}, {fill})")
        elif kind == "cap":
            z = w.set("z", f"30.0 * jnp.tanh({z} / 30.0)")
        elif kind == "offset":
            z = w.set("z", f"{z} + {c.pick(f'{step}.much', ['30.0', '1000.0', '-1000.0'])}")
        else:
            z = w.set("z", f"{z} + {z}")
    return z


def _part(w: Writer, at: str, y: str, t: int) -> tuple[str, int]:
    """Which rows of the logits count, as an expression, and how many; no expression for all of them."""
    parts = {
        "all": ("", t),
        "but the last": ("{}[:-1]", t - 1),
        "every second": ("{}[1::2]", t // 2),
        "the last": ("{}[-1:]", 1),
        "a window": ("lax.dynamic_slice_in_dim({}, " + y + "[0] % 2, 2, 0)", 2),
        "by number": ("{}[jnp.array([2, 0, 2, 1])]", 4),
        "by a mask": ("{}[np.arange(" + str(t) + ") != 1]", t - 1),
    }
    often = 0.3
    if w.gathers:
        often = 0.6
        parts |= {
            "by the labels": ("{}[" + y + " % " + str(t) + "]", t),
            "by the labels, clipped": ("jnp.take({}, " + y + ', axis=0, mode="clip")', t),
            "by the labels, filled": ("jnp.take({}, " + y + ", axis=0, fill_value=3)", t),
            "sorted": ("{}[jnp.argsort(" + y + ")]", t),
        }
    if w.windows:
        often = 0.7
        windows = "jax.vmap(lambda start: lax.dynamic_slice_in_dim({0}, start, 2, 0))(" + y + "[:2])"
        parts |= {
            "in reverse": ("{}[::-1]", t),
            "sliced twice": ("{}[1:][:-1]", t - 2),
            "picked twice": ("{}[" + y + " % " + str(t) + "][jnp.array([1, 0, 2])]", 3),
            "in reverse but the last": ("{}[::-1][:-1]", t - 1),
            "windows": (windows + ".reshape(4, *{0}.shape[1:])", 4),
        }
    kind = w.choices.pick(f"{at}.part", {name: name for name in parts}, often)
    if kind != "all":
        w.features.add(f"part of the rows: {kind}")
    return parts[kind]


def _normaliser(w: Writer, at: str, z: str) -> tuple[str, str]:
    """(logsumexp of each row, what the label's element is taken from)."""
    c = w.choices
    kind = c.pick(f"{at}.normaliser", ["logsumexp", "log_softmax", "by hand", "shifted", "probabilities"], 0.75)
    w.features.add(f"normaliser: {kind}")
    if kind == "logsumexp":
        return w.set("n", w.cast(f"{at}.lse cast", f"jax.nn.logsumexp({z}, -1)", 0.25)), z
    if kind == "log_softmax":
        log = w.set("log_p", w.cast(f"{at}.log cast", f"jax.nn.log_softmax({z}, -1)", 0.25))
        return "0.0", log
    stop = c.pick(f"{at}.stop", ["lax.stop_gradient({})", "{}"], 0.3)
    m = w.set("m", stop.format(f"{z}.max(-1, keepdims=True)"))
    rounded = w.cast(f"{at}.max cast", m, 0.35)
    x = w.set("shifted", w.cast(f"{at}.difference cast", f"({z} - {rounded})", 0.35))
    e = w.cast(f"{at}.exp cast", f"jnp.exp({x})", 0.2)
    total = w.cast(f"{at}.sum cast", f"{e}.sum(-1)", 0.2)
    if kind == "probabilities":
        p = w.set("p", f"{e} / {total}[..., None]")
        guard = c.pick(f"{at}.guard", ["jnp.log({})", "jnp.log({} + 1e-9)", "jnp.log(jnp.maximum({}, 1e-30))"], 0.5)
        return "0.0", w.set("log_p", guard.format(p))
    n = w.set("n", f"jnp.log({total})")
    if kind == "shifted":
        return n, x
    outer = w.cast(f"{at}.outer max cast", m, 0.3)
    return w.set("n", f"{n} + {outer}[..., 0]"), z


def _picked(w: Writer, at: str, z: str, y: str, size: dict[str, int]) -> str:
    c, v, t = w.choices, size["v"], size["t"]
    dtype = c.pick(f"{at}.positions", ["int32", "uint8", "int8", "bfloat16", "float32"], 0.4)
    forms = {
        "take_along_axis": f"jnp.take_along_axis({z}, {y}[:, None], -1)[:, 0]",
        "one_hot": f"({z} * jax.nn.one_hot({y}, {v})).sum(-1)",
        "narrow one_hot": f"({z} * jax.nn.one_hot({y}, {v}, dtype=jnp.bfloat16)).sum(-1)",
        "where": f"jnp.where(jnp.arange({v}, dtype=jnp.{dtype}) == {y}[:, None], {z}, 0.0).sum(-1)",
        "index": f"{z}[jnp.arange({t}), {y}]",
        "vmapped dot": f"jax.vmap(jnp.dot)({z}, jax.nn.one_hot({y}, {v}))",
        "einsum": f'jnp.einsum("tv,tv->t", {z}, jax.nn.one_hot({y}, {v}))',
        "smoothed": f"0.9 * jnp.take_along_axis({z}, {y}[:, None], -1)[:, 0] + 0.1 * {z}.mean(-1)",
        "vmapped": f"jax.vmap(lambda row, label: row[label])({z}, {y})",
        "clipped": f'jnp.take_along_axis({z}, {y}[:, None], -1, mode="clip")[:, 0]',
    }
    kind = c.pick(f"{at}.pick", {name: name for name in forms}, 0.75)
    w.features.add(f"pick: {kind}")
    return w.set("picked", forms[kind])


def _rows(w: Writer, at: str, losses: str, n: str, y: str, z: str, c: object) -> str:
    square = f" + 1e-2 * jnp.square({n})" if n != "0.0" else ""
    forms = {
        "mean": f"{losses}.mean()",
        "rows": losses,
        "ignored": f"jnp.where({y} != 1, {losses}, 0.0).sum() / ({y} != 1).sum()",
        "weighted": f"({losses} * ({y} > 2)).sum() / ({y} > 2).sum()",
        "z-loss": f"({losses}{square}).mean()",
        "with accuracy": f"({losses}.mean(), ({z}.argmax(-1) == {y}).mean())",
        "probability of the label": f"jnp.exp(-{losses}).sum()",
    }
    kind = w.choices.pick(f"{at}.rows", {name: name for name in forms}, 0.75)
    w.features.add(f"rows: {kind}")
    return w.set("loss", forms[kind])
