"""The plain formulas compute every case, as loops in NumPy do."""

from __future__ import annotations

import jax
import numpy as np
from cross_entropy_cases import F32, oracle
from cross_entropy_implementation import BY_NAME, CrossEntropyImplementation


class TestReference(CrossEntropyImplementation):
    name = "reference"

    def test_the_formulas_in_numpy(self):
        """The oracle itself against loops over rows."""
        case = BY_NAME["bias"]
        found = oracle(case, F32, None, F32)
        x, w, (labels, bias), (dmax, dtotal, dpick, dsum, _, _) = jax.tree.map(np.asarray, case.operands())
        for n in range(case.rows):
            p = x[n].astype(np.float64) @ w.astype(np.float64) + bias[0]
            e = np.exp(p - p.max())
            np.testing.assert_allclose(found["exp_sum"][n], e.sum())
            np.testing.assert_allclose(found["sum"][n], p.sum(), atol=1e-12)
            np.testing.assert_allclose(found["pick"][n], p[labels[n, 0]])
            assert found["argmax"][n] == p.argmax()
            dp = dtotal[n] * e + dsum[n] + dmax[n] * (p == p.max()) + dpick[n] * (np.arange(len(p)) == labels[n, 0])
            np.testing.assert_allclose(found["dx"][n], w @ dp, atol=1e-12)
