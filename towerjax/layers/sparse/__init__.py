"""Rows of large arrays: their gradients, their travel, their updates."""

from towerjax.collectives.sparse_rows import IndexedRows as IndexedRows
from towerjax.layers.sparse.gradient import (
    sparse_value_and_grad as sparse_value_and_grad,
)
from towerjax.layers.sparse.update import update_with_rows as update_with_rows
