"""Sum gradients in 8 or 4 bits a number, with error feedback."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree

from towerjax.collectives.ops import AllReduce
from towerjax.collectives.packing import Packing, Sums
from towerjax.collectives.reduce import add_pairwise
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.types import PyTree, short_repr
from towerjax.types.leaves import widen_dtype
from towerjax.types.options import check_choice, check_flag, check_whole


@dataclasses.dataclass(frozen=True)
class Code:
    """Encodes numbers as integers of few bits, with one float32 scale a block."""

    bits: int  # 8 or 4; two numbers of 4 bits share a byte
    block: int  # the number of numbers that share a scale

    def size(self, numbers: int) -> int:
        """The number of bytes that encode ``numbers``, a multiple of the block."""
        return numbers * self.bits // 8 + numbers // self.block * 4

    def encode(self, x: jax.Array) -> jax.Array:
        """Encode ``[..., n]`` as ``[..., bytes]``; ``n`` is a multiple of the block."""
        lead = x.shape[:-1]
        blocks = x.reshape(*lead, -1, self.block)
        most = 2 ** (self.bits - 1) - 1
        scales = (jnp.abs(blocks).max(axis=-1) / most).astype(jnp.float32)
        units = jnp.where(scales == 0, 1, scales).astype(x.dtype)
        # The largest may exceed `most` where its scale was rounded down to float32.
        whole = jnp.clip(jnp.round(blocks / units[..., None]), -most, most)
        codes = whole.astype(jnp.int8).reshape(*lead, -1)
        if self.bits == 4:
            pairs = (codes + 8).astype(jnp.uint8).reshape(*lead, -1, 2)
            codes = pairs[..., 0] | (pairs[..., 1] << 4)
        return jnp.concatenate([codes.view(jnp.uint8), scales.view(jnp.uint8)], axis=-1)

    def decode(self, data: jax.Array, numbers: int, dtype: Any) -> jax.Array:
        """The inverse of `encode`, up to half a scale; returns ``[..., numbers]``."""
        lead, cut = data.shape[:-1], numbers * self.bits // 8
        codes, scales = data[..., :cut], data[..., cut : self.size(numbers)]
        if self.bits == 4:
            pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
            whole = pairs.astype(jnp.int8) - 8
        else:
            whole = codes.view(jnp.int8)
        units = scales.view(jnp.float32).astype(dtype)[..., None]
        blocks = whole.reshape(*lead, -1, self.block).astype(dtype)
        return (blocks * units).reshape(*lead, numbers)


@dataclasses.dataclass(frozen=True)
class Compressed:
    """Gradients in 8 or 4 bits a number: near a quarter or an eighth of the bytes.

    Each device encodes its towers' sum, in blocks with one scale each, and sends each
    device a share (an all-to-all). It adds the shares that it receives, encodes the sum
    again and sends it to all (an all-gather). It adds the rounding errors of both codes
    to its next gradient (error feedback), so that the sum of all steps loses nothing;
    the errors of a mean are kept as a mean, for batches of unequal weights.

    It encodes the large floating leaves of what a tower of a train step's last pass
    returns as ``"grads"``. All other sums are exact, in one all-reduce: small leaves,
    weights, losses, metrics and integers.

    Coded sums are not exact and depend on the devices; the metric ``compression/error``
    bounds their relative error in each step. See ``docs/how_to/compressed_sums.md``.

    Attributes:
      bits: 8, numbers from -127 to 127 times a scale; or 4, from -7 to 7.
      error_feedback: Whether to keep rounding errors in ``state.own`` (as much memory
        as the gradient, for each tower) and to send them later.
      block: The number of numbers that share a scale; a multiple of 2.
      above_bytes: Leaves of at most this size are not encoded.

    Raises:
      ValueError: An option has a value that is not allowed.

    Example:
      >>> Compressed(bits=4)
      Compressed(bits=4)

    Source:
      Wang et al. (2023), "ZeRO++", https://arxiv.org/abs/2306.10209, for the all-to-all
      of blocks; Seide et al. (2014), "1-Bit Stochastic Gradient Descent", Interspeech,
      and Karimireddy et al. (2019), "Error Feedback Fixes SignSGD",
      https://arxiv.org/abs/1901.09847, for error feedback; Alistarh et al. (2017),
      "QSGD", https://arxiv.org/abs/1610.02132, which rounds at random instead.
    """

    bits: int = 8
    error_feedback: bool = True
    block: int = 256
    above_bytes: int = 131072

    needs_every_tower = False  # local towers are added first
    __repr__ = short_repr

    def __post_init__(self) -> None:
        check_choice("Compressed.bits", self.bits, (8, 4))
        check_flag("Compressed.error_feedback", self.error_feedback)
        check_whole("Compressed.block", self.block, 2)
        if self.block % 2:
            raise ValueError(f"Compressed.block={self.block} must be a multiple of 2.")
        check_whole("Compressed.above_bytes", self.above_bytes, 0, 2**63 - 1)

    def sum_over_towers(self, tree: PyTree, axes: TowerAxes) -> Sums:
        """The exact sum over all towers, for what is no gradient."""
        return AllReduce().sum_over_towers(tree, axes)

    def init_state(self, gradient: PyTree) -> PyTree:
        """One tower's rounding errors before the first step: 0; see `KeepsState`."""
        kept = jax.tree.map(lambda x: _widened(x) if self._codes(x) else None, gradient)
        if not jax.tree.leaves(kept):
            raise ValueError(
                f"{self!r} codes floating leaves above {self.above_bytes} bytes, and"
                " params has none. Lower above_bytes, or use tj.AllReduce()."
            )
        return jax.tree.map(jnp.zeros_like, kept) if self.error_feedback else None

    def _codes(self, x: Any) -> bool:
        return jnp.issubdtype(x.dtype, jnp.floating) and (
            x.size * _widened(x).dtype.itemsize > self.above_bytes
        )

    def sum_with_state(
        self, tree: PyTree, is_gradient: PyTree, state: PyTree, axes: TowerAxes
    ) -> tuple[Sums, PyTree, dict[str, jax.Array]]:
        """The sums, those of gradients in codes; see `KeepsState`."""
        leaves, treedef = jax.tree.flatten(tree)
        flags = jax.tree.leaves(is_gradient)
        at = [i for i, x in enumerate(leaves) if flags[i] and self._codes(x)]
        rows, kept = jax.tree.flatten(state)
        coded = [leaves[i] for i in at]
        self._check_gradient(coded, rows)
        rest = [None if i in at else x for i, x in enumerate(leaves)]
        leaves = self.sum_over_towers(rest, axes).tree()
        # Errors are kept of the mean, as the next batch may have another weight.
        divisors = _places_of_divisors(tree)
        weights = [leaves[divisors[i]] if i in divisors else 1.0 for i in at]
        units = [
            jnp.where(w == 0, 1.0, w).astype(x.dtype)
            for w, x in zip(weights, coded, strict=True)
        ]
        # The rows of a device's towers add up to its rounding errors.
        coded = [x / unit for x, unit in zip(coded, units, strict=True)]
        if rows:
            lost = map(add_pairwise, rows)
            coded = [x + own for x, own in zip(coded, lost, strict=True)]
        error, lost = jnp.float32(0), [jnp.zeros_like(x) for x in coded]
        if axes.device_axis:
            fn = functools.partial(self._sum_encoded, num_devices=axes.num_devices)
            coded, lost, error = _differentiate_exactly(fn)(coded)
        for i, total, unit in zip(at, coded, units, strict=True):
            leaves[i] = total * unit
        if rows:  # a mean without weight is 0, so that nothing of it is sent
            own = zip(weights, lost, rows, strict=True)
            rows = [
                jnp.where(w == 0, row, jnp.zeros_like(row).at[0].set(x))
                for w, x, row in own
            ]
        each = Packing.plan(leaves, max_leaves=1)
        sums = Sums(leaves, each, treedef, axes.platform)
        return sums, kept.unflatten(rows), {"compression/error": error}

    def _check_gradient(self, coded: list[jax.Array], lost: list[jax.Array]) -> None:
        """Raise unless there is a gradient, and the errors kept have its shapes."""
        shapes = [x.shape for x in coded]
        if not coded:
            raise ValueError(
                f"{self!r} found no gradient: the last pass returns no floating leaf"
                f" above {self.above_bytes} bytes as 'grads'."
            )
        if self.error_feedback and shapes != [x.shape[1:] for x in lost]:
            raise ValueError(
                f"{self!r} keeps what is lost of leaves {[x.shape[1:] for x in lost]},"
                f" but 'grads' has {shapes}. Make the state with step.init, and return"
                " a gradient like state.params, or say error_feedback=False."
            )

    def _sum_encoded(
        self, leaves: list[jax.Array], num_devices: int
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        """The sums over devices, this device's rounding errors, and the error."""
        # End to end, each leaf padded to whole blocks, and the last to equal shares.
        # Shares are rows, since a number's place in all of them may need 64 bits.
        padded = [jnp.pad(x.reshape(-1), (0, -x.size % self.block)) for x in leaves]
        flat, unravel = ravel_pytree(padded)
        x = jnp.pad(flat, (0, -flat.size % (self.block * num_devices)))
        x = x.reshape(num_devices, -1)
        code, size = Code(self.bits, self.block), x.shape[1]
        sent = code.encode(x)
        lost = x - code.decode(sent, size, x.dtype)
        # Row d is device d's contribution to this device's share.
        got = lax.all_to_all(sent, DEVICE_AXIS, split_axis=0, concat_axis=0, tiled=True)
        share = add_pairwise(code.decode(got, size, x.dtype))
        sent = code.encode(share)
        share_lost = share - code.decode(sent, size, x.dtype)
        row = lax.axis_index(DEVICE_AXIS)
        norms = functools.partial(self._norms_squared, [x.size for x in padded])
        squares = norms(lost), norms(share_lost, row * (size // self.block))
        errors = jnp.concatenate(squares).view(jnp.uint8)
        gathered = lax.all_gather(jnp.concatenate([sent, errors]), DEVICE_AXIS)
        total = code.decode(gathered[:, : len(sent)], size, x.dtype)
        squares = gathered[:, len(sent) :].view(jnp.float32).reshape(num_devices, 2, -1)
        error = _largest_error(squares, norms(total))
        # This device sends the error of its share's sums with its next gradient.
        own = lax.dynamic_index_in_dim(lost, row, keepdims=False) + share_lost
        lost = lax.dynamic_update_index_in_dim(lost, own, row, 0)

        def split(rows: jax.Array) -> list[jax.Array]:
            parts = zip(unravel(rows.reshape(-1)[: flat.size]), leaves, strict=True)
            return [part[: x.size].reshape(x.shape) for part, x in parts]

        return split(total), split(lost), error

    def _norms_squared(
        self, sizes: list[int], x: jax.Array, first: jax.Array | int = 0
    ) -> jax.Array:
        """Squared norms of leaves, ``[leaves]`` float32, from block ``first`` on."""
        each = (x.reshape(-1, self.block) ** 2).sum(axis=1).astype(jnp.float32)
        leaf = np.repeat(np.arange(len(sizes)), [n // self.block for n in sizes])
        # Blocks behind are of no leaf, wherever the slice begins there.
        leaf = jnp.pad(leaf, (0, len(each)), constant_values=len(sizes))
        leaf = lax.dynamic_slice_in_dim(leaf, first, len(each))
        return jax.ops.segment_sum(each, leaf, num_segments=len(sizes) + 1)[:-1]


def _differentiate_exactly(coded_sum: Callable[..., Any]) -> Callable[..., Any]:
    """Give a sum of codes the derivative of the exact sum, since rounding has none."""
    fn = jax.custom_jvp(coded_sum)

    def jvp(primals: Any, tangents: Any) -> Any:
        total, lost, error = fn(*primals)
        moved = lax.psum(tangents[0], DEVICE_AXIS)
        still = jax.tree.map(jnp.zeros_like, (lost, error))
        return (total, lost, error), (moved, *still)

    fn.defjvp(jvp)
    return fn


def _places_of_divisors(tree: PyTree) -> dict[int, int]:
    """By the place of each leaf of a mean that of its weight, the mean's last leaf."""
    found, end = {}, 0
    for x in jax.tree.leaves(tree, is_leaf=lambda x: hasattr(x, "weight")):
        start, end = end, end + len(jax.tree.leaves(x))
        if hasattr(x, "weight"):
            found |= dict.fromkeys(range(start, end), end - 1)
    return found


def _widened(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of ``x``, and the dtype in which gradients are added."""
    return jax.ShapeDtypeStruct(x.shape, widen_dtype(x.dtype))


def _largest_error(squares: jax.Array, of_sums: jax.Array) -> jax.Array:
    """A bound of the leaves' relative errors; squared errors are ``[D, 2, leaves]``."""
    error = jnp.sqrt(squares[:, 0]).sum(axis=0) + jnp.sqrt(squares[:, 1].sum(axis=0))
    empty = (error == 0) & (of_sums == 0)
    return jnp.where(empty, 0, error / jnp.sqrt(jnp.where(empty, 1, of_sums))).max()
