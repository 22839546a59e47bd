"""What may a batch norm over towers be told? Its options, and what it refuses."""

import dataclasses
import operator
from typing import Any, Literal, TypeAlias, get_args

import jax.numpy as jnp

from towerjax.types.options import check_choice, check_number

Statistics: TypeAlias = Literal["synchronised", "local", "frozen"]
"""Of whose rows: all towers', this tower's, or none (the running ones, unchanged)."""


@dataclasses.dataclass(frozen=True)
class BatchNormOptions:
    """How to normalise; the names are those of Flax.

    Attributes:
      axis: The feature dim of the input, or a tuple of them.
      momentum: How much of the running statistics a step keeps, 0 to 1.
      epsilon: Added to the variance, >= 0.
      statistics: ``"synchronised"``: of the rows of all towers, as if they were on
        one. ``"local"``: of this tower's rows; nothing is sent. ``"frozen"``: the
        running ones, which stay as they are.
      dtype: Statistics are of this dtype or of float32, whichever is wider; None
        takes the input's.
    """

    axis: int | tuple[int, ...] = -1
    momentum: float = 0.99
    epsilon: float = 1e-5
    statistics: Statistics = "synchronised"
    dtype: Any = None

    def __post_init__(self) -> None:
        """Refuse what is no option."""
        check_choice("statistics", self.statistics, get_args(Statistics))
        axis: Any = self.axis
        several = isinstance(axis, tuple | list)
        try:
            axes = tuple(map(_as_dim, axis if several else [axis]))
        except TypeError:
            axes = ()
        if not axes:
            raise ValueError(
                f"axis={self.axis!r} must be an int or a tuple of ints, the feature"
                " dims of the input, such as -1."
            )
        object.__setattr__(self, "axis", axes if several else axes[0])
        check_number("momentum", self.momentum, "a number from 0 to 1", 1.0)
        check_number("epsilon", self.epsilon, "a number >= 0")

    def feature_axes(self, num_dims: int) -> tuple[int, ...]:
        """The feature dims of an input, counted from the front, in order."""
        axes = self.axis if isinstance(self.axis, tuple) else (self.axis,)
        if any(not -num_dims <= a < num_dims for a in axes):
            raise ValueError(
                f"axis={self.axis!r} is not a dim of an input of {num_dims} dims. It"
                " names the features of the input, such as -1."
            )
        found = {a % num_dims for a in axes}
        if len(found) < len(axes):
            raise ValueError(
                f"axis={self.axis!r} names a dim of an input of {num_dims} dims twice."
            )
        return tuple(sorted(found))

    def statistics_dtype(self, dtype: Any) -> Any:
        """The dtype of the statistics of an input."""
        wide = jnp.promote_types(self.dtype or dtype, jnp.float32)
        if jnp.issubdtype(dtype, jnp.complexfloating) or not jnp.issubdtype(
            wide, jnp.floating
        ):
            raise ValueError(
                f"Batch norm got x of dtype {dtype} and dtype={self.dtype}; it takes"
                " real numbers. Normalise real and imaginary parts by themselves."
            )
        return wide


def _as_dim(axis: Any) -> int:
    if isinstance(axis, bool):
        raise TypeError
    return operator.index(axis)


def refuse(name: str, value: Any, instead: str) -> None:
    """Raise for an argument of Flax's layer that has no meaning here."""
    raise ValueError(f"TowerBatchNorm got {name}={value!r}. {instead}")


def refuse_flax_only(
    axis_name: Any, axis_index_groups: Any, use_fast_variance: bool
) -> None:
    """Raise for what Flax's two layers take and a layer over towers does not."""
    if axis_name is not None:
        text = "The towers are passed at each call: norm(x, tower). Leave it out."
        refuse("axis_name", axis_name, text)
    if axis_index_groups is not None:
        text = (
            "Statistics are of all towers, or with statistics='local' of one. Leave it"
            " out."
        )
        refuse("axis_index_groups", axis_index_groups, text)
    if use_fast_variance:
        text = (
            "The variance is that of differences to the mean, in two passes, which"
            " loses no digits. Leave it out."
        )
        refuse("use_fast_variance", use_fast_variance, text)
