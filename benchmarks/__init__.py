"""How fast, and how small, the kernels are against what people write: ``python -m benchmarks --help``."""
