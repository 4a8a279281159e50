"""Random convolutions of layers within programs: volumes, in loops and branches, and with zeros between elements."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from .writing import Writer

__all__ = ["looped_convolution", "spread", "volumes"]


def _weighted(w: Writer, x: str, given: str, batch: int, rank: int) -> str:
    """``x``, and for each example a sum of what was computed, each element of it with a weight of its own."""
    own = w.set("own", f"{given}.astype(jnp.float32)")
    axes = ", ".join(str(axis) for axis in range(rank) if axis != batch)
    total = f"({own} * jnp.cos(jnp.arange(1.0 * {own}.size)).reshape({own}.shape)).sum(({axes},))"
    return f"{x} + (0.1 * {total})[:, None, None].astype({x}.dtype)"


def _shuffled(w: Writer, name: str, usual: str, often: float) -> str:
    """The letters of axes in one of the usual orders, or in any."""
    orders = {"last": usual, "first": usual[0] + usual[-1] + usual[1:-1], "any": ""}
    order = w.choices.pick(name, orders, often)
    letters = list(usual)
    random.Random(f"{w.choices.seed}/{name}").shuffle(letters)
    return order or "".join(letters)


def _reads(w: Writer, at: str, lengths: Mapping[str, int], window: Mapping[str, int], keeps: bool) -> str:
    """Strides, padding and dilations by which a window reads; those that keep the lengths, if that is asked for.

    Both have their axes of space by letter, in the order of the window's.
    """
    c = w.choices
    strides, padding, before, between = [], [], [], []
    for n, taps in window.items():
        length = lengths[n]
        apart = c.pick(f"{at}.dilation {n}", [1, 2], 0.25)
        low, high = (c.pick(f"{at}.{side} {n}", [1, 0, 2, -1], 0.6) for side in ("low", "high"))
        reach, spread, stride = (taps - 1) * apart + 1, 1, 1
        if keeps:
            high = reach - 1 - low
        else:
            stride = c.pick(f"{at}.stride {n}", [1, 2, 3], 0.35)
            spread = c.pick(f"{at}.inserted {n}", [1, 2, 3], 0.25)
            high = max(high, reach - (length - 1) * spread - 1 - low)  # at least one element is left
        strides.append(stride)
        padding.append((low, high))
        before.append(spread)
        between.append(apart)
    return f"{tuple(strides)}, {padding}, {tuple(before)}, {tuple(between)}"


def volumes(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Convolves volumes of 12 to 30 numbers for each element, with axes in any order."""
    c = w.choices
    plane = tuple(c.pick(f"{at}.length {n}", [4, 3, 5], 0.5) for n in range(2))
    lengths = dict(zip("DHW", (size["t"], *plane), strict=True))
    window = {n: c.pick(f"{at}.window {n}", [3, 2, 1, 4], 0.5) for n in "DHW"}
    groups = c.pick(f"{at}.groups", [1, 2], 0.1)
    dtype = c.pick(f"{at}.dtype", ["jnp.float32", f"{x}.dtype"], 0.2)
    sizes = window | {"I": size["d"] // groups, "O": groups * c.pick(f"{at}.results", [4, 1, 3], 0.5)}
    image, out = (_shuffled(w, f"{at}.{name}", "NDHWC", 0.6) for name in ("image", "out"))
    kernel = _shuffled(w, f"{at}.kernel", "DHWIO", 0.5)
    reach = {n: window[n] for n in kernel if n in window}
    weights = w.normal("w", tuple(sizes[letter] for letter in kernel), "float32", 0.5)
    numbers = f"jnp.cos(jnp.arange({math.prod(plane)}.0)).reshape({(*plane, 1)}).astype({dtype})"
    volume = w.set("volume", f"{x}.astype({dtype})[:, :, None, None] * {numbers}")
    turned = tuple("NDHWC".index(letter) for letter in image)
    precision = c.pick(f"{at}.precision", ["None", "'highest'"], 0.1)
    given = w.set(
        "given",
        f"lax.conv_general_dilated({volume}.transpose({turned}), {weights}.astype({dtype}), "
        f"{_reads(w, at, lengths, reach, False)}, {(image, kernel, out)}, {groups}, "
        f"precision={precision})",
    )
    return _weighted(w, x, given, out.index("N"), 5)


def looped_convolution(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Convolves in the steps of a loop, or in a branch, what it carries, or one example after the other."""
    c, d = w.choices, size["d"]
    rank = c.pick(f"{at}.axes", [1, 2, 3], 0.5)
    place = c.pick(f"{at}.place", ["map", "scan", "fori", "while", "branch", "descent"], 0.8)
    keeps = place in ("scan", "fori", "while")
    space = "DHW"[:rank]
    lengths = dict(zip("DHW", (size["t"], 4, 3), strict=True))
    window = {n: c.pick(f"{at}.window {n}", [3, 1, 2], 0.5) for n in space}
    groups = c.pick(f"{at}.groups", {"one": 1, "two": 2, "each": d}, 0.25)
    results = d if keeps else groups * c.pick(f"{at}.results", [2, 1, 4], 0.5)
    image = _shuffled(w, f"{at}.image", f"N{space}C", 0.7)
    out = image if keeps else _shuffled(w, f"{at}.out", f"N{space}C", 0.7)
    kernel = _shuffled(w, f"{at}.kernel", f"{space}IO", 0.5)
    sizes = window | {"I": d // groups, "O": results}
    weights = w.normal("w", tuple(sizes[letter] for letter in kernel), "float32", 0.5)
    plane = tuple(lengths[n] for n in space[1:])
    numbers = f"jnp.cos(jnp.arange({math.prod(plane)}.0)).reshape({(*plane, 1)}).astype({x}.dtype)"
    turned = tuple(f"N{space}C".index(letter) for letter in image)
    ones = ", None" * (rank - 1)
    images = w.set("images", f"({x}[:, :{ones}] * {numbers}).transpose({turned})")
    reads = _reads(w, at, lengths, {n: window[n] for n in kernel if n in window}, keeps)
    with w.block(f"def convolved(x, w={weights}):"):
        w.line(
            f"return lax.conv_general_dilated(x, w.astype(x.dtype), {reads}, {(image, kernel, out)}, "
            f"feature_group_count={groups})"
        )
    w.features.add(f"looped convolution: {place}")
    axis = image.index("N")
    forms = {
        "map": f"lax.map(lambda x: convolved(jnp.expand_dims(x, {axis})), jnp.moveaxis({images}, {axis}, 0))",
        "scan": f"lax.scan(lambda h, a: (lambda h: (h, h))((jnp.tanh(convolved(h)) + a * {images}).astype(h.dtype)), "
        f"{images}, jnp.array([1.0, -0.5, 0.2], {x}.dtype))[1]",
        "fori": f"lax.fori_loop(0, 3, lambda i, h: jnp.tanh(convolved(h)) - h, {images})",
        "while": f"lax.fori_loop(0, 2 + ({ids}.sum() > 5), lambda i, h: h - "
        f"jnp.tanh(convolved(h, lax.stop_gradient({weights}))), lax.stop_gradient({images}))",
        "branch": f"lax.cond({ids}.sum() > 5, convolved, lambda x: 2 * convolved(jnp.sin(x)), {images})",
        "descent": f"lax.scan(lambda w, a: ((w - 0.1 * a * jax.grad(lambda w: jnp.sin(convolved({images}, w)).astype("
        f"jnp.float32).mean())(w)), None), {weights}, jnp.array([1.0, -0.5], jnp.float32))[0]",
    }
    given = w.set("given", forms[place])
    if place == "descent":
        return (
            f"{x} + ({given} * jnp.cos(jnp.arange(1.0 * {given}.size)).reshape({given}.shape)).sum().astype({x}.dtype)"
        )
    axes, batch = (rank + 3, 0) if place == "map" else (rank + 3, axis + 1) if place == "scan" else (rank + 2, None)
    return _weighted(w, x, given, out.index("N") if batch is None else batch, axes)


def spread(w: Writer, at: str, size: dict[str, int], x: str, ids: str) -> str:
    """Convolves the sequence, or planes of it, with zeros between its elements, or takes the gradient of what a strided
    convolution reads."""
    c = w.choices
    space = c.pick(f"{at}.axes", ["W", "HW"], 0.5)
    lengths = dict(zip("WH", (size["t"], 3), strict=True))
    window = {n: c.pick(f"{at}.window {n}", [4, 3, 5, 2, 7], 0.4) for n in space}
    apart = {n: c.pick(f"{at}.apart {n}", [2, 3, 1, 4], 0.5) for n in space}
    image, out = (_shuffled(w, f"{at}.{name}", f"N{space}C", 0.6) for name in ("image", "out"))
    kernel = _shuffled(w, f"{at}.kernel", f"{space}IO", 0.5)
    sizes = window | {"I": size["d"], "O": c.pick(f"{at}.results", [5, 6, 3], 0.6)}
    weights = w.normal("w", tuple(sizes[letter] for letter in kernel), "float32", 0.5)
    ones = ", None" * (len(space) - 1)
    planes = " * jnp.cos(jnp.arange(3.0))[:, None, None]" if ones else ""
    given = w.set("given", f"({x}[:{ones}]{planes}).astype(jnp.float32)")
    turned = tuple(f"N{space}C".index(letter) for letter in image)
    order = [n for n in kernel if n in space]
    padding = []
    for n in order:
        low, high = (c.pick(f"{at}.{side} {n}", [1, 0, 3, -1, 6], 0.6) for side in ("low", "high"))
        padding.append((low, max(high, window[n] - (lengths[n] - 1) * apart[n] - 1 - low)))  # something is left
    result = w.set(
        "spread",
        f"lax.conv_general_dilated({given}.transpose({turned}), {weights}, {(1,) * len(space)}, {padding}, "
        f"{tuple(apart[n] for n in order)}, None, {(image, kernel, out)})",
    )
    return _weighted(w, x, result, out.index("N"), len(space) + 2)
