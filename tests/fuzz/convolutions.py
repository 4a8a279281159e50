"""Random convolutions: strides, dilations and paddings of any sign, groups, and axes in any order."""

from __future__ import annotations

import random

from .writing import Writer

__all__ = ["body", "operands"]

_Sizes = dict[str, tuple[int, ...]]


def operands(w: Writer, at: str) -> tuple[_Sizes, list[str]]:
    """An image and weights; where the window is as large as the image, the result is that of a weight's gradient."""
    c = w.choices
    rank = c.pick(f"{at}.axes", [2, 1, 3], 0.5)
    groups, batches = c.pick(f"{at}.groups", {"one": (1, 1), "features": (2, 1), "batch": (1, 3)}, 0.4)
    space = tuple(c.pick(f"{at}.length {n}", [6, 5, 7, 9], 0.6) for n in range(rank))
    window = tuple(c.pick(f"{at}.window {n}", [3, 1, 2, 4, space[n]], 0.6) for n in range(rank))
    channels = c.pick(f"{at}.channels", [2, 1, 5], 0.4)
    image = (c.pick(f"{at}.batch", [2, 1], 0.4) * batches, channels * groups, *space)
    weights = (c.pick(f"{at}.results", [3, 1, 2], 0.5) * groups * batches, channels, *window)
    orders = [tuple(range(rank + 2))] * 3
    for n, name in enumerate(("image", "weights", "result")):
        last = (1, 0) if name == "weights" else (0, 1)
        choices = {"first": orders[n], "last": _last(rank, last), "any": _any(c.seed, name, rank)}
        orders[n] = c.pick(f"{at}.order of the {name}", choices, 0.6)
    w.features |= {f"convolution: {rank} axes"} | ({"convolution: groups"} if groups * batches > 1 else set())
    dtype = w.dtype(f"{at}.x", 0.2)
    x = w.normal("x", _placed(image, orders[0]), dtype, c.pick(f"{at}.magnitude", [1.0, 30.0], 0.2))
    sizes = {"lhs": orders[0], "rhs": orders[1], "out": orders[2], "groups": (groups, batches), "space": space}
    return sizes | {"window": window}, [x, w.normal("w", _placed(weights, orders[1]), dtype)]


def _last(rank: int, ends: tuple[int, int]) -> tuple[int, ...]:
    """Where (batch, features, *space) stand with the features last; of weights, also the results."""
    if ends == (1, 0):
        return (rank + 1, rank, *range(rank))
    return (0, rank + 1, *range(1, rank + 1))


def _any(seed: int, name: str, rank: int) -> tuple[int, ...]:
    order = list(range(rank + 2))
    random.Random(f"{seed}/{name}").shuffle(order)
    return tuple(order)


def _placed(sizes: tuple[int, ...], order: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for _, size in sorted(zip(order, sizes, strict=True)))


def body(w: Writer, at: str, sizes: _Sizes, x: str, weights: str) -> str:
    """Writes one convolution, alone, in a loop, or in a branch."""
    c = w.choices
    strides, padding, before, between = [], [], [], []
    for n, (length, window) in enumerate(zip(sizes["space"], sizes["window"], strict=True)):
        strides.append(c.pick(f"{at}.stride {n}", [1, 2, 3], 0.4))
        before.append(c.pick(f"{at}.inserted {n}", [1, 2, 3], 0.3))
        between.append(c.pick(f"{at}.dilation {n}", [1, 2, 3], 0.3))
        low, high = (c.pick(f"{at}.{side} {n}", [1, 0, 2, -1, -2], 0.6) for side in ("low", "high"))
        reach, there = (window - 1) * between[n] + 1, (length - 1) * before[n] + 1
        padding.append((low, max(high, reach - there - low)))  # at least one element is left
    groups, batches = sizes["groups"]
    numbers = f"lax.ConvDimensionNumbers({sizes['lhs']}, {sizes['rhs']}, {sizes['out']})"
    call = (
        f"lax.conv_general_dilated({{}}, {weights}, {tuple(strides)}, {padding}, {tuple(before)}, {tuple(between)}, "
        f"{numbers}, {groups}, {batches})"
    )
    forms = {
        "alone": call.format(x),
        "map": f"lax.map(lambda n: {call.format(f'({x} * n).astype({x}.dtype)')}, jnp.array([1.0, -0.5]))",
        "scan": f"lax.scan(lambda n, _: (0.5 * n, {call.format(f'({x} * n).astype({x}.dtype)')}), 1.0, length=2)",
        "branch": f"lax.cond({x}.sum() < 1e30, lambda x: {call.format('x')}, lambda x: 2 * {call.format('x')}, {x})",
    }
    place = c.pick(f"{at}.place", forms, 0.7)
    w.features |= {f"convolution in a {name}" for name, text in forms.items() if text == place and name != "alone"}
    return w.set("result", w.cast(f"{at}.cast", f"({place})[1]", 0.2) if place == forms["scan"] else place)
