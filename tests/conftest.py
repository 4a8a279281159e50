"""Every test runs on the CPU and without any setting of the machine's user."""

import atexit
import os
import shutil
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
for _name in [name for name in os.environ if name.startswith("AUTOPALLAS_")]:
    del os.environ[_name]

# Tuning results of the machine's user must not decide what a test sees, nor tests' what the user gets.
os.environ["AUTOPALLAS_CACHE_DIR"] = tempfile.mkdtemp(prefix="autopallas-test-cache-")
atexit.register(shutil.rmtree, os.environ["AUTOPALLAS_CACHE_DIR"], ignore_errors=True)

# Compilation takes most of a test's time.  LLVM's optimisations are more than half of that; they change how fast a
# program is, which no test measures, not what it computes or how much memory XLA plans for it.
os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {os.environ.get('XLA_FLAGS', '')}".strip()
