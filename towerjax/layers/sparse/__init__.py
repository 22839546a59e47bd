"""Lookups whose gradient is of the rows looked up, and updates of only these rows."""

from towerjax.collectives.lookups import take as take
from towerjax.collectives.sparse_rows import IndexedRows as IndexedRows
from towerjax.layers.sparse.update import update_with_rows as update_with_rows
