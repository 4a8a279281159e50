"""Masks and fills of attention: positions in every dtype, arguments, constants near the limits of their dtypes."""

from __future__ import annotations

from .writing import Writer

__all__ = ["filled", "fills", "mask"]


def _line(w: Writer, at: str, size: int, which: str) -> str:
    """The positions along an axis, [size]."""
    dtypes = ["int32", "float32", "uint8", "int8", "bfloat16", "int16", "uint32", *(["int64"] if w.x64 else [])]
    dtype = w.choices.pick(f"{at}.{which}", dtypes, 0.35)
    if dtype != "int32":
        w.features.add("positions")
    return f"jnp.arange({size}, dtype=jnp.{dtype})"


def mask(w: Writer, at: str, rows: int, keys: int, batch: int = 0) -> str:
    """A boolean expression that broadcasts against [rows, keys] and names no variable of the function it is in."""
    i, j = f"{_line(w, at, rows, 'rows')}[:, None]", f"{_line(w, at, keys, 'keys')}[None, :]"

    def limits() -> str:
        """Both sides shifted to where a float, or the dtype, has no room left."""
        kinds = {
            "int32": ("int32", 2147483600),
            "float24": ("int32", 16777216),
            "uint8": ("uint8", 220),
            "uint32": ("uint32", 4294967200),
            "int8": ("int8", 90),
        }
        if w.x64:
            kinds |= {"int64": ("int64", 2**53), "int64 far": ("int64", 2**62), "uint64": ("uint64", 2**64 - 100)}
            kinds |= {"int64 again": ("int64", 2**53), "negative": ("int64", -(2**53) - 30)}
        dtype, start = w.choices.pick(f"{at}.limit", kinds, 0.85)
        more = w.choices.pick(f"{at}.limit.more", [0, 1, 3], 0.7)
        w.features.add("limits")
        here = f"(jnp.arange({rows}, dtype=jnp.{dtype})[:, None] + jnp.array({start}, jnp.{dtype}))"
        there = f"(jnp.arange({keys}, dtype=jnp.{dtype})[None, :] + jnp.array({start + more}, jnp.{dtype}))"
        return f"({there} <= {here})"

    def constant() -> str:
        """Positions compared with a constant near a limit."""
        kinds = {"255": ("uint8", 255), "-128": ("int8", -128), "int32": ("int32", 2147483647)}
        if w.x64:
            kinds |= {"2**53": ("int64", 2**53 + 1)}
        dtype, value = w.choices.pick(f"{at}.constant", kinds, 0.7)
        w.features.add("limits")
        start = value - keys // 2 if value > 0 else value
        side = w.choices.pick(f"{at}.constant.side", ["<", "<=", "!=", ">="], 0.6)
        line = f"(jnp.arange({keys}, dtype=jnp.{dtype}) + jnp.array({start}, jnp.{dtype}))"
        return f"({line} {side} jnp.array({value}, jnp.{dtype}))[None, :]"

    def argument() -> str:
        dtype = w.choices.pick(f"{at}.argument", ["bool", "float32", "int32", "bfloat16", "uint8"], 0.5)
        empty = w.choices.chance(f"{at}.empty", 0.3)
        w.features |= {"empty rows"} if empty else set()
        name = w.mask("keep", (rows, keys), dtype, empty)
        return name if dtype == "bool" else f"({name} > 0)"

    def padding() -> str:
        length = w.integers("length", (), 0 if w.choices.chance(f"{at}.empty", 0.2) else 1, keys)
        return f"({j} < {length})"

    def both() -> str:
        valid = w.mask("valid", (max(rows, keys),))
        return f"jnp.einsum('i,j->ij', {valid}[:{rows}], {valid}[:{keys}])"

    kinds = {
        "causal": lambda: f"({j} <= {i})",
        "argument": argument,
        "padding": padding,
        "strictly causal": lambda: f"({j} < {i})",
        "window": lambda: f"((({j}) <= ({i})) & ({i} < {j} + 3))",
        "limits": limits,
        "constant": constant,
        "even": lambda: f"(({i} + {j}) % 2 == 0)",
        "random": lambda: f"jax.random.bernoulli(jax.random.key(3), 0.7, ({rows}, {keys}))",
        "of both": both,
        "everything": lambda: f"jnp.ones(({rows}, {keys}), bool)",
        "nothing in a row": lambda: f"(({j} <= {i}) & ({i} != 1))",
        "segments": lambda: _segments(w, rows, keys),
    }
    if w.x64 and w.choices.chance(f"{at}.far", 0.3):
        return limits()
    kind = w.choices.pick(f"{at}.kind", {name: name for name in kinds} | {"limits again": "limits"}, 0.75)
    w.features.add(f"mask: {kind}")
    if kind in ("strictly causal", "nothing in a row"):
        w.features.add("empty rows")
    text = kinds[kind]()
    return f"({text} | {text})" if w.choices.chance(f"{at}.twice", 0.05) else text


def _segments(w: Writer, rows: int, keys: int) -> str:
    name = w.integers("segments", (max(rows, keys),), 0, 2, w.choices.pick("segments", ["int32", "uint8", "int8"]))
    return f"({name}[:{rows}, None] == {name}[None, :{keys}])"


def fills(w: Writer, at: str, dtype: str) -> str:
    """A fill, from -1 to -inf."""
    least = f"jnp.finfo(jnp.{dtype}).min"
    options = ["-1e9", "-jnp.inf", least, "-1e4", "-250.0", "-1.0", "-30.0", "-100.0", "-800.0", "-1e30", "-2.0e38"]
    fill = w.choices.pick(at, options, 0.8)
    w.features.add(f"fill: {fill if fill != least else 'finfo.min'}")
    return fill


def filled(w: Writer, at: str, s: str, rows: int, keys: int, dtype: str) -> str:
    """Scores of which those that do not count are filled."""
    keep, fill = mask(w, at, rows, keys), fills(w, f"{at}.fill", dtype)
    forms = {
        "where": f"jnp.where({keep}, {s}, {fill})",
        "unless": f"jnp.where(~{keep}, {fill}, {s})",
        "added": f"{s} + jnp.where({keep}, 0.0, {fill})",
        "added product": f"{s} + (1.0 - {keep}.astype(jnp.float32)) * {fill if fill != '-jnp.inf' else '-1e9'}",
        "array": f"jnp.where({keep}, {s}, jnp.full_like({s}, {fill}))",
        "typed": f"jnp.where({keep}, {s}, jnp.asarray({fill}, {s}.dtype))",
        "minimum": f"jnp.minimum({s}, jnp.where({keep}, jnp.inf, {fill}))",
        "divided after": f"jnp.where({keep}, {s}, {fill}) / 3.0",
    }
    return w.choices.pick(f"{at}.form", forms, 0.5)
