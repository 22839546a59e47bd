"""Rows of large arrays: their gradients, their travel, their updates."""

from towerjax.sparse.gradient import sparse_value_and_grad as sparse_value_and_grad
from towerjax.sparse.over_towers import reduce_rows as reduce_rows
from towerjax.sparse.over_towers import reduce_stacked_rows as reduce_stacked_rows
from towerjax.sparse.over_towers import reduce_stacked_tree as reduce_stacked_tree
from towerjax.sparse.over_towers import (
    reduce_tree_over_towers as reduce_tree_over_towers,
)
from towerjax.sparse.rows import IndexedRows as IndexedRows
from towerjax.sparse.rows import is_rows as is_rows
from towerjax.sparse.rows import map_values as map_values
from towerjax.sparse.rows import num_rows as num_rows
from towerjax.sparse.rows import rows_of as rows_of
from towerjax.sparse.update import update_with_rows as update_with_rows
