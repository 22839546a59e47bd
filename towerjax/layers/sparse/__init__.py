"""Lookups with a gradient of only the rows looked up, and updates of these rows."""

from towerjax.collectives.lookups import take as take
from towerjax.collectives.sparse_rows import IndexedRows as IndexedRows
from towerjax.layers.sparse.update import update_with_rows as update_with_rows
