"""What property tests draw: grids of towers, arrays of every dtype, trees, masks.

Shapes come from few, values from everywhere, so that one compiled program serves many
examples. Hypothesis draws seeds and kinds and shrinks them to 0 and "ones".
"""

import jax
import jax.numpy as jnp
import numpy as np
from containers import KINDS, held
from hypothesis import settings
from hypothesis import strategies as st

# The values that are drawn reach single precision's ends, and half precision's.
FLOATS = (np.float32, jnp.bfloat16, np.float16, np.complex64)
INTEGERS = (np.bool_, np.int8, np.uint8, np.int16, np.int32, np.uint32)
SHAPES = ((2, 1, 2), (3,), (), (0, 2))
seeds = st.integers(0, 2**32 - 1)


def few(number):
    """As many examples, the same ones in every run."""
    return settings(max_examples=number, deadline=None, derandomize=True, database=None)


def floats(rng, dtype, shape, kind):
    """Numbers of a kind: plain, around a power of two, or of all sorts at once."""
    if np.dtype(dtype).kind == "c":
        parts = floats(rng, np.float32, (*shape, 2), kind)
        return parts.view(np.complex64)[..., 0]
    x = rng.normal(size=shape)
    limits = jnp.finfo(dtype)
    if kind == "spread":  # no sum of 64 runs over, and none is below what is normal
        low = int(np.log2(float(limits.tiny))) + limits.nmant + 4
        x *= np.exp2(rng.integers(low, int(np.log2(float(limits.max))) - 9, shape))
    elif kind == "special":
        odd = [0.0, -0.0, np.nan, np.inf, -np.inf, float(limits.max), -1.0]
        x = np.where(rng.random(shape) < 0.4, rng.choice(odd, shape), x)
    elif kind == "ones":
        x = np.ones(shape)
    return np.asarray(x).astype(dtype)


def array(rng, dtype, shape, kind="plain"):
    if dtype is np.bool_:
        return np.asarray(rng.random(shape) < 0.5)
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        if kind == "plain":
            low = max(-5, limits.min)
            high = 5
        else:
            low = limits.min
            high = limits.max
        return np.asarray(rng.integers(low, high, shape, dtype, endpoint=True))
    return floats(rng, dtype, shape, kind)


def towers_values(seed, kind, towers, dtypes=FLOATS + INTEGERS):
    """A tree with a leaf ``[T, ...]`` of each dtype, their shapes in turn."""
    rng = np.random.default_rng(seed)
    return {
        np.dtype(dtype).name: array(rng, dtype, (towers, *SHAPES[n % 4]), kind)
        for n, dtype in enumerate(dtypes)
    }


def trees(leaves):
    """Nested containers and None around leaves, some of which there are."""
    nested = st.recursive(
        leaves | st.none(),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(
                held,
                st.sampled_from(KINDS),
                st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            ),
        ),
        max_leaves=5,
    )
    return st.tuples(leaves, nested, leaves, nested)


def bits(x):
    """The bits of every element; one pattern for all NaNs."""
    x = np.asarray(x)
    if x.dtype.kind == "c":
        x = np.stack([x.real, x.imag])
    if jnp.issubdtype(x.dtype, jnp.floating):
        x = np.where(np.isnan(x), np.full_like(x, np.nan), x)
    return x.dtype, x.shape, x.tobytes()


def assert_same_bits(a, b):
    pairs = zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True)
    for (path, x), y in pairs:
        assert bits(x) == bits(y), (jax.tree_util.keystr(path), x, y)
