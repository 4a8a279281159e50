"""Formats places in source code: "file:line (function)", followed by the line of an installed package."""

from __future__ import annotations

__all__ = ["in_package", "scope", "users_place"]

_IN = "), in "


def in_package(place: str, within: str) -> str:
    """Returns the user's place, followed by the place in an installed package to which it led."""
    return f"{place}, in {within}"


def users_place(location: str) -> str:
    """Returns a location without the place in an installed package.

    Example:
      >>> users_place(in_package("train.py:4 (loss)", "flax/linen/linear.py:287 (__call__)"))
      'train.py:4 (loss)'
    """
    own, found, _ = location.partition(_IN)
    return own + ")" if found else location


def scope(operation: str, location: str) -> str:
    """Returns the name that a site has in profiles and in XLA's metadata: no folder, which differs between machines.

    Example:
      >>> scope("attention", "/home/me/model.py:94 (attend)")
      'autopallas/attention/model.py:94'
    """
    place = users_place(location).partition(" (")[0].replace("\\", "/").rpartition("/")[2]
    return "/".join(("autopallas", operation, place)) if place else f"autopallas/{operation}"
