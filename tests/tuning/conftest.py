"""Every test of tuning begins with an empty cache, and with kernels that were not traced before."""

from __future__ import annotations

import pytest

from autopallas.kernels.run import kernel_backward, kernel_forward
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
