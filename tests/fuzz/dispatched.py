"""Random mixtures of experts by scatters and gathers, intervals of sorted rows, gathered matrices, and loops."""

from __future__ import annotations

from collections.abc import Callable

from .mixtures import chosen_of, expert, nonlinear_of, operands
from .writing import Writer

__all__ = ["body", "operands"]


def body(w: Writer, at: str, size: dict[str, int], x: str, up: str, down: str) -> str:
    """Writes a mixture of named values, and gives the name of its result."""
    router = w.normal("router", (size["d"], size["e"]))
    p = w.set("probabilities", f"jax.nn.softmax(({x} @ {router}).astype(jnp.float32), -1)")
    if size["e"] <= 8 and w.choices.chance(f"{at}.experts choose", 0.1):
        w.features.add("mixture: experts choose")
        return _experts_choose(w, at, size, x, up, down, p)
    weights, chosen = chosen_of(w, at, size, p)
    if w.choices.chance(f"{at}.normalised", 0.3):
        weights = w.set("weights", f"{weights} / ({weights}.sum(-1, keepdims=True) + 1e-6)")
    ways = {name: name for name in ("slots", "gathered", "picked", "intervals", "loop", "scan")}
    way = w.choices.pick(f"{at}.way", ways, 0.85)
    if size["e"] > 8 and way in ("loop", "intervals"):
        way = "slots"
    w.features.add(f"mixture: {way}")
    return _WAYS[way](w, at, size, x, up, down, weights, chosen)


def _weighted(w: Writer, at: str, y: str, weights: str) -> str:
    """The sum of [t, k, d] over the choices."""
    y = w.set("y", w.cast(f"{at}.y cast", y, 0.15))
    forms = {
        "einsum": f'jnp.einsum("tkd,tk->td", {y}, {weights})',
        "sum": f"({y} * {weights}[..., None]).sum(1)",
        "cast": f"({y} * {weights}[..., None].astype({y}.dtype)).sum(1)",
    }
    return w.set("out", w.choices.pick(f"{at}.combine", forms, 0.5))


def _rows_of_experts(w: Writer, at: str, rows: str, up: str, down: str) -> str:
    """What each expert computes for its rows, [e, rows, d]."""
    h = w.set("h", w.cast(f"{at}.h cast", f'{nonlinear_of(w, at)}(jnp.einsum("ecd,edf->ecf", {rows}, {up}))', 0.2))
    return w.set("y", f'jnp.einsum("ecf,efd->ecd", {h}, {down})')


def _slots(w: Writer, at: str, size: dict[str, int], x: str, up: str, down: str, weights: str, chosen: str) -> str:
    c, (t, e, d) = w.choices, (size["t"], size["e"], size["d"])
    capacity = c.pick(f"{at}.capacity", [3, 1, 2, 8], 0.5)
    flat = w.set("flat", f"{chosen}.reshape(-1)")
    counted = c.pick(f"{at}.counted in", ["int32", "float32", "bfloat16", "uint8"], 0.3)
    hot = w.set("hot", f"jax.nn.one_hot({flat}, {e}, dtype=jnp.{counted})")
    place = w.set("place", f"((jnp.cumsum({hot}, 0) - 1) * {hot}).sum(-1).astype(jnp.int32)")
    kinds = {"drop": "mode='drop'", "clip": "mode='clip'", "promised": "mode='promise_in_bounds'"}
    rows = w.set("rows", f"jnp.repeat({x}, {chosen}.shape[1], 0)")
    update = c.pick(f"{at}.update", ["add", "set"], 0.4)
    empty = f"jnp.zeros(({e}, {capacity}, {d}), {rows}.dtype)"
    if c.chance(f"{at}.one index", 0.4):
        index = w.set("index", f"jnp.where({place} < {capacity}, {flat} * {capacity} + {place}, {e * capacity})")
        slots = w.set("slots", f"{empty}.reshape(-1, {d}).at[{index}].{update}({rows}, mode='drop')")
        y = _rows_of_experts(w, at, f"{slots}.reshape({e}, {capacity}, {d})", up, down)
        back = c.pick(f"{at}.back", {"fill": "mode='fill', fill_value=0", **kinds}, 0.3)
        y = f"{y}.reshape(-1, {d}).at[{index}].get({back})" if "drop" not in back else f"{y}.reshape(-1, {d})[{index}]"
        return _weighted(w, at, f"({y}).reshape({t}, -1, {d})", weights)
    brings = c.pick(f"{at}.brings", kinds, 0.2)
    slots = w.set("slots", f"{empty}.at[{flat}, {place}].{update}({rows}, {brings})")
    y = _rows_of_experts(w, at, slots, up, down)
    back = c.pick(f"{at}.back", ["mode='fill', fill_value=0", "mode='clip'", "mode='fill', fill_value=1"], 0.3)
    return _weighted(w, at, f"{y}.at[{flat}, {place}].get({back}).reshape({t}, -1, {d})", weights)


def _gathered(w: Writer, at: str, size: dict[str, int], x: str, up: str, down: str, weights: str, chosen: str) -> str:
    c = w.choices
    forms = {
        "indexed": "{m}[{i}]",
        "taken": "jnp.take({m}, {i}, axis=0)",
        "clipped": "jnp.take({m}, {i}, axis=0, mode='clip')",
    }
    form = c.pick(f"{at}.gather", forms, 0.5)
    own = [form.format(m=m, i=chosen) for m in (up, down)]
    h = w.set("h", w.cast(f"{at}.h cast", f'{nonlinear_of(w, at)}(jnp.einsum("td,tkdf->tkf", {x}, {own[0]}))', 0.2))
    return _weighted(w, at, f'jnp.einsum("tkf,tkfd->tkd", {h}, {own[1]})', weights)


def _picked(w: Writer, at: str, size: dict[str, int], x: str, up: str, down: str, weights: str, chosen: str) -> str:
    h = w.set("h", f'{nonlinear_of(w, at)}(jnp.einsum("td,edf->tef", {x}, {up}))')
    y = w.set("y", f'jnp.einsum("tef,efd->ted", {h}, {down})')
    forms = {
        "along": f"jnp.take_along_axis({y}, {chosen}[..., None], axis=1)",
        "along, clipped": f"jnp.take_along_axis({y}, {chosen}[..., None], axis=1, mode='clip')",
        "indexed": f"{y}[jnp.arange({size['t']})[:, None], {chosen}]",
        "row by row": f"jax.vmap(lambda a, i: a[i])({y}, {chosen})",
    }
    return _weighted(w, at, w.choices.pick(f"{at}.pick", forms, 0.7), weights)


def _intervals(w: Writer, at: str, size: dict[str, int], x: str, up: str, down: str, weights: str, chosen: str) -> str:
    c, (t, e, d) = w.choices, (size["t"], size["e"], size["d"])
    flat = w.set("flat", f"{chosen}.reshape(-1)")
    order = w.set("order", f"jnp.argsort({flat})")
    counts = w.set("counts", f"(({flat})[:, None] == jnp.arange({e})).astype(jnp.int32).sum(0)")
    ends = w.set("ends", f"jnp.cumsum({counts})")
    starts = w.set("starts", c.pick(f"{at}.starts", [f"{ends} - {counts}", f"jnp.roll({ends}, 1).at[0].set(0)"], 0.3))
    rows = w.set("rows", f"jnp.repeat({x}, {chosen}.shape[1], 0)[{order}]")
    place = w.set("place", f"jnp.arange({rows}.shape[0])")
    less = c.pick(f"{at}.end", ["<", "<="], 0.15)  # with the latter a row may be in two intervals
    if c.chance(f"{at}.all at once", 0.5):
        masks = w.set("masks", f"({place} >= {starts}[:, None]) & ({place} {less} {ends}[:, None])")
        h = w.set("h", f'{nonlinear_of(w, at)}(jnp.einsum("rd,edf->erf", {rows}, {up}))')
        y = w.set("y", f'jnp.einsum("erf,efd->erd", {h}, {down})')
        y = w.set("y", f"jnp.where({masks}[..., None], {y}, 0).sum(0)")
    else:
        replaces = c.chance(f"{at}.replaces", 0.5)
        y = w.set("y", f"jnp.zeros(({rows}.shape[0], {d}), jnp.float32)")
        for i in range(e):
            mask = w.set("mask", f"({place} >= {starts}[{i}]) & ({place} {less} {ends}[{i}])")
            own = expert(w, at, rows, f"{up}[{i}]", f"{down}[{i}]")
            other = y if replaces else "0"
            y = w.set("y", f"jnp.where({mask}[:, None], {own}, {other})" + ("" if replaces else f" + {y}"))
    y = w.set("y", f"{y}[jnp.argsort({order})]")
    return _weighted(w, at, f"{y}.reshape({t}, -1, {d})", weights)


def _loop(w: Writer, at: str, size: dict[str, int], x: str, up: str, down: str, weights: str, chosen: str) -> str:
    """A loop over experts by their number, which adds up or replaces."""
    c, e = w.choices, size["e"]
    forms = {
        "sum": f"({chosen} == e) * {weights}",
        "where": f"jnp.where({chosen} == e, {weights}, 0.0)",
    }
    gate = c.pick(f"{at}.gate", forms, 0.5)
    with w.block("def step(e, total):"):
        w.line(f"gate = ({gate}).sum(-1, keepdims=True)")
        w.line(f"y = {expert(w, at, x, f'{up}[e]', f'{down}[e]')}")
        adds = {"adds": "total + (gate * y).astype(total.dtype)", "masks": "total + jnp.where(gate > 0, gate * y, 0)"}
        if size["k"] == 1:
            adds["replaces"] = f"jnp.where({chosen} == e, (gate * y).astype(total.dtype), total)"
        w.line(f"return {c.pick(f'{at}.step', adds, 0.6)}")
    start = w.set("start", f"jnp.zeros(({size['t']}, {size['d']}), jnp.float32)")
    loops = {
        "scan": f"lax.scan(lambda total, e: (step(e, total), None), {start}, jnp.arange({e}))[0]",
        "fori": f"lax.fori_loop(0, {e}, step, {start})",
        "written out": " ".join(f"step({i}," for i in reversed(range(e))) + start + ")" * e,
    }
    return w.set("out", c.pick(f"{at}.loop", loops, 0.5))


def _scan(w: Writer, at: str, size: dict[str, int], x: str, up: str, down: str, weights: str, chosen: str) -> str:
    """A scan over the experts' matrices, which adds up or stacks."""
    c = w.choices
    gates = w.set("gates", f"(jax.nn.one_hot({chosen}, {size['e']}) * {weights}[..., None]).sum(1)")
    with w.block("def step(total, given):"):
        w.line("u, v, gate = given")
        w.line(f"y = {expert(w, at, x, 'u', 'v')} * gate[:, None]")
        stacks = c.chance(f"{at}.stacks", 0.4)
        w.line("return total, y" if stacks else "return total + y.astype(total.dtype), None")
    start = f"jnp.zeros(({size['t']}, {size['d']}), jnp.float32)"
    body_ = c.pick(f"{at}.body", ["step", "jax.checkpoint(step)"], 0.3)
    found = w.set("found", f"lax.scan({body_}, {start}, ({up}, {down}, {gates}.T))")
    return w.set("out", f"{found}[1].sum(0)" if stacks else f"{found}[0]")


def _experts_choose(w: Writer, at: str, size: dict[str, int], x: str, up: str, down: str, p: str) -> str:
    c, (t, d) = w.choices, (size["t"], size["d"])
    w.line(f"best, tokens = lax.top_k({p}.T, {min(t, c.pick(f'{at}.chosen', [2, 1, 3], 0.5))})")
    y = _rows_of_experts(w, at, w.set("rows", f"{x}[tokens]"), up, down)
    y = w.set("y", f"({y} * best[..., None]).reshape(-1, {d})")
    return w.set("out", f"jnp.zeros(({t}, {d}), {y}.dtype).at[tokens.reshape(-1)].add({y})")


_WAYS: dict[str, Callable[[Writer, str, dict[str, int], str, str, str, str, str], str]] = {
    "slots": _slots, "gathered": _gathered, "picked": _picked, "intervals": _intervals, "loop": _loop, "scan": _scan,
}  # fmt: skip
