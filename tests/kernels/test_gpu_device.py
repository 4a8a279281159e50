"""Small cases of each GPU kernel on a GPU, if there is one: ``TEST_PLATFORMS=cuda``.

`python -m benchmarks gpu --all` begins with the same cases, and goes on with many more.
"""

from __future__ import annotations

import jax
import pytest

from autopallas.kernels.gpu import is_hopper
from autopallas.sites.device import Device
from benchmarks.gpu_declared import offered
from benchmarks.gpu_session.errors import ROW_TOLERANCE, compared, same_bits
from benchmarks.gpu_session.tasks import OPERATIONS

CHECKS = [check for name in OPERATIONS for check in offered(name).smoke(False)]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: f"{check.name} {check.direction}")
def test_results_are_those_of_float32_and_the_same_in_every_run(check):
    if not is_hopper(Device.of(jax.devices()[0])):
        pytest.skip("there is no Hopper GPU here, or TEST_PLATFORMS does not name it")
    given = check.arguments()
    found, again = (jax.tree.leaves(jax.jit(check.function)(*given)) for _ in range(2))
    errors = compared(found, jax.tree.leaves(jax.jit(check.reference)(*given)))
    assert errors.largest <= check.tolerance
    assert errors.row <= ROW_TOLERANCE
    assert bool(same_bits(found, again))
