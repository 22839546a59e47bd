"""The order in which PinnedTree adds; `test_same_bits` has whole runs."""

import jax.numpy as jnp
import numpy as np

from towerjax.reduce import add_pairwise


def test_the_tree_depends_on_the_number_of_towers_alone():
    rows = np.random.default_rng(0).normal(size=(12, 1000)).astype(np.float32)
    whole = add_pairwise(jnp.asarray(rows))
    for local in (1, 2, 4):  # powers of two: a device's towers are a subtree
        parts = [add_pairwise(jnp.asarray(x)) for x in np.split(rows, 12 // local)]
        again = add_pairwise(jnp.stack(parts))
        np.testing.assert_array_equal(whole, again)
    thirds = [add_pairwise(jnp.asarray(x)) for x in np.split(rows, 4)]
    assert (np.asarray(add_pairwise(jnp.stack(thirds))) != np.asarray(whole)).any()
