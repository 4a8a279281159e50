"""Random losses over two products: two heads that are compared, and contrastive losses over rows and columns of one."""

from __future__ import annotations

from .losses import labels
from .writing import Writer

__all__ = ["body", "operands"]


def operands(w: Writer, at: str) -> tuple[dict[str, int], list[str]]:
    """Hidden states of both sides, the heads' weights, and labels as arguments."""
    c = w.choices
    size = {"d": c.pick(f"{at}.d", [4, 3, 8], 0.4), "v": c.pick(f"{at}.v", [11, 7, 40, 17], 0.6)}
    size["t"] = c.pick(f"{at}.t", [5, 3, 8], 0.5)
    scale = c.pick(f"{at}.magnitude", [1.0, 30.0, 1000.0, 5.0], 0.4)
    w.features.add(f"magnitude {scale:g}")
    sides = [w.normal("x", (size["t"], size["d"]), w.dtype(f"{at}.x", 0.3), scale)]
    sides.append(w.normal("x", (size["t"], size["d"]), w.dtype(f"{at}.other x", 0.3), scale))
    heads = [w.normal("head", (size["d"], size["v"]), w.dtype(f"{at}.head {n}", 0.3)) for n in range(2)]
    return size, [*sides, *heads, labels(w, at, size)]


def body(w: Writer, at: str, size: dict[str, int], x: str, other: str, head: str, second: str, y: str) -> str:
    """Writes a loss of named values, and gives the name of the result."""
    kind = w.choices.pick(f"{at}.kind", ["heads", "contrastive", "heads again"], 0.6).removesuffix(" again")
    w.features.add(f"pair: {kind}")
    if kind == "contrastive":
        return _contrastive(w, at, size, x, other, y)
    z = [_logits(w, f"{at}.{n}", a, b, size["v"]) for n, (a, b) in enumerate([(x, head), (other, second)])]
    return _compared(w, at, size, z, y)


def _logits(w: Writer, at: str, x: str, head: str, v: int) -> str:
    c = w.choices
    asked = c.pick(f"{at}.logits in", ["", ", preferred_element_type=jnp.float32"], 0.2)
    z = w.set("z", f"jnp.matmul({x}, {head}{asked})")
    z = w.set("z", w.cast(f"{at}.cast", z, 0.25))
    steps = {
        "none": "",
        "temperature": "{} / 2.0",
        "bias": "{} + " + w.normal("bias", (v,)) if c.chance(f"{at}.has bias", 0.3) else "{} + 1.0",
        "cap": "30.0 * jnp.tanh({} / 30.0)",
        "padded": f"jnp.where(jnp.arange({v}) < {v - 2}, {{}}, -1e9)",
        "stopped": "lax.stop_gradient({})",
    }
    step = c.pick(f"{at}.step", {name: name for name in steps}, 0.5)
    w.features.add(f"step: {step}")
    return w.set("z", steps[step].format(z)) if steps[step] else z


def _log_p(w: Writer, at: str, z: str, axis: int = -1) -> str:
    forms = {
        "log_softmax": f"jax.nn.log_softmax({z}, {axis})",
        "logsumexp": f"{z} - jax.nn.logsumexp({z}, {axis}, keepdims=True)",
        "by hand": f"({z} - {z}.max({axis}, keepdims=True)) - "
        f"jnp.log(jnp.exp({z} - {z}.max({axis}, keepdims=True)).sum({axis}, keepdims=True))",
    }
    return w.set("log_p", w.cast(f"{at}.log cast", f"({w.choices.pick(f'{at}.log', forms, 0.5)})", 0.15))


def _compared(w: Writer, at: str, size: dict[str, int], z: list[str], y: str) -> str:
    c = w.choices
    p, q = (_log_p(w, f"{at}.{n}", one) for n, one in enumerate(z))
    row = f"jnp.arange({size['t']})"
    forms = {
        "kl": f"(jnp.exp({p}) * ({p} - {q})).sum(-1)",
        "reverse kl": f"(jnp.exp({q}) * ({q} - {p})).sum(-1)",
        "soft labels": f"-(jax.nn.softmax({z[1]}, -1) * {p}).sum(-1)",
        "stopped soft labels": f"-(lax.stop_gradient(jax.nn.softmax({z[1]}, -1)) * {p}).sum(-1)",
        "distilled": f"0.5 * (jnp.exp({q}) * ({q} - {p})).sum(-1) - 0.5 * {p}[{row}, {y}]",
        "both kls": f"(jnp.exp({p}) * ({p} - {q})).sum(-1) + (jnp.exp({q}) * ({q} - {p})).sum(-1)",
        "squares": f"jnp.square({z[0]} - {z[1]}).mean(-1)",
        "picked": f"jnp.log1p(jnp.exp(-({p}[{row}, {y}] - {q}[{row}, {y}])))",
        "mixture": f"-jnp.logaddexp({p}, {q})[{row}, {y}]",
        "entropy": f"-(jnp.exp({p}) * {p}).sum(-1) + {q}[{row}, {y}]",
        "agreement": f"({z[0]}.argmax(-1) == {z[1]}.argmax(-1)) * (jnp.exp({p}) * ({p} - {q})).sum(-1)",
        "jensen shannon": (
            f"0.5 * (jnp.exp({p}) * ({p} - jnp.log(0.5 * (jnp.exp({p}) + jnp.exp({q}))))).sum(-1) + "
            f"0.5 * (jnp.exp({q}) * ({q} - jnp.log(0.5 * (jnp.exp({p}) + jnp.exp({q}))))).sum(-1)"
        ),
    }
    kind = c.pick(f"{at}.compared", {name: name for name in forms}, 0.85)
    w.features.add(f"compared: {kind}")
    return _rows(w, at, w.set("losses", forms[kind]), y)


def _contrastive(w: Writer, at: str, size: dict[str, int], x: str, other: str, y: str) -> str:
    c, t = w.choices, size["t"]
    if c.chance(f"{at}.unit", 0.4):
        x, other = (w.set("u", f"{a} / jnp.linalg.norm({a}, axis=-1, keepdims=True)") for a in (x, other))
    z = w.set("z", w.cast(f"{at}.scores cast", f"jnp.matmul({x}, {other}.T)", 0.2))
    scale = {"none": "", "temperature": "{} / 0.5", "learnt": "{} * jnp.exp(" + w.normal("log_scale", ()) + ")"}
    step = c.pick(f"{at}.scale", {name: name for name in scale}, 0.5)
    z = w.set("z", scale[step].format(z)) if scale[step] else z
    if c.chance(f"{at}.without itself", 0.2):
        z = w.set("z", f"jnp.where(jnp.eye({t}, dtype=bool), {c.pick(f'{at}.fill', ['-1e9', '-jnp.inf'])}, {z})")
        target = f"jnp.arange(1, {t + 1}) % {t}"
    else:
        target = f"jnp.arange({t})"
    rows, columns = _log_p(w, f"{at}.rows", z), _log_p(w, f"{at}.columns", z, 0)
    diagonal = {
        "index": "{}[jnp.arange(" + str(t) + f"), {target}]",
        "take": "jnp.take_along_axis({}, (" + target + ")[:, None], 1)[:, 0]",
        "one_hot": "({} * jax.nn.one_hot(" + target + f", {t})).sum(-1)",
    }
    pick = c.pick(f"{at}.diagonal", diagonal, 0.5)
    forms = {
        "both": f"-0.5 * ({pick.format(rows)} + {pick.format(columns)})",
        "rows": f"-{pick.format(rows)}",
        "columns": f"-{pick.format(columns)}",
    }
    return _rows(w, at, w.set("losses", c.pick(f"{at}.axes", forms, 0.4)), y)


def _rows(w: Writer, at: str, losses: str, y: str) -> str:
    forms = {
        "mean": f"{losses}.mean()",
        "rows": losses,
        "ignored": f"jnp.where({y} != 1, {losses}, 0.0).sum() / ({y} != 1).sum()",
        "weighted": f"({losses} * ({y} > 2)).sum()",
    }
    kind = w.choices.pick(f"{at}.counted", {name: name for name in forms}, 0.6)
    w.features.add(f"rows: {kind}")
    return w.set("loss", forms[kind])
