"""``make soak``: train steps of a small model with random signatures, threads, and a cache that vanishes.

Nothing may grow but what JAX compiles for new signatures, no result may be wrong, and at the end kernels still run.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import resource
import shutil
import sys
import tempfile
import threading
import warnings
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["AUTOPALLAS_CACHE_DIR"] = tempfile.mkdtemp(prefix="autopallas-soak-")

import jax
import numpy as np

import autopallas
from autopallas.tuning.probe_cache import ProbeResult, ProbeResults

SIGNATURES = [(batch, length) for batch in (1, 2) for length in (8, 16, 24, 32)]
VOCABULARY, WIDTH, HEADS = 64, 32, 2


def model(parameters, tokens):
    """The loss of a model with one layer of attention, written as the demo's."""
    x = parameters["table"][tokens]
    heads = [(x @ parameters[name]).reshape(*x.shape[:2], HEADS, -1) for name in ("query", "key", "value")]
    scores = jax.numpy.einsum("bqhd,bkhd->bhqk", heads[0], heads[1]) / (WIDTH / HEADS) ** 0.5
    shown = jax.numpy.tril(jax.numpy.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jax.numpy.where(shown, scores, -jax.numpy.inf), axis=-1)
    x = x + jax.numpy.einsum("bhqk,bkhd->bqhd", weights, heads[2]).reshape(x.shape)
    logits = x[:, :-1].reshape(-1, WIDTH) @ parameters["table"].T
    labels = tokens[:, 1:].reshape(-1, 1)
    return jax.numpy.mean(jax.nn.logsumexp(logits, -1) - jax.numpy.take_along_axis(logits, labels, -1)[:, 0])


def step(parameters, tokens):
    loss, gradients = jax.value_and_grad(model)(parameters, tokens)
    return jax.tree.map(lambda p, g: p - 0.1 * g, parameters, gradients), loss


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("error", autopallas.AutopallasWarning)
    numbers = np.random.default_rng(given.seed)
    shapes = dict.fromkeys(("query", "key", "value"), (WIDTH, WIDTH)) | {"table": (VOCABULARY, WIDTH)}
    start = {name: numbers.standard_normal(shape, np.float32) * 0.1 for name, shape in shapes.items()}
    optimized = autopallas.optimize(jax.jit(step), objective="always")
    plain = jax.jit(step)
    tokens = {s: numbers.integers(0, VOCABULARY, s, np.int32) for s in SIGNATURES}
    wanted = {s: jax.tree.map(np.asarray, plain(start, tokens[s])) for s in SIGNATURES}
    cache = Path(os.environ["AUTOPALLAS_CACHE_DIR"])
    left, lock, wrong, peaks = [given.steps], threading.Lock(), [], []

    def work(seed: int) -> None:
        draw = random.Random(seed)
        while True:
            with lock:
                left[0] -= 1
                now = given.steps - left[0]
            if now > given.steps or wrong:
                return
            signature = draw.choice(SIGNATURES)
            try:
                found = optimized(start, tokens[signature])
                # 5e-5: what gradients in float32 may differ by.
                jax.tree.map(
                    lambda f, w: np.testing.assert_allclose(f, w, rtol=5e-5, atol=5e-5), found, wanted[signature]
                )
            except Exception as error:
                wrong.append(f"step {now}, {signature}: {type(error).__name__}: {error}")
            if draw.random() < 0.02:
                shutil.rmtree(cache, ignore_errors=True)
            if draw.random() < 0.02:
                optimized.clear_cache()
            if draw.random() < 0.02:  # so that there is something on disk that can vanish
                ProbeResults.current().put(ProbeResult({"soak": draw.random()}, "works", until=2.0**31))
            if now % max(given.steps // 10, 1) == 0:
                gc.collect()
                with lock:
                    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
                    print(f"step {now}: {peaks[-1]} MiB at most, {len(jax.live_arrays())} arrays", flush=True)

    threads = [threading.Thread(target=work, args=(given.seed + n,)) for n in range(given.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    optimized(start, tokens[SIGNATURES[0]])
    applied = sum(optimized.report().counts().values())
    arrays = len(jax.live_arrays())
    shutil.rmtree(cache, ignore_errors=True)
    print(f"{given.steps} steps, {len(wrong)} wrong, {applied} applied sites at the end, {arrays} arrays alive")
    print("\n".join(wrong))
    steady = len(peaks) < 10 or peaks[-1] - peaks[4] < 0.25 * peaks[4]
    if not steady:
        print(f"memory grew from {peaks[4]} MiB at half the steps to {peaks[-1]} MiB")
    return int(bool(wrong) or applied == 0 or arrays > 200 or not steady)


if __name__ == "__main__":
    sys.exit(main())
