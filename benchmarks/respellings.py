"""``python -m benchmarks respellings``: models as people write them, before and after respelling, by default options.

A ratio of 3 says that the original takes 3 times the processor time, by the median of ratios that are formed within
rounds.  The first step is tracing, compiling and one run, in processor seconds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import autopallas
from autopallas.tuning import measure
from benchmarks import environment
from benchmarks.recurrent_models import Arrays, Model, mamba2, rwkv6

RESULTS = Path(__file__).parent / "results" / "respellings-cpu.json"

_KEY = jax.random.key(0)


def _weights(**shapes: tuple[int, ...]) -> Arrays:
    keys = jax.random.split(_KEY, len(shapes))
    return {
        name: jax.random.normal(key, shape) / max(1, int(jnp.prod(jnp.array(shape[:-1])))) ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def _conv(x: jax.Array, w: jax.Array, groups: int = 1, stride: int = 1) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
    )


def _norm(x: jax.Array) -> jax.Array:
    mean = jnp.mean(x, (0, 1, 2), keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.var(x, (0, 1, 2), keepdims=True) + 1e-5)


def mobilenet() -> tuple[Model, Arrays, jax.Array]:
    """Four inverted residual blocks (Sandler et al., 2018, arXiv:1801.04381)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(4):
        shapes |= {f"up{i}": (1, 1, 32, 192), f"mid{i}": (3, 3, 1, 192), f"down{i}": (1, 1, 192, 32)}

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        for i in range(4):
            y = jnp.clip(_norm(_conv(x, w[f"up{i}"])), 0, 6)
            y = jnp.clip(_norm(_conv(y, w[f"mid{i}"], 192)), 0, 6)
            x = x + _norm(_conv(y, w[f"down{i}"]))
        return x

    return model, _weights(**shapes), jax.random.normal(_KEY, (4, 28, 28, 32))


def convnext() -> tuple[Model, Arrays, jax.Array]:
    """Three blocks (Liu et al., 2022, arXiv:2201.03545)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        shapes |= {f"mid{i}": (7, 7, 1, 192), f"up{i}": (192, 768), f"down{i}": (768, 192)}

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        for i in range(3):
            y = _conv(x, w[f"mid{i}"], 192)
            y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
            x = x + jax.nn.gelu(y @ w[f"up{i}"]) @ w[f"down{i}"]
        return x

    return model, _weights(**shapes), jax.random.normal(_KEY, (2, 28, 28, 192))


def resnext() -> tuple[Model, Arrays, jax.Array]:
    """Two blocks of 32 groups (Xie et al., 2017, arXiv:1611.05431)."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(2):
        shapes |= {f"up{i}": (1, 1, 256, 128), f"mid{i}": (3, 3, 4, 128), f"down{i}": (1, 1, 128, 256)}

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        for i in range(2):
            y = jax.nn.relu(_norm(_conv(x, w[f"up{i}"])))
            y = jax.nn.relu(_norm(_conv(y, w[f"mid{i}"], 32)))
            x = jax.nn.relu(x + _norm(_conv(y, w[f"down{i}"])))
        return x

    return model, _weights(**shapes), jax.random.normal(_KEY, (2, 28, 28, 256))


def mamba() -> tuple[Model, Arrays, jax.Array]:
    """A block with a causal convolution and an associative scan (Gu and Dao, 2023, arXiv:2312.00752)."""
    width, state = 256, 16

    def combine(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        u, gate = jnp.split(x @ w["in"], 2, -1)
        numbers = ("NWC", "WIO", "NWC")
        u = lax.conv_general_dilated(u, w["conv"], (1,), [(3, 0)], dimension_numbers=numbers, feature_group_count=width)
        u = jax.nn.silu(u)
        step = jax.nn.softplus(u @ w["step"])
        a = jnp.exp(-step[..., None] * jnp.exp(w["a"]))
        b = (step * u)[..., None] * (u @ w["b"])[..., None, :]
        h = lax.associative_scan(combine, (a, b), axis=1)[1]
        y = jnp.einsum("btdn,btn->btd", h, u @ w["c"])
        return (y * jax.nn.silu(gate)) @ w["out"]

    weights = _weights(
        **{"in": (128, 2 * width), "conv": (4, 1, width), "step": (width, width), "a": (width, state)},
        b=(width, state),
        c=(width, state),
        out=(width, 128),
    )
    return model, weights, jax.random.normal(_KEY, (2, 1024, 128))


def selective() -> tuple[Model, Arrays, jax.Array]:
    """A selective scan by ``lax.scan``, of slices that are expanded before it, as most ports of Mamba have it."""
    width, state = 256, 16

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        u = jax.nn.silu(x @ w["in"])
        dt = jax.nn.softplus(u @ w["step"])
        decay = jnp.exp(jnp.einsum("btd,dn->btdn", dt, -jnp.exp(w["a"])))
        given = jnp.einsum("btd,btn,btd->btdn", dt, u @ w["b"], u)

        def step(h: jax.Array, own: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
            h = own[0] * h + own[1]
            return h, jnp.einsum("bdn,bn->bd", h, own[2])

        slices = tuple(jnp.moveaxis(y, 1, 0) for y in (decay, given, u @ w["c"]))
        ys = lax.scan(step, jnp.zeros_like(given[:, 0]), slices)[1]
        return jnp.moveaxis(ys, 0, 1) @ w["out"]

    weights = _weights(
        **{"in": (128, width), "step": (width, width), "a": (width, state)},
        b=(width, state), c=(width, state), out=(width, 128),
    )  # fmt: skip
    return model, weights, jax.random.normal(_KEY, (2, 512, 128))


def embedding() -> tuple[Model, Arrays, jax.Array]:
    """Rows of a table by a product with one-hot rows."""

    def model(w: Arrays, ids: jax.Array) -> jax.Array:
        return jax.nn.one_hot(ids.astype(jnp.int32), 8192) @ w["table"]

    return model, _weights(table=(8192, 512)), jax.random.randint(_KEY, (1024,), 0, 8192).astype(jnp.float32)


def sampler() -> tuple[Model, Arrays, jax.Array]:
    """The smallest probability kept by top-p sampling, and the likeliest token."""

    def model(w: Arrays, logits: jax.Array) -> jax.Array:
        probabilities = jnp.sort(jax.nn.softmax(logits * w["scale"]), -1)[:, ::-1]
        kept = jnp.cumsum(probabilities, -1) - probabilities < 0.9
        return jnp.where(kept, probabilities, 1).min(-1) + jnp.argmax(logits, -1)

    return model, {"scale": jnp.ones(())}, jax.random.normal(_KEY, (16, 50257))


def pooled() -> tuple[Model, Arrays, jax.Array]:
    """Convolutions with averages over windows of 2 by 2 between them, channels first."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        for name in ("first", "second"):
            numbers = ("NCHW", "HWIO", "NCHW")
            y = jax.nn.relu(lax.conv_general_dilated(x, w[name], (1, 1), "SAME", dimension_numbers=numbers))
            x = lax.reduce_window(y, 0.0, lax.add, (1, 1, 2, 2), (1, 1, 2, 2), "VALID") / 4
        return x

    weights = _weights(first=(3, 3, 32, 64), second=(3, 3, 64, 64))
    return model, weights, jax.random.normal(_KEY, (4, 32, 64, 64))


def running() -> tuple[Model, Arrays, jax.Array]:
    """A layer of running means over the steps, as in causal averages."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        means = jnp.cumsum(x @ w["in"], 1) / jnp.arange(1, x.shape[1] + 1)[:, None]
        return jnp.tanh(means) @ w["out"]

    return model, _weights(**{"in": (64, 256), "out": (256, 64)}), jax.random.normal(_KEY, (4, 1024, 64))


def quantile() -> tuple[Model, Arrays, jax.Array]:
    """Features scaled by their medians over the batch, as in robust standardization."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        y = x @ w["in"]
        middle = jnp.median(lax.stop_gradient(y), 1, keepdims=True)
        spread = jnp.median(jnp.abs(lax.stop_gradient(y) - middle), 1, keepdims=True)
        return (y - middle) / (spread + 1e-3)

    return model, _weights(**{"in": (64, 4096)}), jax.random.normal(_KEY, (64, 64))


def recurrent() -> tuple[Model, Arrays, jax.Array]:
    """A recurrent layer as a loop that reads x[i] and writes y[i]."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        given = x @ w["in"]

        def step(i: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            h, y = carried
            h = jnp.tanh(given[i] + h @ w["state"])
            return h, y.at[i].set(h)

        first = jnp.zeros((x.shape[1], 64)), jnp.zeros((*x.shape[:2], 64))
        return lax.fori_loop(0, x.shape[0], step, first)[1]

    return model, _weights(**{"in": (64, 64), "state": (64, 64)}), jax.random.normal(_KEY, (512, 8, 64))


def cells() -> tuple[Model, Arrays, jax.Array]:
    """An LSTM in bfloat16."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        def step(carried: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            h, c = carried
            i, f, g, o = jnp.split(x @ w["in"] + h @ w["state"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        first = jnp.zeros_like(x[0])
        return lax.scan(step, (first, first), x)[1].astype(jnp.float32)

    w = {name: x.astype(jnp.bfloat16) for name, x in _weights(**{"in": (64, 256), "state": (64, 256)}).items()}
    return model, w, jax.random.normal(_KEY, (512, 16, 64), jnp.bfloat16)


def generation() -> tuple[Model, Arrays, jax.Array]:
    """Two layers that attend to caches of keys and values in bfloat16, for one token after the other."""
    layers, heads, size, length = 2, 8, 64, 512
    width = heads * size

    def attended(
        w: jax.Array, x: jax.Array, i: jax.Array, caches: list[jax.Array]
    ) -> tuple[jax.Array, list[jax.Array]]:
        query, *new = (x @ w).reshape(3, x.shape[0], heads, size)
        keys, values = caches = [cache.at[:, :, i].set(own) for cache, own in zip(caches, new, strict=True)]
        scores = jnp.einsum("bhd,bhsd->bhs", query, keys).astype(jnp.float32) / size**0.5
        weights = jax.nn.softmax(jnp.where(jnp.arange(length) <= i, scores, -1e9)).astype(x.dtype)
        return jnp.einsum("bhs,bhsd->bhd", weights, values).reshape(x.shape), caches

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        def step(carried: tuple[jax.Array, list[list[jax.Array]]], i: jax.Array) -> tuple[Any, jax.Array]:
            x, caches = carried
            for layer in range(layers):
                read, caches[layer] = attended(w[f"in{layer}"], x, i, caches[layer])
                x = jnp.tanh(x + read @ w[f"out{layer}"])
            return (x, caches), x

        caches = [[jnp.zeros((x.shape[0], heads, length, size), x.dtype)] * 2 for _ in range(layers)]
        return lax.scan(step, (x, caches), jnp.arange(length))[1].astype(jnp.float32)

    shapes: dict[str, tuple[int, ...]] = {f"in{i}": (3, width, width) for i in range(layers)}
    shapes |= {f"out{i}": (width, width) for i in range(layers)}
    w = {name: x.astype(jnp.bfloat16) for name, x in _weights(**shapes).items()}
    return model, w, jax.random.normal(_KEY, (1, width), jnp.bfloat16)


def dropped() -> tuple[Model, Arrays, jax.Array]:
    """Three residual layers with dropout, whose key depends on the batch."""

    def dropout(key: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        key = jax.random.key((1000 * x[0, 0, 0]).astype(jnp.int32))
        for i in range(3):
            inner, outer = jax.random.split(jax.random.fold_in(key, i))
            x = x + dropout(outer, jax.nn.gelu(dropout(inner, x @ w[f"up{i}"])) @ w[f"down{i}"])
        return x

    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        shapes |= {f"up{i}": (256, 1024), f"down{i}": (1024, 256)}
    return model, _weights(**shapes), jax.random.normal(_KEY, (4, 256, 256))


def walks() -> tuple[Model, Arrays, jax.Array]:
    """Random walks that split their key in each of 1,000 steps."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        def step(carried: tuple[jax.Array, jax.Array], _: None) -> tuple[tuple[jax.Array, jax.Array], None]:
            key, x = carried
            key, own = jax.random.split(key)
            return (key, x + w["scale"] * jax.random.normal(own, x.shape)), None

        first = jax.random.key((1000 * x[0]).astype(jnp.int32)), x
        (_, last), _ = lax.scan(step, first, None, length=1000)
        return last

    return model, {"scale": jnp.ones(())}, jax.random.normal(_KEY, (256,))


def generator() -> tuple[Model, Arrays, jax.Array]:
    """Transposed convolutions from 4 x 4 to 32 x 32 (Radford et al., 2015, arXiv:1511.06434)."""
    widths = (256, 128, 64, 3)

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        for i in range(3):
            x = lax.conv_transpose(x, w[f"w{i}"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jax.nn.relu(_norm(x)) if i < 2 else jnp.tanh(x)
        return x

    weights = _weights(**{f"w{i}": (4, 4, widths[i], widths[i + 1]) for i in range(3)})
    return model, weights, jax.random.normal(_KEY, (32, 4, 4, widths[0]))


def residual() -> tuple[Model, Arrays, jax.Array]:
    """A stem with max pooling and two bottlenecks (He et al., 2015, arXiv:1512.03385)."""
    shapes: dict[str, tuple[int, ...]] = {"stem": (7, 7, 3, 64), "wide": (1, 1, 64, 256)}
    for i in range(2):
        shapes |= {f"up{i}": (1, 1, 256, 64), f"mid{i}": (3, 3, 64, 64), f"down{i}": (1, 1, 64, 256)}

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        y = jax.nn.relu(_norm(_conv(x, w["stem"], stride=2)))
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        x = _norm(_conv(y, w["wide"]))
        for i in range(2):
            y = jax.nn.relu(_norm(_conv(x, w[f"up{i}"])))
            y = jax.nn.relu(_norm(_conv(y, w[f"mid{i}"])))
            x = jax.nn.relu(x + _norm(_conv(y, w[f"down{i}"])))
        return x

    return model, _weights(**shapes), jax.random.normal(_KEY, (4, 128, 128, 3))


def neighbours() -> tuple[Model, Arrays, jax.Array]:
    """Weights of a Gaussian kernel between rows and centres, on request."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        return jnp.exp(-((x[:, None] - w["centres"]) ** 2).sum(-1) / 64) @ w["values"]

    return model, _weights(centres=(512, 64), values=(512, 8)), jax.random.normal(_KEY, (1024, 64))


def kinematics() -> tuple[Model, Arrays, jax.Array]:
    """Positions of seven joints of an arm, for many configurations, by products of rigid transforms."""
    joints = 7

    def model(w: Arrays, angles: jax.Array) -> jax.Array:
        c, s = jnp.cos(angles), jnp.sin(angles)
        zero, one = jnp.zeros_like(c), jnp.ones_like(c)
        rows = [
            [c, -s, zero, zero + w["offset"][:, 0]],
            [s * jnp.cos(w["twist"]), c * jnp.cos(w["twist"]), zero - jnp.sin(w["twist"]), zero + w["offset"][:, 1]],
            [s * jnp.sin(w["twist"]), c * jnp.sin(w["twist"]), zero + jnp.cos(w["twist"]), zero + w["offset"][:, 2]],
            [zero, zero, zero, one],
        ]
        transforms = jnp.stack([jnp.stack(row, -1) for row in rows], -2)
        pose, positions = transforms[:, 0], []
        for joint in range(1, joints):
            pose = pose @ transforms[:, joint]
            positions.append(pose[:, :3, 3])
        return jnp.stack(positions, 1)

    return model, _weights(twist=(joints,), offset=(joints, 3)), jax.random.normal(_KEY, (4096, joints))


def kalman() -> tuple[Model, Arrays, jax.Array]:
    """Extended Kalman filters of four states and two measurements, for many sequences."""

    def model(w: Arrays, measured: jax.Array) -> jax.Array:
        def move(x: jax.Array) -> jax.Array:
            return x + 0.1 * jnp.tanh(w["move"] @ x)

        def see(x: jax.Array) -> jax.Array:
            return jnp.sin(w["see"] @ x)

        def step(carried: tuple[jax.Array, jax.Array], z: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            x, covariance = carried
            slope = jax.jacfwd(move)(x)
            x, covariance = move(x), slope @ covariance @ slope.T + 0.1 * jnp.eye(4)
            slope = jax.jacfwd(see)(x)
            (a, b), (c, d) = slope @ covariance @ slope.T + 0.5 * jnp.eye(2)
            gain = covariance @ slope.T @ (jnp.array([[d, -b], [-c, a]]) / (a * d - b * c))
            x = x + gain @ (z - see(x))
            return (x, covariance - gain @ slope @ covariance), x

        def one(measured: jax.Array) -> jax.Array:
            return lax.scan(step, (jnp.zeros(4), jnp.eye(4)), measured)[1]

        return jax.vmap(one)(measured)

    return model, _weights(move=(4, 4), see=(2, 4)), jax.random.normal(_KEY, (512, 50, 2))


def densities() -> tuple[Model, Arrays, jax.Array]:
    """Logarithms of normal densities in three dimensions, each with a covariance of its own."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        factors = x[:, 3:].reshape(-1, 3, 3) * w["scale"]
        lower = jnp.linalg.cholesky(factors @ jnp.swapaxes(factors, -1, -2) + jnp.eye(3))
        centred = (x[:, :3] - w["mean"])[..., None]
        whitened = lax.linalg.triangular_solve(lower, centred, left_side=True, lower=True)[..., 0]
        return -0.5 * (whitened**2).sum(-1) - jnp.log(jnp.diagonal(lower, axis1=-2, axis2=-1)).sum(-1)

    return model, {"scale": jnp.ones(()), "mean": jnp.zeros(3)}, jax.random.normal(_KEY, (16384, 12))


def siren() -> tuple[Model, Arrays, jax.Array]:
    """A network of sines (Sitzmann et al., 2020, arXiv:2006.09661)."""
    width, layers = 128, 4

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        for i in range(layers):
            x = jnp.sin(30 * (x @ w[f"w{i}"] + w[f"b{i}"]))
        return x @ w["out"]

    shapes: dict[str, tuple[int, ...]] = {"out": (width, 3)}
    for i in range(layers):
        shapes |= {f"w{i}": (width if i else 2, width), f"b{i}": (width,)}
    return model, {k: v / 10 for k, v in _weights(**shapes).items()}, jax.random.uniform(_KEY, (8192, 2), minval=-1)


def particles() -> tuple[Model, Arrays, jax.Array]:
    """Forces between all pairs of particles, which fall with the square of their distance."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        between = x[:, None] - x
        distances = (between**2).sum(-1) + w["softening"] ** 2
        return jnp.einsum("ij,ijd,j->id", distances**-1.5, between, w["masses"])

    weights = {"softening": jnp.full((), 0.1), "masses": jnp.ones(512)}
    return model, weights, jax.random.normal(_KEY, (512, 3))


def evidential() -> tuple[Model, Arrays, jax.Array]:
    """Losses of a classifier that gives Dirichlet distributions (Sensoy et al., 2018, arXiv:1806.01768)."""
    classes = 100

    def divergence(a: jax.Array) -> jax.Array:
        """From the Dirichlet distribution whose parameters are all 1."""
        total = a.sum(-1, keepdims=True)
        normalizer = lax.lgamma(total[..., 0]) - lax.lgamma(a).sum(-1) - lax.lgamma(jnp.full((), float(classes)))
        return normalizer + ((a - 1) * (lax.digamma(a) - lax.digamma(total))).sum(-1)

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        labels = jax.nn.one_hot(jnp.argmax(x[:, :classes], -1), classes)
        a = 1 + jax.nn.softplus(jnp.tanh(x @ w["hidden"]) @ w["out"])
        loss = (labels * (lax.digamma(a.sum(-1, keepdims=True)) - lax.digamma(a))).sum(-1)
        return loss + 0.1 * divergence(labels + (1 - labels) * a)

    return model, _weights(hidden=(256, 128), out=(128, classes)), jax.random.normal(_KEY, (2048, 256))


def periodic() -> tuple[Model, Arrays, jax.Array]:
    """Energies of particles in a box whose sides meet: Lennard-Jones' potential of the nearest images."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        between = (x[:, None] - x + 0.5 * w["box"]) % w["box"] - 0.5 * w["box"]
        squares = (between**2).sum(-1) + jnp.eye(x.shape[0])
        sixth = (w["size"] ** 2 / squares) ** 3
        return (jnp.where(squares < 9.0, 4 * (sixth**2 - sixth), 0)).sum(-1) / 2

    lattice = jnp.stack(jnp.meshgrid(*(jnp.arange(8.0),) * 3), -1).reshape(-1, 3)
    positions = 1.2 * lattice + 0.05 * jax.random.normal(_KEY, lattice.shape)
    return model, {"box": jnp.full((), 9.6), "size": jnp.ones(())}, positions


def layers() -> tuple[Model, Arrays, jax.Array]:
    """Six layers of a transformer (Vaswani et al., 2017, arXiv:1706.03762), normalised before, in a scan."""
    depth, width, heads = 6, 256, 4

    def normal(x: jax.Array) -> jax.Array:
        x = x - x.mean(-1, keepdims=True)
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

    def layer(x: jax.Array, w: Arrays) -> tuple[jax.Array, None]:
        q, k, v = (a.reshape(*x.shape[:2], heads, -1) for a in jnp.split(normal(x) @ w["qkv"], 3, -1))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
        causal = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(causal, scores, -1e30)), v)
        x = x + mixed.reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(normal(x) @ w["up"]) @ w["down"], None

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        return lax.scan(layer, x, w)[0]

    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    weights = jax.tree.map(lambda w: jnp.stack([w] * depth), _weights(**shapes))
    return model, weights, jax.random.normal(_KEY, (4, 256, width))


def burgers() -> tuple[Model, Arrays, jax.Array]:
    """Burgers' equation with viscosity, 100 steps of an upwind scheme."""

    def model(w: Arrays, u: jax.Array) -> jax.Array:
        def flux(a: jax.Array, b: jax.Array) -> jax.Array:
            return (a * a + b * b) / 4 - jnp.maximum(jnp.abs(a), jnp.abs(b)) * (b - a) / 2

        def step(u: jax.Array, _: None) -> tuple[jax.Array, None]:
            after, before = jnp.roll(u, -1), jnp.roll(u, 1)
            return u - 0.1 * (flux(u, after) - flux(before, u)) + w["viscosity"] * (after - 2 * u + before), None

        return lax.scan(step, u, None, length=100)[0]

    return model, {"viscosity": jnp.full((), 0.05)}, jax.random.normal(_KEY, (65536,))


def markov() -> tuple[Model, Arrays, jax.Array]:
    """Log-likelihoods of a hidden Markov model of 64 states whose emissions a layer computes, of 16 sequences."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        scores = jax.nn.log_softmax(x @ w["emissions"])
        transitions = jax.nn.log_softmax(w["transitions"])

        def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jax.nn.logsumexp(state[:, :, None] + transitions, axis=1) + x, None

        return jax.nn.logsumexp(lax.scan(step, scores[0], scores[1:])[0], axis=-1)

    return model, _weights(emissions=(64, 64), transitions=(64, 64)), jax.random.normal(_KEY, (128, 16, 64))


def tagger() -> tuple[Model, Arrays, jax.Array]:
    """A conditional random field of 32 tags behind a layer: log-partitions less the scores of given tags."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        scores, tags = x @ w["tags"], jnp.arange(x.shape[0]) % 32

        def step(state: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return jax.nn.logsumexp(state[:, :, None] + w["transitions"] + x[:, None], axis=1), None

        path = scores[jnp.arange(len(tags)), :, tags].sum(0) + w["transitions"][tags[:-1], tags[1:]].sum()
        return jax.nn.logsumexp(lax.scan(step, scores[0], scores[1:])[0], axis=-1) - path

    return model, _weights(tags=(64, 32), transitions=(32, 32)), jax.random.normal(_KEY, (100, 32, 64))


def transport() -> tuple[Model, Arrays, jax.Array]:
    """The cost of moving 256 points to others, by 50 of Sinkhorn's iterations on logarithms."""

    def model(w: Arrays, x: jax.Array) -> jax.Array:
        others = x @ w["map"]
        costs = (jnp.square(x).sum(-1)[:, None] + jnp.square(others).sum(-1) - 2 * x @ others.T) / 8

        def step(_: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            f = -jax.nn.logsumexp(carried[1] - costs, axis=1) - math.log(256)
            return f, -jax.nn.logsumexp(f[:, None] - costs, axis=0) - math.log(256)

        f, g = lax.fori_loop(0, 50, step, (jnp.zeros(256), jnp.zeros(256)))
        return jnp.sum(jnp.exp(f[:, None] + g - costs) * costs)

    return model, _weights(map=(16, 16)), jax.random.normal(_KEY, (256, 16))


ON_REQUEST = {"neighbours": ("respelling", "squared_distances")}
"""What the option ``ops`` has to name for a model."""

MODELS = {
    f.__name__: f
    for f in (
        *(mobilenet, convnext, resnext, mamba, embedding, sampler, pooled, running, quantile, recurrent),
        *(dropped, walks, generator, residual, neighbours, kinematics, kalman, densities, siren, particles),
        *(selective, mamba2, rwkv6, evidential, periodic, cells, generation, layers, burgers),
        *(markov, tagger, transport),
    )
}
"""``sampler`` has the kinds argmax and sort, ``embedding`` one_hot, ``mamba`` associative_scan, ``recurrent``
indexed_loop, ``pooled`` pooling, ``running`` cumulative, ``dropped`` and ``walks`` threefry, ``generator`` and
``residual`` weight_gradient and pooling_gradient, ``neighbours`` squared_distances, ``kinematics`` and ``kalman``
batched_product, ``densities`` both that and triangular_solve, ``siren``, ``particles``, ``evidential`` and
``periodic`` elementwise, ``cells`` and ``generation`` looped_bfloat16 (with JAX 0.10), ``mamba2`` and ``rwkv6`` four
recurrences; ``layers`` and ``burgers`` have stacks that follow from others, ``markov``, ``tagger`` and ``transport``
summed_exponentials and its gradient; the others have convolution."""
_WITHOUT_GRADIENT = ("sampler", "generation")


def _step(model: Model) -> Callable[[Arrays, jax.Array], Any]:
    def loss(w: Arrays, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model(w, x)))

    return jax.value_and_grad(loss)


def row(name: str, direction: str, rounds: int) -> dict[str, Any]:
    """What a model costs by default options, beside the original."""
    model, *arguments = MODELS[name]()
    function: Any = model if direction == "forward" else _step(model)
    optimized = autopallas.optimize(function, ops=ON_REQUEST.get(name))
    candidates, first = {"original": jax.jit(function), "autopallas": optimized}, {}
    for label, candidate in candidates.items():
        begin = time.process_time()
        jax.block_until_ready(candidate(*arguments))
        first[label] = round(time.process_time() - begin, 3)
    measured = measure(candidates, tuple(arguments), baseline="original", repetitions=rounds, seconds=120.0)
    ratio, timing = measured.ratio("autopallas", clock="cpu"), measured["autopallas"]
    memory = [measured[label].temporary_bytes for label in candidates]
    return {
        "model": name, "direction": direction, "replaced": dict(optimized.report().counts()),
        "cpu_ratio": ratio and [round(x, 3) for x in (ratio.median, ratio.lower, ratio.upper)],
        "temporary_bytes": memory, "first_step": first, "rounds": len(timing.cpu),
        "failure": timing.failure and str(timing.failure), "load": round(os.getloadavg()[0], 2),
        "processor": environment.processor(), "versions": environment.versions(), "flags": environment.flags(),
        "date": datetime.date.today().isoformat(),
    }  # fmt: skip


def main(given: Sequence[str]) -> int:
    """Runs the command line; 1 where a model is slower than 0.97 times the original."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks respellings", description=__doc__)
    parser.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, help=f"a file for the rows, as JSON, such as {RESULTS.name}")
    options = parser.parse_args(given)
    environment.restart_with_allocator_settings()
    rows = []
    for name in options.models:
        for direction in ("forward",) if name in _WITHOUT_GRADIENT else ("forward", "train step"):
            rows.append(found := row(name, direction, options.rounds))
            median, lower, upper = found["cpu_ratio"] or [float("nan")] * 3
            memory = found["temporary_bytes"][1] / max(1, found["temporary_bytes"][0])
            begin = found["first_step"]["autopallas"] / found["first_step"]["original"]
            print(
                f"{name:10} {direction:10}  {median:6.2f} [{lower:.2f}, {upper:.2f}]  memory {memory:.2f}  first step "
                f"{begin:.2f}  {found['replaced']} {found['failure'] or ''}"
            )
        if options.output:
            options.output.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    return int(not all(found["cpu_ratio"] and found["cpu_ratio"][0] >= 0.97 for found in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
