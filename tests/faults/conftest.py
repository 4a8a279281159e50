"""Every test of faults begins like a new process: an empty cache, nothing traced, nothing warned of."""

from __future__ import annotations

import pytest

from tests.faults.programs import forget


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOPALLAS_CACHE_DIR", str(tmp_path / "cache"))
    forget()
    yield tmp_path / "cache"
    monkeypatch.undo()
    forget()
