"""Random loops over time: affine in what they carry, in any spelling, or something that looks like it."""

from __future__ import annotations

import re

from .writing import Writer

__all__ = ["body", "operands"]


def operands(w: Writer, at: str) -> tuple[dict[str, int], list[str]]:
    """Keys, values, queries and gates of each step."""
    c = w.choices
    size = {
        "t": c.pick(f"{at}.t", [64, 17, 24, 33, 130], 0.6),
        "d": c.pick(f"{at}.d", [16, 8, 24], 0.4),
        "e": c.pick(f"{at}.e", [12, 16, 8], 0.4),
    }
    scale = c.pick(f"{at}.magnitude", [1.0, 0.1, 10.0], 0.3)
    dtype = w.dtype(f"{at}.x", 0.25)
    w.features.add(f"magnitude {scale:g}")
    rows = [w.normal(name, (size["t"], size[n]), dtype, scale) for name, n in (("k", "d"), ("v", "e"), ("q", "d"))]
    return size, [*rows, w.normal("g", (size["t"], size["d"]), w.dtype(f"{at}.g", 0.15))]


def body(w: Writer, at: str, size: dict[str, int], k: str, v: str, q: str, g: str) -> str:
    """Writes the gates, the loop and what is made of its results."""
    c = w.choices
    gates = {
        "sigmoid": f"jax.nn.sigmoid({g})", "softplus": f"jnp.exp(-jax.nn.softplus({g}))", "tanh": f"jnp.tanh({g})",
        "near one": f"jnp.exp(-1e-3 * jnp.exp({g}))", "above one": f"1 + 0.02 * jnp.tanh({g})",
        "tiny": f"jnp.exp(-8 * jnp.abs({g}))", "zero in places": f"jax.nn.relu(jnp.tanh({g}))",
        "one": f"jnp.ones_like({g})",
    }  # fmt: skip
    kind = c.pick(f"{at}.gate", {name: name for name in gates}, 0.7)
    w.features.add(f"decay: {kind}")
    gate = w.set("gate", w.cast(f"{at}.gate cast", gates[kind], 0.15))
    k = w.set("k_", f"{k} / (1 + jnp.linalg.norm({k}, axis=-1, keepdims=True))")
    matrix = c.chance(f"{at}.matrix", 0.85)
    w.features.add("state: matrix" if matrix else "state: vector")
    w.features |= {"square"} if size["d"] == size["e"] else set()
    step = _matrix(w, at) if matrix else _vector(w, at)
    shape = f"({size['d']}, {size['e']})" if matrix else f"({size['d']},)"
    dtype = c.pick(f"{at}.state", ["jnp.float32", f"{k}.dtype"], 0.2)
    zero = f"jnp.zeros({shape}, {dtype})"
    first = c.pick(f"{at}.first", [zero, f"0.5 + {zero}", f"jnp.cos({k}[0])" + (f"[:, None] + {zero}" * matrix)], 0.3)
    start = w.set("start", f"({first}).astype({dtype})")
    each = f"{k}, {v}, {q}, {gate}"
    if c.chance(f"{at}.loop", 0.3):
        ys, last = _counted(w, at, size["t"], start, each, step)
    else:
        w.features.add("recurrence: scan")
        _define(w, "step(s, now)", ["kt, vt, qt, at = now", *step, "return s, y"])
        reverse, unroll = c.chance(f"{at}.reverse", 0.25), c.pick(f"{at}.unroll", [1, 2, 5], 0.2)
        last, ys = w.fresh("last"), w.fresh("ys")
        w.line(f"{last}, {ys} = lax.scan(step, {start}, ({each}), reverse={reverse}, unroll={unroll})")
    results = {"outputs": ys, "both": f"({ys}, {last})", "last": f"{last}", "sum": f"jnp.sin({ys}).sum(0)"}
    return w.set("result", c.pick(f"{at}.result", results, 0.3))


def _counted(w: Writer, at: str, steps: int, start: str, each: str, step: list[str]) -> tuple[str, str]:
    """The loop as one that reads and writes arrays at a counter."""
    c = w.choices
    _define(w, "first_output(s)", [f"kt, vt, qt, at = (x[0] for x in ({each}))", *step, "return y"])
    out = w.set("out", f"jax.eval_shape(first_output, {start})")
    lagged = c.chance(f"{at}.lagged", 0.3)
    where = c.pick(f"{at}.where", ["i", f"{steps - 1} - i", f"i - {steps}"], 0.3)
    reads = {
        "itself": "x[j]", "index": "lax.dynamic_index_in_dim(x, j, 0, False)", "before": "x[j - 1]",
        "half": "x[j // 2]", "clamped": "lax.dynamic_slice_in_dim(x, j + 2, 1)[0]",
        "two": "0.5 * (x[j] + x[jnp.maximum(j - 1, 0)])",
    }  # fmt: skip
    writes = {
        "set": "ys.at[j].set(y)", "update": "lax.dynamic_update_index_in_dim(ys, y, j, 0)", "add": "ys.at[j].add(y)",
        "onto": "ys.at[j].set(ys[j] + y)", "twice": "ys.at[j].set(y).at[j - 1].set(0.5 * y)",
        "half": "ys.at[j // 2].set(y)", "at times": "jnp.where(at.mean() > 0.6, ys.at[j].set(y), ys)",
        "with the one before": "ys.at[j].set(y + 0.5 * ys[j - 1])", "from the start": "ys.at[i].set(y)",
    }  # fmt: skip
    read, write = (
        c.pick(f"{at}.{name}", {n: n for n in of}, 0.5) for name, of in (("reads", reads), ("writes", writes))
    )
    w.features |= {f"reads: {read}", f"writes: {write}"}
    lines = [f"j = {where}", f"kt, vt, qt, at = ({reads[read]} for x in ({each}))", *step]
    length = c.pick(f"{at}.buffer rows", [steps, steps + 3], 0.2)
    buffer = c.pick(f"{at}.buffer", ["jnp.zeros", "0.5 + jnp.zeros"], 0.2)
    first = f"({start}, ({buffer}(({length}, *{out}.shape))).astype({out}.dtype))"
    last, ys = w.fresh("last"), w.fresh("ys")
    bounds = c.pick(f"{at}.bounds", [f"0, {steps}", f"1, {steps}", f"0, {steps - 1}"], 0.2)
    if lagged:  # the states are kept in a buffer, of which the one before is read
        w.features.add("recurrence: lagged")
        rows = w.set("rows", f"jnp.broadcast_to({start}, ({length}, *{start}.shape)) * 1")
        reads = [f"j = {where}", "s = rows[j - 1]", f"kt, vt, qt, at = ({reads[read]} for x in ({each}))", *step]
        keep = c.pick(f"{at}.keep", ["rows.at[j].set(s)", "rows.at[j].add(s - rows[j])"], 0.2)
        _define(w, "step(i, c)", ["rows, ys = c", *reads, f"return {keep}, {writes[write]}"])
        w.line(f"{last}, {ys} = lax.fori_loop({bounds}, step, {first.replace(start, rows, 1)})")
        return ys, f"{last}[-1]"
    if c.chance(f"{at}.numbers", 0.3):
        w.features.add("recurrence: numbers")
        _define(w, "step(c, i)", ["s, ys = c", *lines, f"return (s, {writes[write]}), None"])
        reverse = c.chance(f"{at}.reverse", 0.25)
        w.line(f"({last}, {ys}), _ = lax.scan(step, {first}, jnp.arange({bounds}), reverse={reverse})")
    else:
        w.features.add("recurrence: fori")
        _define(w, "step(i, c)", ["s, ys = c", *lines, f"return s, {writes[write]}"])
        w.line(f"{last}, {ys} = lax.fori_loop({bounds}, step, {first})")
    return ys, last


def _define(w: Writer, head: str, lines: list[str]) -> None:
    """A function within the program."""
    with w.block(f"def {head}:"):
        for line in lines:
            w.line(line)


def _matrix(w: Writer, at: str) -> list[str]:
    """Lines that make ``s``, [d, e], and ``y`` of k, v, q and a."""
    c = w.choices
    decays = {"channel": "a[:, None] * s", "scalar": "a[0] * s", "other side": "s * a[:, None]",
              "diagonal": "jnp.diag(a) @ s", "constant": "0.9 * s", "columns": "s * (0.5 * a[0] + 0.5)"}  # fmt: skip
    products = {"outer": "jnp.outer(k, v)", "axes": "k[:, None] * v[None]", "einsum": "jnp.einsum('d,e->de', k, v)",
                "gated": "((1 - a) * k)[:, None] * v", "swapped": "(v[None, :] * k[:, None])"}  # fmt: skip
    kinds = {
        "sum": "decayed + added", "other order": "added + decayed", "delta": "delta", "difference": "decayed - added",
        "read by a gate": "gated", "squashed": "tanh", "largest": "max", "squared": "squared", "shifted": "rolled",
    }  # fmt: skip
    kind = c.pick(f"{at}.update", {name: name for name in kinds}, 0.6)
    w.features.add(f"update: {kind}")
    decayed, added = c.pick(f"{at}.decay", decays, 0.6), c.pick(f"{at}.product", products, 0.6)
    read = c.pick(f"{at}.read", ["q @ s", "jnp.einsum('d,de->e', q, s)", "(q[:, None] * s).sum(0)", "s.T @ q"], 0.6)
    update = {
        "sum": f"{decayed} + {added}",
        "other order": f"{added} + {decayed}",
        "difference": f"{decayed} - {added}",
        "delta": f"{decayed} + jnp.outer(k, jax.nn.sigmoid(v) * (v - k @ ({decayed})))",
        "read by a gate": f"jax.nn.sigmoid(s.mean()) * ({decayed}) + {added}",
        "squashed": f"jnp.tanh({decayed} + {added})",
        "largest": f"jnp.maximum({decayed}, {added})",
        "squared": f"{decayed} + 0.01 * s * s + {added}",
        "shifted": f"jnp.roll({decayed}, 1, 0) + {added}",
    }[kind]
    return _ordered(w, at, update, read, "v")


def _vector(w: Writer, at: str) -> list[str]:
    """Lines that make ``s``, [d], and ``y``."""
    c = w.choices
    decays = {"channel": "a * s", "scalar": "a[0] * s", "other side": "s * a", "constant": "0.9 * s",
              "of what is left": "s - (1 - a) * s"}  # fmt: skip
    updates = {
        "sum": "{} + k", "gated": "{} + (1 - a) * k", "other order": "k * q + {}", "difference": "k - {}",
        "read by a gate": "jax.nn.sigmoid(s) * ({}) + k", "squashed": "jnp.tanh({} + k)",
        "largest": "jnp.maximum({}, k)", "squared": "{} + 0.01 * s * s + k", "shifted": "jnp.roll({}, 1) + k",
        "chosen": "jnp.where(a > 0.5, {}, k)", "mixed": "{} + 0.1 * s.mean() + k",
    }  # fmt: skip
    kind = c.pick(f"{at}.update", {name: name for name in updates}, 0.5)
    w.features.add(f"update: {kind}")
    update = updates[kind].format(c.pick(f"{at}.decay", decays, 0.6))
    read = c.pick(f"{at}.read", ["s", "q * s", "s + q", "(q * s).sum()"], 0.5)
    return _ordered(w, at, update, read, "k")


def _ordered(w: Writer, at: str, update: str, read: str, skipped: str) -> list[str]:
    """The update before what is read, or after it; in the state's dtype."""
    c = w.choices
    read = c.pick(f"{at}.epilogue", [read, f"jnp.tanh({read})", f"{read} * 2 + {skipped}.sum()"], 0.3)
    before = c.chance(f"{at}.before", 0.3)
    lines = [f"s = ({update}).astype(s.dtype)", f"y = {read}"]
    # Of a step: others may have the names that the arrays of all steps have.
    lines = [re.sub(r"\b([kvqa])\b", r"\1t", line) for line in lines]
    return lines[::-1] if before else lines
