"""Every test of faults begins like a new process: an empty cache, nothing traced, nothing warned of."""

from __future__ import annotations

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.faults.programs import forget

_SETTINGS = {"jax_persistent_cache_min_compile_time_secs": 0.0, "jax_persistent_cache_min_entry_size_bytes": -1}


@pytest.fixture(autouse=True, scope="module")
def compiled_once(tmp_path_factory):
    """What XLA has compiled stays on disk from one "process" to the next, which is most of the time of these tests."""
    before = {name: getattr(jax.config, name) for name in (*_SETTINGS, "jax_compilation_cache_dir")}
    for name, value in _SETTINGS.items():
        jax.config.update(name, value)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.getbasetemp() / "compiled"))
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    monkeypatch.undo()
    forget()
