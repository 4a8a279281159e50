"""Random normalisations of rows: which statistics, in which dtype, how the root is taken, and what is scaled."""

from __future__ import annotations

from .writing import Writer

__all__ = ["normed"]


def normed(w: Writer, at: str, x: str, width: int, often: float = 0.15) -> str:
    """A named value with its last axis normalised, or as it is."""
    c = w.choices
    kind = c.pick(at, ["none", "rms", "layer", "layer fast", "var", "standardize"], often * w.busy)
    if kind == "none":
        return x
    w.features.add(f"norm: {kind}")
    x = w.set("n", w.cast(f"{at}.cast", x, 0.3))
    epsilon = c.pick(f"{at}.epsilon", ["1e-6", "1e-5", "1e-2", "0.0"], 0.4)
    if kind == "standardize":
        n = w.set("n", f"jax.nn.standardize({x}, epsilon={epsilon})")
    else:
        mean = w.set("mean", f"jnp.mean({x}, -1, keepdims=True)")
        centred = x if kind == "rms" else w.set("centred", f"{x} - {mean}")
        squares = {
            "rms": f"jnp.mean({x} * {x}, -1, keepdims=True)",
            "layer": f"jnp.mean(jnp.square({centred}), -1, keepdims=True)",
            "layer fast": f"jnp.maximum(jnp.mean({x} ** 2, -1, keepdims=True) - {mean} ** 2, 0)",
            "var": f"jnp.var({x}, -1, keepdims=True, ddof={c.pick(f'{at}.ddof', ['0', '1'], 0.2)})",
        }
        square = w.set("square", w.cast(f"{at}.square cast", squares[kind], 0.15))
        roots = {
            "rsqrt": f"{centred} * lax.rsqrt({square} + {epsilon})",
            "sqrt": f"{centred} / jnp.sqrt({square} + {epsilon})",
            "outside": f"{centred} / (jnp.sqrt({square}) + {epsilon})",
            "power": f"jnp.power({square} + {epsilon}, -0.5) * {centred}",
            "floor": f"{centred} / jnp.maximum(jnp.sqrt({square}), 1e-3)",
        }
        n = w.set("n", c.pick(f"{at}.root", roots, 0.5))
    n = w.set("n", w.cast(f"{at}.result cast", n, 0.2))
    if c.chance(f"{at}.scaled", 0.6):
        scale = w.normal("scale", (width,), w.dtype(f"{at}.scale", 0.3))
        n = w.set("n", f"{n} * {scale}" if c.chance(f"{at}.after", 0.5) else f"(1 + {scale}) * {n}")
    if c.chance(f"{at}.shifted", 0.3):
        n = w.set("n", f"{n} + {w.normal('shift', (width,), w.dtype(f'{at}.shift', 0.3))}")
    return n
