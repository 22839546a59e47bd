from .mutant import Mutant

MUTANTS = (
    Mutant("B34","dup","towerjax.sparse.duplicates:sum_duplicates","summed.at[slots].add(values","summed.at[slots].set(values",("tests/test_sparse_update.py::test_rows_by_index",)),
    Mutant("X","same","towerjax.sparse.duplicates:sum_duplicates","summed.at[slots].add(values","summed.at[slots].add(values",("tests/test_sparse_update.py::test_rows_by_index",)),
)
