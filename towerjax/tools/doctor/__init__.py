"""``towerjax doctor``: show a machine's devices, test their sums, advise."""
