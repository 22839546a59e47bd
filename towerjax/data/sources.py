"""The sources that a data set may be made of."""

import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.data.placer import PlacedBatch
from towerjax.types.leaves import a_type
from towerjax.types.options import check_takes


@dataclasses.dataclass(frozen=True)
class InputContext:
    """The argument of a function that makes one process's input.

    Attributes:
      process_index: The process, from 0.
      num_processes: ``P``.
      num_towers: ``T``, of all processes.

    Example:
      >>> InputContext(process_index=1, num_processes=2, num_towers=8).part_of(64)
      32
    """

    process_index: int
    num_processes: int
    num_towers: int

    def part_of(self, batch_size: int) -> int:
        """``B / P``, this process's even share of a global batch."""
        if batch_size % self.num_processes:
            raise ValueError(
                f"A global batch of {batch_size} examples cannot be shared evenly by"
                f" {self.num_processes} processes. Use a multiple of that."
            )
        return batch_size // self.num_processes


def check_batches(name: str, batches: Any, *, or_function: bool = False) -> None:
    """Raise unless batches can be iterated, or called where that is allowed."""
    is_one = isinstance(batches, Mapping | PlacedBatch | np.ndarray | jax.Array | str)
    can_iterate = not is_function(batches) or hasattr(batches, "__getitem__")
    if is_one or not (can_iterate or (or_function and callable(batches))):
        kind = a_type(batches)
        more = ", or a function that gives one" * or_function
        instead = "Call it, or pass" if callable(batches) else "Pass"
        raise ValueError(
            f"{name} is {f'one batch ({kind})' if is_one else kind}, but is to be an"
            f" iterable of batches{more}. {instead} [batch], or tj.batches(data,"
            " batch_size)."
        )


def check_source(source: Any) -> bool:
    """Whether the source makes each process's own part; raise if it is no source."""
    check_batches("The data set", source, or_function=True)
    if not is_function(source):
        return False
    try:
        inspect.signature(source).bind()
    except TypeError:
        check_takes("source(context)", source, None)
        return True
    return False


def open_source(source: Any, *context: InputContext) -> Any:
    """An iterator through the source; a function is given the context, if any."""
    if is_function(source):
        source = source(*context)
        check_batches("What the function of the data set returned", source)
    # tf.data gives NumPy arrays instead of tensors by this method.
    return iter(getattr(source, "as_numpy_iterator", lambda: source)())


def is_function(source: Any) -> bool:
    """Whether the source is to be called, since it cannot be iterated."""
    return not isinstance(source, Iterable) and not hasattr(source, "as_numpy_iterator")


def from_tensor(leaf: Any) -> Any:
    """A tensor of another library as an array; any other leaf as it is."""
    if isinstance(leaf, np.ndarray | np.generic | jax.Array):
        return leaf
    if hasattr(leaf, "detach"):  # PyTorch
        leaf = leaf.detach().cpu()
        if "bfloat16" in str(leaf.dtype):  # NumPy does not know it
            return jnp.from_dlpack(leaf)
    if hasattr(leaf, "numpy"):
        leaf = leaf.numpy()
    return np.asarray(leaf) if hasattr(leaf, "__array__") else leaf
