"""Random models: an embedding, by gathering or by a product with one-hot vectors, layers in a loop or not, a loss."""

from __future__ import annotations

from collections.abc import Callable

from . import attention, losses, mixtures
from .attention import Layout
from .writing import Writer

__all__ = ["operands"]

_HEADS = Layout("tnd", "snd", "nts", "sne", "tne")
_VOCABULARY = 11


def operands(w: Writer) -> tuple[list[str], Callable[[], str]]:
    """The names of the arguments that each example has, and what writes the body."""
    c = w.choices
    length, width = c.pick("stack.t", [5, 8, 7], 0.6), 2 * c.pick("stack.d", [2, 3, 4], 0.5)
    count = c.pick("stack.layers", [2, 1, 3, 6], 0.5)
    tokens = w.integers(
        "tokens", (length,), 0, _VOCABULARY - 1, c.pick("stack.tokens", ["int32", "uint8", "int8"], 0.3)
    )
    return [tokens], lambda: _body(w, tokens, length, width, count)


def _body(w: Writer, tokens: str, length: int, width: int, count: int) -> str:
    c = w.choices
    h = _embedded(w, tokens, length, width)
    scale = c.pick("stack.magnitude", [0.5, 3.0, 30.0], 0.3)
    dtype = w.dtype("stack.dtype", 0.3)
    weights = [w.normal(n, (count, width, width), dtype, scale if n == "wq" else 0.5) for n in ("wq", "wk", "wv", "wo")]
    with w.block("def layer(h, weights):"):
        w.line("wq, wk, wv, wo = weights")
        norm = c.pick("stack.norm", ["none", "rms", "mean"], 0.5)
        if norm == "rms":
            x = w.set("x", "h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)")
        elif norm == "mean":
            x = w.set("x", "(h - h.mean(-1, keepdims=True))")
        else:
            x = "h"
        x = w.cast("stack.cast", x, 0.3)
        shape = f"({length}, 2, {width // 2})"
        q, k, v = (w.set(n, f"({x} @ w{n}).reshape{shape}") for n in "qkv")
        size = {"t": length, "s": length, "n": 2, "d": width // 2, "e": width // 2}
        o = attention.body(w, "a", _HEADS, size, q, k, v)
        after = w.set("after", f"h + ({o}.reshape({length}, {width}) @ wo).astype(h.dtype)")
        if c.chance("stack.nonlinear", 0.4):
            after = w.set("after", f"{after} + jax.nn.gelu({after})")
        w.line(f"return {after}")
    function = c.pick("stack.layer", ["layer", "jax.checkpoint(layer)", "jax.jit(layer)"], 0.4)
    loop = c.pick("stack.loop", ["unrolled", "scan", "fori"], 0.5)
    w.features |= {f"layers: {loop}", f"layers: {count}"}
    stacked = f"({', '.join(weights)})"
    if loop == "scan":
        h = w.set("h", f"lax.scan(lambda h, w: ({function}(h, w), None), {h}, {stacked})[0]")
    elif loop == "fori":
        h = w.set(
            "h", f"lax.fori_loop(0, {count}, lambda i, h: {function}(h, jax.tree.map(lambda a: a[i], {stacked})), {h})"
        )
    else:
        for i in range(count):
            h = w.set("h", f"{function}({h}, ({', '.join(f'{a}[{i}]' for a in weights)}))")
    return _after(w, h, tokens, length, width)


def _embedded(w: Writer, tokens: str, length: int, width: int) -> str:
    c = w.choices
    table = w.normal("table", (_VOCABULARY, width), w.dtype("embedding.dtype", 0.2))
    dtype = c.pick("embedding.in", ["float32", "bfloat16", "int32"], 0.3)
    positions = c.pick("embedding.positions", ["int32", "uint8", "bfloat16"], 0.3)
    one_hot = f"jax.nn.one_hot({tokens}, {_VOCABULARY}, dtype=jnp.{dtype})"
    compared = f"({tokens}[:, None] == jnp.arange({_VOCABULARY}, dtype=jnp.{positions})).astype(jnp.{dtype})"
    forms = {
        "gathered": f"{table}[{tokens}]",
        "one-hot": f"({one_hot} @ {table}).astype(jnp.float32)",
        "compared": f"({compared} @ {table}).astype(jnp.float32)",
        "einsum": f'jnp.einsum("tv,vd->td", {one_hot}, {table}).astype(jnp.float32)',
    }
    kind = c.pick("embedding", {name: name for name in forms}, 0.7)
    w.features.add("embedding: gathered" if kind == "gathered" else "embedding: one-hot")
    h = w.set("h", forms[kind] + (".astype(jnp.float32)" if kind == "gathered" else ""))
    if c.chance("embedding.of positions", 0.4):
        places = w.normal("places", (length, width))
        form = c.pick(
            "embedding.places", ["{1}", "jax.nn.one_hot(jnp.arange({0}), {0}) @ {1}", "{1}[jnp.arange({0})]"], 0.7
        )
        h = w.set("h", f"{h} + {form.format(length, places)}")
    return h


def _after(w: Writer, h: str, tokens: str, length: int, width: int) -> str:
    """What follows the layers: nothing, a mixture, a loss of the tokens."""
    kind = w.choices.pick("stack.end", ["nothing", "loss", "mixture", "mixture and loss", "next-token loss"], 0.6)
    w.features.add(f"end: {kind}")
    if "mixture" in kind:
        size, (_, up, down) = mixtures.operands(w, "m", length, width)
        w.arguments = [a for a in w.arguments if not (a.name.startswith("x") and a.kind == "normal")]
        out = mixtures.body(w, "m", size, h, up, down)
        h = w.set("h", f"{h} + {out}")
    if "loss" not in kind:
        return h
    head = w.normal("head", (width, _VOCABULARY), w.dtype("stack.head", 0.3))
    size = {"d": width, "v": _VOCABULARY, "t": length}
    if kind == "next-token loss":
        size["t"] -= 1
        return losses.body(w, "l", size, w.set("before", f"{h}[:-1]"), head, w.set("labels", f"{tokens}[1:]"))
    return losses.body(w, "l", size, h, head, tokens)
