"""Lockfiles: they decide what runs, read the same everywhere, and are believed only as far as data can be."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import CPU, attend, attend_all, gradient, match_of, qkv

import autopallas
from autopallas.autotune.tuner import Tuner
from autopallas.errors import AutopallasWarning, OptionError
from autopallas.kernels.attention import xla
from autopallas.kernels.attention.block_sizes import BlockSizes
from autopallas.options import resolve
from autopallas.plan.choose_implementation import plan
from autopallas.sites.operation import Unsupported
from autopallas.tuning.lock import Lock, LockError, identity, written

SMALL = {"query_block": 40, "key_block": 48}


def locked(function, *operands, folder="/", **options) -> Lock:
    """The lock of a function with one site, as the command writes it."""
    resolved = resolve({"objective": "always"} | options)
    match = match_of(function, *operands)
    decisions = plan([match], CPU, resolved, Tuner(CPU, resolved))
    return written([match], decisions, "places:attend", "", CPU, folder)


def with_sizes(lock: Lock, **sizes) -> Lock:
    return replace(lock, sites=tuple(replace(site, block_sizes=sizes or SMALL) for site in lock.sites))


@pytest.fixture
def file(tmp_path):
    """Writes a lock into a file and gives its path."""

    def write(lock, name="sites.lock"):
        path = tmp_path / name
        path.write_text(lock if isinstance(lock, str) else lock.to_json())
        return path

    return write


def site_of(function, *operands, **options):
    optimized = autopallas.optimize(function, **options)
    optimized.trace(*operands)
    (site,) = optimized.report().sites
    return site, optimized.report()


# --- what a lock decides ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [attend, gradient])
def test_a_lock_decides_without_evidence_and_without_a_search(file, monkeypatch, function):
    operands = qkv()
    lock = with_sizes(locked(function, *operands))
    monkeypatch.setattr(Tuner, "choose", lambda *_: pytest.fail("a lock leaves nothing to choose"))
    optimized = autopallas.optimize(function, lock=file(lock), autotune=True, strict=True)
    results = jax.tree.leaves(optimized(*operands))
    (site,) = optimized.report().sites
    assert (site.verdict, site.implementation, site.block_sizes_from) == ("applied", "xla", "explicit")
    assert site.block_sizes == SMALL
    assert "sites.lock" in site.reason
    assert optimized.report().tuning == {"searches": 0, "cache_hits": 0}
    precise = jax.jit(function)(*(x.astype(jnp.float32) for x in operands))
    for found, expected in zip(results, jax.tree.leaves(precise), strict=True):
        assert np.abs(np.float32(found) - expected).max() < 1e-2 * np.abs(expected).max()  # float16's, for gradients


def test_a_site_that_the_lock_keeps_or_does_not_have_stays_as_it_was(file):
    operands = qkv(600, "float32")
    assert site_of(attend, *operands)[0].verdict == "applied", "the table alone would apply it"
    path = file(replace(locked(attend_all, *operands)))
    site, _ = site_of(attend, *operands, lock=path)
    assert (site.verdict, site.block_sizes) == ("kept", None)
    assert "has no such site" in site.reason
    lock = locked(attend, *qkv(), objective="time")
    assert lock.sites[0].verdict == "kept"
    site, _ = site_of(attend, *qkv(), lock=file(lock), objective="always")
    assert site.verdict == "kept"
    assert lock.sites[0].reason in site.reason


def test_moved_code_is_still_locked_and_other_sizes_are_not(file):
    path = file(locked(attend, *qkv()))

    def moved(query, key, value):
        scores = jnp.einsum("td,sd->ts", query, key) / 8
        shown = jnp.tril(jnp.ones(scores.shape, bool))
        return jax.nn.softmax(jnp.where(shown, scores, -jnp.inf), axis=-1) @ value

    assert site_of(moved, *qkv(), lock=path)[0].verdict == "applied"
    assert site_of(moved, *qkv(201), lock=path)[0].verdict == "kept"
    assert site_of(moved, *qkv(dtype="bfloat16"), lock=path)[0].verdict == "kept"


def test_a_lock_of_another_device_applies_nothing(file):
    lock = replace(locked(attend, *qkv()), platform="gpu", device_kind="NVIDIA H100")
    site, _ = site_of(attend, *qkv(), lock=file(lock))
    assert site.verdict == "kept"
    assert "NVIDIA H100" in site.reason


def test_an_implementation_asked_for_by_name_wins_over_the_lock(file):
    path = file(with_sizes(locked(attend, *qkv())))
    site, _ = site_of(attend, *qkv(), lock=path, implementation="reference")
    assert (site.implementation, site.verdict) == ("reference", "applied")


def test_an_implementation_that_the_site_has_outgrown_leaves_the_original(file, monkeypatch):
    path = file(locked(attend, *qkv()))
    monkeypatch.setattr(xla, "supports", lambda spec, device: Unsupported("too old"))
    site, _ = site_of(attend, *qkv(), lock=path)
    assert site.verdict == "kept"
    assert site.attempts == (("xla", "supports", "too old"),)


def test_block_sizes_that_are_none_leave_the_original(file):
    lock = with_sizes(locked(attend, *qkv()), rows_block=8)
    site, _ = site_of(attend, *qkv(), lock=file(lock))
    assert site.verdict == "kept"
    assert site.attempts[0][:2] == ("xla", "trace")


def test_absurd_block_sizes_are_made_valid(file):
    lock = with_sizes(locked(attend, *qkv()), query_block=2**31 - 1, key_block=1)
    site, _ = site_of(attend, *qkv(), lock=file(lock), strict=True)
    assert site.block_sizes == BlockSizes(2**31 - 1, 1).fitted(match_of(attend, *qkv()).spec).to_dict()


def test_fuel_still_limits_what_is_applied(file):
    assert site_of(attend, *qkv(), lock=file(locked(attend, *qkv())), fuel=0)[0].verdict == "kept"


@pytest.mark.parametrize("content", [None, "", "{}", '{"autopallas_lock": 99}', "\x00" * 50])
def test_a_file_that_is_no_lock_is_an_error_that_names_it(file, tmp_path, content):
    path = tmp_path / "absent.lock" if content is None else file(content)
    with pytest.raises(OptionError, match=str(path)):
        site_of(attend, *qkv(), lock=path)


# --- the file --------------------------------------------------------------------------------------------------------


def test_equal_programs_give_equal_files_and_a_file_reads_back():
    first, second = locked(gradient, *qkv()), locked(gradient, *qkv())
    assert first.to_json() == second.to_json()
    assert Lock.from_json(first.to_json()) == first
    assert first.sites[0].direction == "forward+backward"
    assert "python" not in first.versions


def test_evidence_is_written_down_and_reported(file):
    operands = qkv(600, "float32")
    lock = locked(attend, *operands, objective="time")
    site, _ = site_of(attend, *operands, lock=file(lock))
    assert site.measured == lock.sites[0].evidence == site_of(attend, *operands)[0].measured


def test_the_identity_of_a_site_is_all_that_it_computes():
    operands = qkv()
    sites = [
        (attend, operands),
        (attend_all, operands),
        (gradient, operands),
        (attend, qkv(201)),
        (attend, qkv(keys=240)),
    ]
    sites += [(lambda q, k, v: attend(2 * q, k, v), operands), (attend, qkv(dtype="float32"))]
    assert len({identity(match_of(function, *x)) for function, x in sites}) == len(sites) - 1
    twice = identity(match_of(sites[5][0], *operands))
    assert twice == identity(match_of(attend, *operands)), "the factor is outside of the site"


def damaged(text: str, number: int) -> bytes:
    """A lockfile with something in it replaced by something else."""
    draw = random.Random(number)
    data = json.loads(text)
    values = [None, True, -1, 0, 1e308, 10**30, "", "\x1b[2J", "x" * 5000, [], {}, [[]], {"a": 1}]
    place = data
    while True:
        key = draw.choice(list(place) if isinstance(place, dict) else range(len(place)))
        if isinstance(place[key], (dict, list)) and place[key] and draw.random() < 0.8:
            place = place[key]
            continue
        if draw.random() < 0.2:
            del place[key]
        else:
            place[key] = draw.choice(values)
        return json.dumps(data).encode()


def test_damaged_files_are_refused_or_harmless(file):
    operands = qkv(300, "float32")
    text = locked(attend, *operands, objective="time").to_json()
    refused = 0
    for number in range(60):
        try:
            lock = Lock.from_json(damaged(text, number))
        except LockError:
            refused += 1
            continue
        site, report = site_of(attend, *operands, lock=file(lock))
        assert site.verdict in ("applied", "kept")
        assert not report.failures
    assert 20 < refused < 60


@pytest.mark.parametrize("figure", [0, -1.0, 1e999, True, "3"])
def test_times_with_which_nothing_can_be_compared_are_refused(figure):
    data = json.loads(locked(attend, *qkv(300, "float32"), objective="time").to_json())
    evidence = {"kernel_us": figure, "original_us": 2.0, "kernel_bytes": 0, "original_bytes": 0}
    data["sites"][0]["evidence"] = evidence | {"evidence": "measured", "date": "2026-01-01", "versions": "jax 0.12.0"}
    with pytest.raises(LockError, match=r"evidence.kernel_us is .*, not a (time|number)|Infinity"):
        Lock.from_json(json.dumps(data))


def test_random_bytes_and_cut_off_files_are_refused():
    whole = locked(attend, *qkv()).to_json().encode()
    draw = random.Random(0)
    for _ in range(100):
        with pytest.raises(LockError):
            Lock.from_json(whole[: draw.randrange(len(whole) - 3)])
        with pytest.raises(LockError):
            Lock.from_json(draw.randbytes(draw.randrange(200)))
    with pytest.raises(LockError):
        Lock.from_json(b"[" * 100_000)


def test_a_lock_is_no_reason_for_a_warning(file, recwarn):
    site_of(attend, *qkv(), lock=file(locked(attend, *qkv())))
    assert not [w for w in recwarn if issubclass(w.category, AutopallasWarning)]
