"""Random mixtures of experts: dense with one-hot gates, loops over experts, ragged products; tokens without experts."""

from __future__ import annotations

from .writing import Writer

__all__ = ["body", "chosen_of", "expert", "nonlinear_of", "operands"]


def operands(
    w: Writer, at: str, tokens: int | None = None, width: int | None = None
) -> tuple[dict[str, int], list[str]]:
    """Tokens, the weights of the experts, and what the choice is made of, as arguments."""
    c = w.choices
    size = {"t": tokens or c.pick(f"{at}.t", [7, 5, 12, 3], 0.5), "d": width or c.pick(f"{at}.d", [4, 3, 8], 0.4)}
    size["f"] = c.pick(f"{at}.f", [6, 3], 0.4)
    size["e"] = c.pick(f"{at}.e", [4, 3, 5, 300, 2, 260, 130], 0.6)
    if size["e"] > 100:
        size |= {"f": 2, "t": tokens or 12}
        w.features.add("many experts")
    size["k"] = c.pick(f"{at}.k", [2, 1, 3], 0.5) if size["e"] > 3 else c.pick(f"{at}.k", [1, 2], 0.5)
    x = w.normal("x", (size["t"], size["d"]), w.dtype(f"{at}.x", 0.25), c.pick(f"{at}.scale", [1.0, 30.0], 0.2))
    up = w.normal("up", (size["e"], size["d"], size["f"]), w.dtype(f"{at}.up", 0.25), 0.5)
    down = w.normal("down", (size["e"], size["f"], size["d"]), w.dtype(f"{at}.down", 0.25), 0.5)
    return size, [x, up, down]


def body(w: Writer, at: str, size: dict[str, int], x: str, up: str, down: str) -> str:
    """Writes a mixture of named values, and gives the name of its result."""
    c = w.choices
    router = w.normal("router", (size["d"], size["e"]))
    p = w.set("probabilities", f"jax.nn.softmax(({x} @ {router}).astype(jnp.float32), -1)")
    weights, chosen = chosen_of(w, at, size, p)
    ways = ["dense", "ragged", "scan over experts", "loop over experts", "dense again"]
    way = c.pick(f"{at}.way", ways, 0.5)
    if size["e"] > 8 and way == "loop over experts":
        way = "dense"
    w.features.add(f"mixture: {way.removesuffix(' again')}")
    if way == "ragged":
        return _ragged(w, at, size, x, up, down, weights, chosen)
    gates = _gates(w, at, size, p, weights, chosen)
    if way == "loop over experts":
        out = w.set("out", f"jnp.zeros_like({x})")
        for e in range(size["e"]):
            out = w.set("out", f"{out} + {gates}[:, {e}, None] * {expert(w, at, x, f'{up}[{e}]', f'{down}[{e}]')}")
        return out
    if way == "scan over experts":
        with w.block("def step(total, expert):"):
            w.line("up_e, down_e, gate = expert")
            w.line(f"return total + (gate[:, None] * {expert(w, at, x, 'up_e', 'down_e')}).astype(total.dtype), None")
        start = f"jnp.zeros(({size['t']}, {size['d']}), jnp.float32)"
        return w.set("out", f"lax.scan(step, {start}, ({up}, {down}, {gates}.T))[0]")
    nonlinear = nonlinear_of(w, at)
    h = w.set("h", f'{nonlinear}(jnp.einsum("td,edf->tef", {x}, {up}))')
    h = w.set("h", cast) if (cast := w.cast(f"{at}.hidden cast", h, 0.2)) != h else h
    forms = {
        "one einsum": f'jnp.einsum("tef,efd,te->td", {h}, {down}, {gates})',
        "weighted sum": f'(jnp.einsum("tef,efd->ted", {h}, {down}) * {gates}[..., None]).sum(1)',
        "weighted hidden": f'jnp.einsum("tef,efd->td", {h} * {gates}[..., None], {down})',
        "two einsums": f'jnp.einsum("ted,te->td", jnp.einsum("tef,efd->ted", {h}, {down}), {gates})',
    }
    return w.set("out", w.cast(f"{at}.result cast", c.pick(f"{at}.combine", forms, 0.6), 0.15))


def nonlinear_of(w: Writer, at: str) -> str:
    return w.choices.pick(f"{at}.nonlinear", ["jax.nn.relu", "jax.nn.silu", "jnp.tanh", "jax.nn.gelu"], 0.5)


def expert(w: Writer, at: str, x: str, up: str, down: str) -> str:
    return f"({nonlinear_of(w, at)}({x} @ {up}) @ {down})"


def chosen_of(w: Writer, at: str, size: dict[str, int], p: str) -> tuple[str, str]:
    """(weights, experts), both [t, k].  Experts of an argument may be none at all."""
    c, (t, e, k) = w.choices, (size["t"], size["e"], size["k"])
    kind = c.pick(f"{at}.choice", ["top_k", "argument", "argmax"], 0.5)
    w.features.add(f"choice: {kind}")
    if kind == "argument":
        dtype = c.pick(f"{at}.chosen in", ["int32", "uint32", "int16"], 0.2)
        low = -1 if dtype != "uint32" and c.chance(f"{at}.below", 0.3) else 0
        high = e + 1 if c.chance(f"{at}.above", 0.5) else e - 1
        if low < 0 or high >= e:
            w.features.add("tokens without experts")
        chosen = w.integers("chosen", (t, k), low, high, dtype)
        return w.set("weights", f"jnp.take_along_axis({p}, {chosen}, -1, mode='clip')"), chosen
    if kind == "argmax":
        size["k"] = 1
        chosen = w.set("chosen", f"jnp.argmax({p}, -1, keepdims=True)")
        return w.set("weights", f"{p}.max(-1, keepdims=True)"), chosen
    w.line(f"weights, chosen = lax.top_k({p}, {k})")
    weights = "weights"
    if c.chance(f"{at}.threshold", 0.3):
        chosen = w.set("chosen", f"jnp.where({weights} > {0.4 if e < 100 else 0.02}, chosen, {e})")
        w.features.add("tokens without experts")
        return weights, chosen
    return weights, "chosen"


def _gates(w: Writer, at: str, size: dict[str, int], p: str, weights: str, chosen: str) -> str:
    """The weight of each expert, [t, e], zero but for the chosen ones."""
    c, e, t = w.choices, size["e"], size["t"]
    dtype = c.pick(f"{at}.positions", ["int32", "uint8", "int8", "bfloat16", "float32", "uint32", "float16"], 0.45)
    index = c.pick(f"{at}.index", {"own": "", "same": f".astype(jnp.{dtype})", "uint8": ".astype(jnp.uint8)"}, 0.3)
    wide = c.pick(f"{at}.positions to", ["", "int32", "float32"], 0.3)
    line = f"jnp.arange({e}, dtype=jnp.{dtype})" + (f".astype(jnp.{wide})" if wide else "")
    if dtype != "int32":
        w.features.add("positions")
    result = c.pick(f"{at}.one_hot in", ["float32", "bfloat16", "int32", "bool", "uint8"], 0.4)
    hots = {
        "compared": f"({chosen}{index}[..., None] == {line}).astype(jnp.{result})",
        "one_hot": f"jax.nn.one_hot({chosen}, {e}, dtype=jnp.{result if result != 'bool' else 'float32'})",
    }
    hot = w.set("hot", c.pick(f"{at}.hot", hots, 0.4))
    forms = {
        "weights": f"({hot} * {weights}[..., None]).sum(1)",
        "einsum": f'jnp.einsum("tk,tke->te", {weights}, {hot}.astype(jnp.float32))',
        "masked": f"jnp.where({hot}.astype(jnp.float32).sum(1) > 0, {p}, 0.0)",
        "product": f"({hot}.astype(jnp.float32).max(1) * {p})",
        "scattered": f"jnp.zeros(({t}, {e})).at[jnp.arange({t})[:, None], {chosen}].set({weights})",
        "counted": f"{hot}.astype(jnp.float32).sum(1)",
    }
    gates = w.set("gates", c.pick(f"{at}.gates", forms, 0.7))
    norms = {
        "none": "",
        "divided": f"{gates} / {gates}.sum(-1, keepdims=True)",
        "epsilon": f"{gates} / ({gates}.sum(-1, keepdims=True) + 1e-9)",
        "floor": f"{gates} / jnp.maximum({gates}.sum(-1, keepdims=True), 1e-6)",
        "reciprocal": f"{gates} * (1.0 / {gates}.sum(-1, keepdims=True))",
        "softmax of the chosen": f"jax.nn.softmax(jnp.where({gates} > 0, {gates}, -jnp.inf), -1)",
    }
    kind = c.pick(f"{at}.normalised", {name: name for name in norms}, 0.55)
    w.features.add(f"gates: {kind}")
    gates = w.set("gates", norms[kind]) if norms[kind] else gates
    cast = w.cast(f"{at}.gates cast", gates, 0.2)
    return w.set("gates", cast) if cast != gates else gates


def _ragged(w: Writer, at: str, size: dict[str, int], x: str, up: str, down: str, weights: str, chosen: str) -> str:
    c, (t, e, d) = w.choices, (size["t"], size["e"], size["d"])
    flat = w.set("flat", f"{chosen}.reshape(-1)")
    order = w.set("order", f"jnp.argsort({flat})")
    sizes = w.set("sizes", f"jnp.bincount({flat}, length={e}).astype(jnp.int32)")
    result = c.pick(f"{at}.ragged in", ["", ", preferred_element_type=jnp.float32"], 0.2)
    rows = w.set("rows", f"jnp.repeat({x}, {chosen}.shape[1], 0)[{order}]")
    h = w.cast(
        f"{at}.hidden cast",
        f"{nonlinear_of(w, at)}(lax.ragged_dot({rows}, {up}.astype({rows}.dtype), {sizes}{result}))",
        0.2,
    )
    y = w.set("y", f"lax.ragged_dot(({h}).astype({down}.dtype), {down}, {sizes}{result})")
    y = w.set("y", f"jnp.zeros(({t} * {chosen}.shape[1], {d}), {y}.dtype).at[{order}].set({y})")
    return w.set("out", f"({y}.reshape({t}, -1, {d}) * {weights}[..., None]).sum(1)")
