"""How does a gradient travel in few bits? Coded; what is lost goes with the next."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.collectives.ops import AllReduce
from towerjax.collectives.packing import Packing, Sums
from towerjax.collectives.reduce import add_pairwise
from towerjax.mesh.placement import DEVICE_AXIS, TowerAxes
from towerjax.types import PyTree, short_repr
from towerjax.types.leaves import widened
from towerjax.types.options import check_choice, check_flag, check_whole


@dataclasses.dataclass(frozen=True)
class Code:
    """Numbers as bytes: of each block whole numbers, and the scale that they count."""

    bits: int  # 8, or 4, of which two numbers share a byte
    block: int  # how many numbers have a scale together

    def size(self, numbers: int) -> int:
        """How many bytes stand for so many numbers, a multiple of the block."""
        return numbers * self.bits // 8 + numbers // self.block * 4

    def coded(self, x: jax.Array) -> jax.Array:
        """``[..., n]`` -> ``[..., bytes]`` uint8; ``n`` is a multiple of the block."""
        lead = x.shape[:-1]
        blocks = x.reshape(*lead, -1, self.block)
        most = 2 ** (self.bits - 1) - 1
        scales = (jnp.abs(blocks).max(axis=-1) / most).astype(jnp.float32)
        units = jnp.where(scales == 0, 1, scales).astype(x.dtype)
        # A scale that was rounded down may count the largest once more.
        whole = jnp.clip(jnp.round(blocks / units[..., None]), -most, most)
        codes = whole.astype(jnp.int8).reshape(*lead, -1)
        if self.bits == 4:
            pairs = (codes + 8).astype(jnp.uint8).reshape(*lead, -1, 2)
            codes = pairs[..., 0] | (pairs[..., 1] << 4)
        return jnp.concatenate([as_bytes(codes), as_bytes(scales)], axis=-1)

    def decoded(self, data: jax.Array, numbers: int, dtype: Any) -> jax.Array:
        """The inverse of `coded`, up to half a scale: ``[..., numbers]``."""
        lead, cut = data.shape[:-1], numbers * self.bits // 8
        codes, scales = data[..., :cut], data[..., cut : self.size(numbers)]
        if self.bits == 4:
            pairs = jnp.stack([codes & 15, codes >> 4], axis=-1)
            whole = pairs.astype(jnp.int8) - 8
        else:
            whole = lax.bitcast_convert_type(codes, jnp.int8)
        units = from_bytes(scales).astype(dtype)[..., None]
        blocks = whole.reshape(*lead, -1, self.block).astype(dtype)
        return (blocks * units).reshape(*lead, numbers)


def as_bytes(x: jax.Array) -> jax.Array:
    """``[..., n]`` of any dtype -> ``[..., bytes]`` uint8."""
    data = lax.bitcast_convert_type(x, jnp.uint8)
    return data.reshape(*x.shape[:-1], -1)


def from_bytes(data: jax.Array) -> jax.Array:
    """The inverse, of float32."""
    each = data.reshape(*data.shape[:-1], -1, 4)
    return lax.bitcast_convert_type(each, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Leaves end to end, each filled up with zeros to whole blocks."""

    shapes: tuple[tuple[int, ...], ...]
    block: int  # how many numbers a block has
    share: int  # the whole is filled up to a multiple of so many numbers

    @property
    def sizes(self) -> list[int]:
        """How many numbers each leaf takes up."""
        sizes = map(math.prod, self.shapes)
        return [-(-size // self.block) * self.block for size in sizes]

    @property
    def total(self) -> int:
        """How many numbers all take up."""
        return -(-sum(self.sizes) // self.share) * self.share

    @property
    def leaf_of_block(self) -> np.ndarray:
        """Which leaf a block is of; of what fills up the end one more."""
        counts = [size // self.block for size in self.sizes]
        counts.append(self.total // self.block - sum(counts))
        return np.repeat(np.arange(len(counts)), counts)

    def joined(self, leaves: Sequence[jax.Array]) -> jax.Array:
        """``[total]``."""
        dtype = jnp.result_type(*leaves)
        parts = [
            jnp.pad(x.reshape(-1).astype(dtype), (0, size - x.size))
            for x, size in zip(leaves, self.sizes, strict=True)
        ]
        rest = self.total - sum(self.sizes)
        return jnp.concatenate([*parts, jnp.zeros(rest, dtype)])

    def parted(self, x: jax.Array) -> list[jax.Array]:
        """The inverse of `joined`."""
        starts = np.cumsum([0, *self.sizes])
        return [
            lax.slice_in_dim(x, start, start + math.prod(shape)).reshape(shape)
            for start, shape in zip(starts[:-1].tolist(), self.shapes, strict=True)
        ]

    def squares(self, x: jax.Array, start: jax.Array | int = 0) -> jax.Array:
        """``[leaves]`` float32: squares added, of the numbers from ``start`` on."""
        each = (x.reshape(-1, self.block) ** 2).sum(axis=1).astype(jnp.float32)
        leaf, count = jnp.asarray(self.leaf_of_block), len(self.shapes)
        leaf = lax.dynamic_slice_in_dim(leaf, start // self.block, len(each))
        return jax.ops.segment_sum(each, leaf, num_segments=count + 1)[:count]


@dataclasses.dataclass(frozen=True)
class Compressed:
    """Gradients in 8 or 4 bits a number: near a quarter or an eighth of the bytes.

    Each device codes its towers' sum, in blocks of a scale each, and sends every device
    a share (an all-to-all); that adds its share of all, codes it again, and hands it
    round (an all-gather). What the two codes lose is kept on each device and added to
    its next gradient: error feedback, with which the sum of all steps loses nothing.

    Coded is what a tower of a train step's last pass returns as ``"grads"``, of it the
    floating leaves above a size. All else is exact and goes in one all-reduce: small
    leaves, weights, losses, metrics, whole numbers, and every other sum.

    Sums are not exact and depend on the devices; how far at most, in each step, the
    metric ``compression/error`` says. See ``docs/how_to/compressed_sums.md``.

    Attributes:
      bits: 8, numbers from -127 to 127 times a scale; or 4, from -7 to 7.
      error_feedback: Is what is lost kept in ``state.own`` (as much memory as the
        gradient, for each tower), and sent later? If not it is lost for good.
      block: How many numbers share a scale; a multiple of 2.
      above_bytes: Smaller leaves are not coded.

    Raises:
      ValueError: An option is not one that there is.

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
        """The exact sum over all towers: of all that is no gradient."""
        return AllReduce().sum_over_towers(tree, axes)

    def init_state(self, gradient: PyTree) -> PyTree:
        """What one tower has lost before the first step, zeros; see `KeepsState`."""
        kept = jax.tree.map(lambda x: _wide(x) if self._codes(x) else None, gradient)
        if not jax.tree.leaves(kept):
            raise ValueError(
                f"{self!r} codes floating leaves above {self.above_bytes} bytes, and"
                " params has none. Lower above_bytes, or use tj.AllReduce()."
            )
        return jax.tree.map(jnp.zeros_like, kept) if self.error_feedback else None

    def _codes(self, x: Any) -> bool:
        return jnp.issubdtype(x.dtype, jnp.floating) and (
            x.size * _wide(x).dtype.itemsize > self.above_bytes
        )

    def sum_with_state(
        self, tree: PyTree, is_gradient: PyTree, state: PyTree, axes: TowerAxes
    ) -> tuple[Sums, PyTree, dict[str, jax.Array]]:
        """The sums, of gradients as the codes have them; see `KeepsState`."""
        leaves, treedef = jax.tree.flatten(tree)
        flags = jax.tree.leaves(is_gradient)
        at = [i for i, x in enumerate(leaves) if flags[i] and self._codes(x)]
        rows, kept = jax.tree.flatten(state)
        coded = [leaves[i] for i in at]
        self._check_like(coded, rows)
        if rows:  # a device's towers share what it lost
            pairs = zip(coded, rows, strict=True)
            coded = [x + add_pairwise(row) for x, row in pairs]
        error, lost = jnp.float32(0), [jnp.zeros_like(x) for x in coded]
        if axes.device_axis:
            fn = functools.partial(self._coded_sum, num_devices=axes.num_devices)
            coded, lost, error = _as_if_exact(fn)(coded)
        rest = [None if i in at else x for i, x in enumerate(leaves)]
        leaves = self.sum_over_towers(rest, axes).tree()
        for i, total in zip(at, coded, strict=True):
            leaves[i] = total
        if rows:
            own = zip(lost, rows, strict=True)
            rows = [jnp.zeros_like(row).at[0].set(x) for x, row in own]
        each = Packing.plan(leaves, max_leaves=1)
        sums = Sums(leaves, each, treedef, axes.platform)
        return sums, kept.unflatten(rows), {"compression/error": error}

    def _check_like(self, coded: list[jax.Array], lost: list[jax.Array]) -> None:
        """Raise unless there is a gradient, and what is kept is like it."""
        shapes = [x.shape for x in coded]
        if not coded:
            raise ValueError(
                f"{self!r} found no gradient: no floating leaf above"
                f" {self.above_bytes} bytes is returned as 'grads' by the last pass."
                " Return {'grads': grads, ...} there, or use tj.AllReduce()."
            )
        if self.error_feedback and shapes != [x.shape[1:] for x in lost]:
            raise ValueError(
                f"{self!r} keeps what is lost of leaves like those of state.params,"
                f" {[x.shape[1:] for x in lost]}, but 'grads' has {shapes}. Make the"
                " state with step.init, return a gradient like state.params, or say"
                " error_feedback=False."
            )

    def _coded_sum(
        self, leaves: list[jax.Array], num_devices: int
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        """The leaves' sums over devices, what this one lost of them, and the error."""
        shapes = tuple(x.shape for x in leaves)
        lay = Blocks(shapes, self.block, self.block * num_devices)
        code, size = Code(self.bits, self.block), lay.total // num_devices
        x = lay.joined(leaves)
        sent = code.coded(x.reshape(num_devices, size))
        lost = x - code.decoded(sent, size, x.dtype).reshape(-1)
        # Row d is device d's towers' part of this device's share.
        met = lax.all_to_all(sent, DEVICE_AXIS, split_axis=0, concat_axis=0, tiled=True)
        share = add_pairwise(code.decoded(met, size, x.dtype))
        sent = code.coded(share)
        lost_share = share - code.decoded(sent, size, x.dtype)
        start = lax.axis_index(DEVICE_AXIS) * size
        squares = lay.squares(lost), lay.squares(lost_share, start)
        got = lax.all_gather(
            jnp.concatenate([sent, as_bytes(jnp.concatenate(squares))]), DEVICE_AXIS
        )
        total = code.decoded(got[:, : len(sent)], size, x.dtype).reshape(-1)
        squares = from_bytes(got[:, len(sent) :]).reshape(num_devices, 2, -1)
        error = _largest(squares, lay.squares(total))
        # What the sums of this device's share lost, it sends with its next gradient.
        own = lax.dynamic_slice_in_dim(lost, start, size) + lost_share
        lost = lax.dynamic_update_slice_in_dim(lost, own, start, 0)
        return lay.parted(total), lay.parted(lost), error


def _as_if_exact(coded_sum: Callable[..., Any]) -> Callable[..., Any]:
    """A sum of codes, whose derivative is the exact sum's: rounding has none."""
    fn = jax.custom_jvp(coded_sum)

    def jvp(primals: Any, tangents: Any) -> Any:
        total, lost, error = fn(*primals)
        moved = lax.psum(tangents[0], DEVICE_AXIS)
        still = jax.tree.map(jnp.zeros_like, (lost, error))
        return (total, lost, error), (moved, *still)

    fn.defjvp(jvp)
    return fn


def _wide(x: Any) -> jax.ShapeDtypeStruct:
    """The array in the dtype in which gradients are added."""
    return jax.ShapeDtypeStruct(x.shape, widened(x.dtype))


def _largest(squares: jax.Array, of_sums: jax.Array) -> jax.Array:
    """The largest relative error of a leaf, of ``[D, 2, leaves]`` squares of errors."""
    error = jnp.sqrt(squares[:, 0]).sum(axis=0) + jnp.sqrt(squares[:, 1].sum(axis=0))
    empty = (error == 0) & (of_sums == 0)
    return jnp.where(empty, 0, error / jnp.sqrt(jnp.where(empty, 1, of_sums))).max()
