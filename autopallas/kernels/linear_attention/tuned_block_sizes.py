"""The rows of the operation, which are data: ``autopallas/tuning/data/<device>/linear_attention.csv``."""

from __future__ import annotations

from autopallas.kernels.linear_attention.operation import OPERATION
from autopallas.tuning.declared_table import DeclaredTable

__all__ = ["TABLE", "find", "infer_block_sizes", "table_key"]

TABLE = DeclaredTable(OPERATION)
table_key, find, infer_block_sizes = TABLE.key, TABLE.find, TABLE.infer_block_sizes
