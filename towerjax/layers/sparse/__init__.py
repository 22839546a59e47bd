"""Gradients and updates of only those rows of a large array that were looked up."""

from towerjax.collectives.sparse_rows import IndexedRows as IndexedRows
from towerjax.layers.sparse.gradient import (
    sparse_value_and_grad as sparse_value_and_grad,
)
from towerjax.layers.sparse.update import update_with_rows as update_with_rows
