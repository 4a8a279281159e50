"""Every test of tuning begins with an empty cache, and with kernels that were not traced before."""

from __future__ import annotations

import jax
import pytest

from autopallas.sites.calls import kernel_backward, kernel_forward
from autopallas.tuning.cache import WARNED, Cache


@pytest.fixture(autouse=True)
def user_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_CACHE_DIR", str(tmp_path / "user-cache"))
    kernel_forward.cache_clear()
    kernel_backward.cache_clear()
    WARNED.forget()
    yield Cache(tmp_path / "user-cache")
    kernel_forward.cache_clear()
    kernel_backward.cache_clear()
    WARNED.forget()


_COMPILED = {}


@pytest.fixture
def compiled_once(monkeypatch):
    """Programs that are the same to the letter are compiled once for all tests: that is most of a search's time."""
    genuine = jax.stages.Lowered.compile

    def compile(self, *arguments, **options):
        text = self.as_text()
        if arguments or options or "custom_call" in text:  # a callback is a place in memory
            return genuine(self, *arguments, **options)
        if text not in _COMPILED:
            _COMPILED[text] = genuine(self)
        return _COMPILED[text]

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile)
