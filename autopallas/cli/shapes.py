"""``--shapes``: parses types of a function's arguments, as JAX prints them: ``f32[8,1024], i32[8]``."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np

from autopallas.cli import CommandError
from autopallas.compat import Dtype, PyTree

__all__ = ["shapes_of"]

_SHORT = {"bf16": "bfloat16", "bool": "bool", "pred": "bool"}
_KINDS = {"f": "float", "i": "int", "s": "int", "u": "uint", "c": "complex"}
_TOKEN = re.compile(r"\s*([A-Za-z_]\w*|\d+|[\[\](){}:,])")
_NESTING = 20
_EXAMPLE = 'write the arguments as in --shapes "f32[8,1024],i32[8]"; (a, b), [a, b] and {name: a} may hold them'


def shapes_of(text: str) -> tuple[PyTree, ...]:
    """Parses the positional arguments that a text describes.

    Args:
      text: array types, separated by commas.  ``f32[]`` is a scalar and ``key[]`` a random key; tuples ``(a, b)``,
        lists ``[a, b]`` and dictionaries ``{name: a}`` nest.

    Returns:
      Pytrees of ``jax.ShapeDtypeStruct``.

    Raises:
      CommandError: the text is something else.

    Example:
      >>> shapes_of("f32[8,1024], {w: bf16[4]}")
      (ShapeDtypeStruct(shape=(8, 1024), dtype=float32), {'w': ShapeDtypeStruct(shape=(4,), dtype=bfloat16)})
    """
    parser = _Parser(text)
    arguments = parser.sequence("")
    return tuple(arguments)


class _Parser:
    """A parser that reads from left to right."""

    def __init__(self, text: str):
        self.text = text
        self.at = 0
        self.depth = 0

    def wrong(self, what: str) -> CommandError:
        return CommandError(f"--shapes {self.text!r}: {what}; {_EXAMPLE}")

    def peek(self) -> str:
        """Returns the next token; an empty text at the end."""
        if not self.text[self.at :].strip():
            return ""
        found = _TOKEN.match(self.text, self.at)
        if not found:
            raise self.wrong(f"{self.text[self.at :].strip()[:1]!r} has no meaning here")
        return found[1]

    def take(self, *wanted: str) -> str:
        token = self.peek()
        if wanted and token not in wanted:
            belongs = " or ".join(w or "the end" for w in wanted)
            raise self.wrong(
                f"there is {token} where {belongs} belongs" if token else f"it ends where {belongs} belongs"
            )
        found = _TOKEN.match(self.text, self.at)
        self.at = found.end() if found else len(self.text)
        return token

    def sequence(self, end: str) -> list[PyTree]:
        """Parses items up to and with ``end``; a comma may follow the last."""
        items: list[PyTree] = []
        while self.peek() != end:
            items.append(self.item())
            if self.peek() != end:
                self.take(",", end)
        self.take(end)
        return items

    def item(self) -> PyTree:
        self.depth += 1
        if self.depth > _NESTING:
            raise self.wrong(f"it nests more than {_NESTING} deep")
        token = self.take()
        result: PyTree
        if token == "(":
            result = tuple(self.sequence(")"))
        elif token == "[":
            result = self.sequence("]")
        elif token == "{":
            result = self.dictionary()
        elif token and (token[0].isalpha() or token[0] == "_"):
            result = self.array(token)
        else:
            raise self.wrong(f"{f'there is {token}' if token else 'it ends'} where an array type belongs")
        self.depth -= 1
        return result

    def dictionary(self) -> dict[str, PyTree]:
        result: dict[str, PyTree] = {}
        while self.peek() != "}":
            name = self.take()
            if not name.isalnum() and not name.isidentifier():
                raise self.wrong(f"there is {name or 'the end'} where the name of an entry belongs")
            if name in result:
                raise self.wrong(f"the entry {name} is there twice")
            self.take(":")
            result[name] = self.item()
            if self.peek() != "}":
                self.take(",", "}")
        self.take("}")
        return result

    def array(self, name: str) -> jax.ShapeDtypeStruct:
        self.take("[")
        sizes = []
        while self.peek() != "]":
            token = self.take()
            if not (token.isascii() and token.isdigit()) or len(token) > 12:
                raise self.wrong(f"{token or 'the end'} is no size")
            sizes.append(int(token))
            if self.peek() != "]":
                self.take(",", "]")
        self.take("]")
        return jax.ShapeDtypeStruct(tuple(sizes), self.dtype(name))

    def dtype(self, name: str) -> Dtype:
        if name == "key":
            key: Dtype = jax.eval_shape(jax.random.key, 0).dtype
            return key
        short = re.fullmatch(r"([a-z])(\d+)", name)
        full = _SHORT.get(name) or (f"{_KINDS[short[1]]}{short[2]}" if short and short[1] in _KINDS else name)
        try:
            dtype = np.dtype(getattr(jnp, full, full))
        except TypeError:
            raise self.wrong(f"no dtype is called {name}") from None
        if not (jnp.issubdtype(dtype, np.number) or dtype == np.bool_):
            raise self.wrong(f"no dtype of arrays is called {name}")
        if jax.dtypes.canonicalize_dtype(dtype) != dtype:
            raise self.wrong(f"{name} needs JAX_ENABLE_X64=1")
        return dtype
