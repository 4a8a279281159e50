"""Random gated MLPs: activations whose derivatives have no value somewhere, biases, and rows beyond a block."""

from __future__ import annotations

from .writing import Writer

__all__ = ["body", "operands"]

_ACTIVATIONS = {
    "silu": "jax.nn.silu({})", "gelu": "jax.nn.gelu({})", "gelu exact": "jax.nn.gelu({}, approximate=False)",
    "relu": "jax.nn.relu({})", "sigmoid": "jax.nn.sigmoid({})", "squared relu": "jnp.square(jax.nn.relu({}))",
    "root": "jnp.sqrt(jnp.abs({}))", "root of a relu": "jnp.sqrt(jax.nn.relu({}))", "power": "jnp.abs({}) ** 0.3",
    "log1p": "jnp.log1p({})", "reciprocal": "1 / {}", "exponential": "jnp.exp({})", "absolute": "jnp.abs({})",
    "cube root": "jnp.cbrt({})", "double where": "jnp.where({0} > 0, jnp.sqrt(jnp.where({0} > 0, {0}, 1)), 0)",
    "sign": "jnp.sign({0}) * jnp.log1p(jnp.abs({0}))", "clipped": "jnp.clip({}, -1, 1)",
    "norm": "{0} / jnp.sqrt({0} * {0})",
}  # fmt: skip


def operands(w: Writer, at: str) -> tuple[dict[str, int], list[str]]:
    """Rows and weights as arguments; 512 rows are a block."""
    c = w.choices
    size = {"m": c.pick(f"{at}.m", [6, 1, 512, 515, 700, 1025], 0.6), "k": c.pick(f"{at}.k", [5, 1, 8], 0.3)}
    size |= {"h": c.pick(f"{at}.h", [7, 1, 4], 0.3), "n": c.pick(f"{at}.n", [4, 5, 1], 0.3)}
    scale = c.pick(f"{at}.magnitude", [1.0, 0.1, 30.0], 0.3)
    w.features |= {f"magnitude {scale:g}"} | ({"rows beyond a block"} if size["m"] > 512 else set())
    dtype = w.dtype(f"{at}.weights", 0.3)
    x = w.normal("x", (size["m"], size["k"]), w.dtype(f"{at}.x", 0.3), scale)
    names = [x]
    for name, shape in {"gate": "kh", "up": "kh", "down": "hn"}.items():
        names.append(w.normal(name, (size[shape[0]], size[shape[1]]), dtype))
    if c.chance(f"{at}.bias", 0.3):
        names.append(w.normal("bias", (size["h"],), dtype))
    return size, names


def body(w: Writer, at: str, size: dict[str, int], x: str, gate: str, up: str, down: str, bias: str = "") -> str:
    """Writes the two projections, the activation and the product that follows, or none."""
    c = w.choices
    if c.chance(f"{at}.zeros", 0.25):  # rows of padding, at which derivatives may have no value
        w.features.add("rows of zeros")
        x = w.set("x", f"{x}.at[-1].set(0)")
    gated = w.set("g", w.cast(f"{at}.gate cast", f"{x} @ {gate}", 0.15))
    if bias:
        gated = w.set("g", f"{gated} + {bias}")
    up = w.set("u", w.cast(f"{at}.up cast", f"{x} @ {up}", 0.15))
    name = c.pick(f"{at}.activation", {name: name for name in _ACTIVATIONS}, 0.9)
    w.features.add(f"activation: {name}")
    units = w.set("units", _ACTIVATIONS[name].format(gated))
    units = w.set("units", f"{units} * {up}" if c.chance(f"{at}.order", 0.7) else f"{up} * {units}")
    units = w.set("units", w.cast(f"{at}.units cast", units, 0.15))
    result = w.set("result", w.cast(f"{at}.result cast", f"{units} @ {down}", 0.15))
    return w.set("result", f"{result}.mean(0)") if c.chance(f"{at}.mean", 0.2) else result
