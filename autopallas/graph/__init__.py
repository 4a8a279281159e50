"""Represents a jaxpr, with all its nested bodies, as one value-numbered graph; axis labels; provenance."""

from autopallas.graph.checkpoint_heads import move_heads_out
from autopallas.graph.column_fills import select_fills
from autopallas.graph.equation_keys import Node
from autopallas.graph.flatten import Body, flatten, sizes
from autopallas.graph.joined_logits import take_logits_apart
from autopallas.graph.labels import Ref, Space, View
from autopallas.graph.numbering import Graph
from autopallas.graph.parted_columns import part_columns
from autopallas.graph.parted_gradients import Parting, added_products, part_gradients
from autopallas.graph.row_selections import move_selections
from autopallas.graph.rule_indices import bring_indices_out

__all__ = [
    "Body",
    "Graph",
    "Node",
    "Parting",
    "Ref",
    "Space",
    "View",
    "added_products",
    "bring_indices_out",
    "flatten",
    "move_heads_out",
    "move_selections",
    "part_columns",
    "part_gradients",
    "select_fills",
    "sizes",
    "take_logits_apart",
]
