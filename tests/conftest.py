"""Every test runs on the CPU and without any setting of the machine's user."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
for _name in [name for name in os.environ if name.startswith("AUTOPALLAS_")]:
    del os.environ[_name]
