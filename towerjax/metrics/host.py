"""How do the states of many batches add up on the host? In 64 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.metrics.state import adds_batches, compute, is_metric, merge


def on_host(state: Any) -> Any:
    """A batch's state on the host, in 64 bits where its leaves are to be added."""
    state = jax.device_get(state)
    # Other classes may divide by 0 when they merge, which NumPy warns of.
    convert = _in_64_bits if adds_batches(state) else jnp.asarray
    return jax.tree.map(convert, state)


def _in_64_bits(x: Any) -> np.ndarray:
    x = np.asarray(x)
    kinds = {"b": np.int64, "i": np.int64, "u": np.uint64, "f": np.float64}
    return x.astype(kinds.get(x.dtype.kind, np.float64 if _is_float(x) else x.dtype))


def _is_float(x: np.ndarray) -> bool:
    return jnp.issubdtype(x.dtype, np.floating)  # bfloat16 is of kind "V"


def add_batch(total: Any, state: Any) -> Any:
    """The state of the batches so far and one more."""
    return state if total is None else merge(total, state)


def value_on_host(total: Any) -> Any:
    """The value of a data set's state."""

    def plain(x: Any) -> Any:
        x = np.asarray(x)
        return x.item() if x.ndim == 0 else x

    return jax.tree.map(plain, compute(total) if is_metric(total) else total)
