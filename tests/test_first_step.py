"""What a first step is spared: kernels that are traced twice, patterns that cannot match, samples of the benchmark."""

from __future__ import annotations

import importlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import autopallas
from autopallas.graph import Graph, flatten
from autopallas.kernels.attention import xla
from autopallas.kernels.attention.schedule import divided, element
from autopallas.kernels.respelling.block_sizes import BlockSizes
from autopallas.kernels.respelling.tuned_block_sizes import BUCKETS, TABLE
from autopallas.patterns import find
from autopallas.report import live_report
from autopallas.tuning import key
from autopallas.tuning.table_files import Files


def attend(q, k, v):
    return jax.nn.softmax(q @ k.swapaxes(-1, -2)) @ v


def test_lowering_finds_what_planning_traced(monkeypatch):
    traced = []
    for name in ("forward", "backward"):
        own = getattr(xla, name)

        def counted(*args, name=name, own=own, **options):
            traced.append(name)
            return own(*args, **options)

        monkeypatch.setattr(xla, name, counted)

    def loss(q, k, v):
        return (attend(attend(q, k, v), k, v) ** 2).sum()

    x = jnp.ones((2, 3, 19, 5))
    function = autopallas.optimize(jax.grad(loss, (0, 1, 2)), objective="always", ops=["attention"])
    planned = function.trace(x, x, x)
    assert function.report().counts()["attention"] == 2
    before = list(traced)
    assert set(before) == {"forward", "backward"}
    planned.lower()
    assert traced == before


def graph_of(function, *arguments):
    return Graph(flatten(jax.make_jaxpr(function)(*arguments)))


def test_the_primitives_of_a_graph_are_those_of_its_bodies_and_of_custom_rules():
    @jax.custom_jvp
    def smooth(x):
        return jnp.exp(x) + jax.jit(jnp.cosh)(x)

    smooth.defjvps(lambda t, out, x: t * jnp.tanh(x))

    def function(x):
        return lax.scan(lambda c, y: (jnp.sin(c) + y, None), smooth(x[0]), x)[0]

    assert {"scan", "sin", "exp", "cosh"} <= graph_of(function, jnp.ones((3, 2))).primitives
    assert "tanh" not in graph_of(function, jnp.ones((3, 2))).primitives


@pytest.mark.parametrize(
    "function, searched",
    [
        (lambda x: x @ x, set()),
        (lambda x: jnp.exp(x @ x), {"attention", "cross_entropy"}),
        (lambda x: lax.scan(lambda c, y: (c * 0.5 + y, c), x[0], x), {"recurrence"}),
    ],
)
def test_patterns_are_walked_only_where_a_program_has_their_anchors(monkeypatch, function, searched):
    asked = set()
    for name in ("attention", "cross_entropy", "recurrence"):
        pattern = importlib.import_module(f"autopallas.patterns.{name}")

        def spied(graph, assume_finite, name=name, own=pattern.find):
            asked.add(name)
            return own(graph, assume_finite)

        monkeypatch.setattr(pattern, "find", spied)
    find(graph_of(function, jnp.ones((4, 4))), None, True)
    assert asked == searched


def test_what_reads_mixtures_and_linear_attention_is_imported_by_programs_that_may_have_one():
    code = (
        "import sys, jax, jax.numpy as jnp, autopallas\n"
        "names = [f'autopallas.patterns.{op}.recognise' for op in\n"
        "         ('grouped_matmul', 'mixture_of_experts', 'linear_attention')]\n"
        "x = jnp.ones((8, 8))\n"
        "loss = lambda w, x: (jnp.tanh(x @ w) ** 2).mean()\n"
        "autopallas.optimize(jax.grad(loss)).trace(x, x)\n"
        "print(*[name in sys.modules for name in names])\n"
        "masked = lambda q, k, v: jnp.tril(q @ k.T) @ v\n"
        "experts = lambda x, w, p: jnp.einsum('tef,te->tf', jnp.einsum('td,edf->tef', x, w), jax.nn.softmax(p))\n"
        "autopallas.optimize(masked).trace(x, x, x)\n"
        "autopallas.optimize(experts).trace(x, jnp.ones((8, 8, 8)), x)\n"
        "print(*[name in sys.modules for name in names])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"] * 3 + ["False", "True", "True"]


def test_equations_of_sites_are_printed_when_the_report_is_read(monkeypatch):
    printed = []

    def counted(program, own=live_report._printed):
        printed.append(program)
        return own(program)

    monkeypatch.setattr(live_report, "_printed", counted)
    x = jnp.ones((2, 3, 19, 5))
    function = autopallas.optimize(lambda x: attend(attend(x, x, x), x, x), objective="always", ops=["attention"])
    function.trace(x)
    assert not printed
    sites = function.report().sites
    assert len(sites) == 2
    assert all("dot_general" in site.original for site in sites)
    before = len(printed)
    assert function.report().sites == sites
    assert len(printed) == before


def test_kinds_of_respellings_are_known_without_their_samples():
    code = (
        "import jax; jax.eval_shape = None\n"
        "from autopallas.kernels.respelling.kinds import kind_named, kind_names\n"
        "print(all(kind_named(name).instead for name in kind_names()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_numbers_and_parts_of_tables_inside_of_loops():
    table = np.arange(12).reshape(3, 4)
    picked = jax.jit(lambda i, j: element(table, i, j))(2, 1)
    assert (picked.shape, picked.dtype, int(picked)) == ((), jnp.int32, 9)
    for by in (1, 2, 3, 4):
        found = jax.jit(lambda n, by=by: divided(n, by))(11)
        assert tuple(map(int, found)) == divmod(11, by) == divided(11, by)


def test_a_kernels_version_is_that_of_its_code():
    version = key._without_comments
    plain = version(b"def f(x):\n    return x in {1, 2}\n")
    assert version(b"# Why.\n\n\ndef f(x):\n    # what\n    return x in {1, 2}  # or not\n") == plain
    assert version(b"def f(x):\n    return x in {1, 3}\n") != plain
    assert version(b"def f(x):\n    return x not in {1, 2}\n") != plain
    assert version(b"def f(x):\nreturn x in {1, 2}\n") != plain
    assert version(b"x = 'a  # b'\n") != version(b"x = 'a  # c'\n")


def test_rows_of_tables_are_parsed_where_their_key_is_asked_for(monkeypatch):
    asked, expected = TABLE.files.read("cpu")[0]
    parsed, own = [], Files._row
    monkeypatch.setattr(Files, "_row", lambda *given: parsed.append(own(*given)) or parsed[-1])
    rows = Files("respelling", BlockSizes, BUCKETS)["cpu"]
    assert rows.get((*asked[:4], "of no kind")) is None
    assert not parsed
    assert rows[asked].kernel_bytes > 0
    assert (asked, expected) in parsed
    assert {key for key, _ in parsed} == {asked}


def test_the_gradient_of_a_depthwise_weight_carries_numbers_along_one_axis():
    """XLA's CPU compiler takes two to three times as long over what ``lax.map`` stacks."""

    def convolve(x, w):
        return lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=x.shape[-1]
        )

    x, w = jnp.ones((2, 12, 12, 96)), jnp.ones((3, 3, 1, 96))
    function = autopallas.optimize(jax.grad(lambda w: convolve(x, w).sum()), objective="always", ops=["respelling"])
    text = function.lower(w).as_text()
    assert function.report().counts()["respelling"]
    assert "stablehlo.while" in text
    assert "9x96xf32" not in text.partition("stablehlo.while")[0]
    assert "stablehlo.optimization_barrier" in text
