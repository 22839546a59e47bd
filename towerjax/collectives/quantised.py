"""How do few bits stand for many numbers? Whole numbers of a scale, block by block."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


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

    @classmethod
    def of(cls, leaves: Sequence[jax.Array], block: int, num_devices: int) -> "Blocks":
        """Of so many equal shares, each of whole blocks."""
        return cls(tuple(x.shape for x in leaves), block, block * num_devices)

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
