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
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import towerjax as tj

_AXIS, _LOST, _ERROR = "devices", "compressed", "compression/error"


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

    Give it to ``build_train_step(..., extend=)``. Each device encodes its towers' sum,
    in blocks with one scale each, and sends each device a share (an all-to-all). It
    adds the shares that it receives, encodes the sum again and sends it to all (an
    all-gather). It adds the rounding errors of both codes to its next gradient (error
    feedback), so that the sum of all steps loses nothing; the errors of a mean are kept
    as a mean, for batches of unequal weights.

    It encodes the large floating leaves of the gradient. All other sums are exact, in
    one all-reduce: small leaves, weights, losses, metrics and integers.

    Coded sums are not exact and depend on the devices; the metric ``compression/error``
    bounds their relative error in each step. See
    <https://github.com/towerjax/towerjax/blob/main/docs/how_to/compressed_sums.md>.

    Attributes:
      bits: 8, numbers from -127 to 127 times a scale; or 4, from -7 to 7.
      error_feedback: Whether to keep rounding errors in ``state.local["compressed"]``
        (as much memory as the gradient, for each tower) and to send them later.
      block: The number of numbers that share a scale; a multiple of 2.
      above_bytes: Leaves of at most this size are not encoded.

    Raises:
      ValueError: An option has a value that is not allowed.

    Example:
      >>> Compressed(bits=4)
      Compressed(bits=4, error_feedback=True, block=256, above_bytes=131072)

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

    def __post_init__(self) -> None:
        """Check the options."""
        wrong = {
            "bits": ("8 or 4", self.bits in (8, 4)),
            "error_feedback": ("True or False", isinstance(self.error_feedback, bool)),
            "block": ("a multiple of 2", _is_whole(self.block) and not self.block % 2),
            "above_bytes": ("a whole number >= 0", _is_whole(self.above_bytes, 0)),
        }
        for name, (what, fits) in wrong.items():
            if not fits:
                value = getattr(self, name)
                raise ValueError(f"Compressed.{name}={value!r:.200} must be {what}.")

    def __call__(self, fns: Any) -> Any:
        """The functions of a train step that sums its gradient so."""

        def tower_fn(state: Any, rows: Any, tower: Any) -> dict[str, Any]:
            local = _leave_out(state.local, _LOST)
            state = dataclasses.replace(state, local=local)
            if tower.local:
                local = _leave_out(tower.local, _LOST)
                tower = dataclasses.replace(tower, local=local)
            out = fns.tower(state, rows, tower)
            grads, coded = self._split(out["grads"])
            return {**out, "grads": grads, "coded": tj.PerTower(tj.Sum(coded))}

        def update_fn(state: Any, merged: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            lost = state.local.get(_LOST)
            state = dataclasses.replace(state, local=_leave_out(state.local, _LOST))
            rows = merged["coded"].values.value
            weight = getattr(merged["grads"], "weight", jnp.float32(1))
            kept = [] if lost is None else jax.tree.leaves(lost.value)
            devices = len(fns.strategy.worker_devices)
            total, kept, error = self._sum(rows, kept, weight, devices)
            grads = _joined(merged["grads"], total)
            state, metrics = fns.update(state, _leave_out(merged, "coded") | grads)
            if _ERROR in metrics:
                raise ValueError(f"metrics[{_ERROR!r}] is a name of Compressed.")
            if lost is not None:
                treedef = jax.tree.structure(lost.value)
                lost = dataclasses.replace(lost, value=treedef.unflatten(kept))
                local = state.local | {_LOST: lost}
                state = dataclasses.replace(state, local=local)
            if fns.options.guard == "gradients":
                fine = jnp.isfinite(jnp.stack([x.sum() for x in total])).all()
                refused = lambda x: jnp.where(fine, x, jnp.nan)  # noqa: E731
                metrics["loss"] = jax.tree.map(refused, metrics["loss"])
            return state, metrics | {_ERROR: error}

        def init_fn(params: Any) -> dict[str, Any]:
            return fns.init(params) | self._first(fns.trained(params))

        return fns._replace(tower=tower_fn, update=update_fn, init=init_fn)

    def _first(self, params: Any) -> dict[str, Any]:
        """One tower's rounding errors before the first step: 0."""
        kept = jax.tree.map(lambda x: _widened(x) if self._codes(x) else None, params)
        if not jax.tree.leaves(kept):
            raise ValueError(
                f"{self!r} codes floating leaves above {self.above_bytes} bytes, and"
                " params has none. Lower above_bytes, or leave it out."
            )
        if not self.error_feedback:
            return {}
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), kept)
        return {"local": {_LOST: tj.TowerLocal(zeros, tj.Reduction.SUM, name=_LOST)}}

    def _codes(self, x: Any) -> bool:
        is_rows = isinstance(x, tj.sparse.IndexedRows)  # of a table, sent as rows
        return not is_rows and (
            jnp.issubdtype(jnp.result_type(x), jnp.floating)
            and jnp.size(x) * _widened(x).dtype.itemsize > self.above_bytes
        )

    def _split(self, grads: Any) -> tuple[Any, list[jax.Array]]:
        """The gradient with a `_Coded` for each leaf to encode, and these leaves."""
        coded: list[jax.Array] = []

        def take_out(x: Any) -> Any:
            if not self._codes(x):
                return x
            coded.append(x)
            return _Coded()

        is_rows = lambda x: isinstance(x, tj.sparse.IndexedRows)  # noqa: E731
        if isinstance(grads, tj.Weighted):
            rest = jax.tree.map(take_out, grads.sum, is_leaf=is_rows)
            return tj.Weighted(rest, grads.weight), coded
        return tj.Sum(jax.tree.map(take_out, grads.value, is_leaf=is_rows)), coded

    def _sum(
        self,
        rows: list[jax.Array],
        lost: list[jax.Array],
        weight: jax.Array,
        devices: int,
    ) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        """The coded sums of rows ``[T, ...]``, what is lost, and how much at most."""

        def on_device(
            rows: list[jax.Array], lost: list[jax.Array], weight: jax.Array
        ) -> Any:
            # Errors are kept of the mean, as the next batch may have another weight.
            units = [jnp.where(weight == 0, 1, weight).astype(x.dtype) for x in rows]
            x = [x.sum(0) / unit for x, unit in zip(rows, units, strict=True)]
            # The rows of a device's towers add up to its rounding errors.
            x = [v + own.sum(0) for v, own in zip(x, lost, strict=True)] if lost else x
            error, own = jnp.float32(0), [jnp.zeros_like(v) for v in x]
            if devices > 1:
                fn = functools.partial(self._sum_encoded, num_devices=devices)
                x, own, error = _differentiate_exactly(fn)(x)
            x = [v * unit for v, unit in zip(x, units, strict=True)]
            # A mean without weight is 0, so that nothing of it is sent.
            kept = [
                jnp.where(weight == 0, row, jnp.zeros_like(row).at[0].set(v))
                for v, row in zip(own, lost, strict=False)
            ]
            return x, kept, error

        if devices == 1:
            return on_device(rows, lost, weight)
        split, whole = PartitionSpec(_AXIS), PartitionSpec()
        return jax.shard_map(
            on_device,
            mesh=AbstractMesh((devices,), (_AXIS,), axis_types=(AxisType.Auto,)),
            in_specs=(split, split, whole),
            out_specs=(whole, split, whole),
            check_vma=False,
        )(rows, lost, weight)

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
        got = lax.all_to_all(sent, _AXIS, split_axis=0, concat_axis=0, tiled=True)
        share = code.decode(got, size, x.dtype).sum(axis=0)
        sent = code.encode(share)
        share_lost = share - code.decode(sent, size, x.dtype)
        row = lax.axis_index(_AXIS)
        norms = functools.partial(self._norms_squared, [x.size for x in padded])
        squares = norms(lost), norms(share_lost, row * (size // self.block))
        errors = jnp.concatenate(squares).view(jnp.uint8)
        gathered = lax.all_gather(jnp.concatenate([sent, errors]), _AXIS)
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
        # Blocks behind are 0, and so add nothing to the leaf that is said there.
        leaf = jnp.pad(leaf, (0, len(each)))
        leaf = lax.dynamic_slice_in_dim(leaf, first, len(each))
        return jax.ops.segment_sum(each, leaf, num_segments=len(sizes))


def _differentiate_exactly(coded_sum: Callable[..., Any]) -> Callable[..., Any]:
    """Give a sum of codes the derivative of the exact sum, since rounding has none."""
    fn = jax.custom_jvp(coded_sum)

    def jvp(primals: Any, tangents: Any) -> Any:
        total, lost, error = fn(*primals)
        moved = lax.psum(tangents[0], _AXIS)
        still = jax.tree.map(jnp.zeros_like, (lost, error))
        return (total, lost, error), (moved, *still)

    fn.defjvp(jvp)
    return fn


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Coded:
    """Stands in a gradient, without leaves, for one that is sent in codes."""


def _joined(grads: Any, total: list[jax.Array]) -> dict[str, Any]:
    """The gradient with the sums of what was sent in codes, by its name."""
    left = iter(total)
    is_coded = lambda x: isinstance(x, _Coded)  # noqa: E731
    fill = lambda x: next(left) if is_coded(x) else x  # noqa: E731
    return {"grads": jax.tree.map(fill, grads, is_leaf=is_coded)}


def _leave_out(tree: Any, name: str) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if key != name}


def _is_whole(number: Any, lowest: int = 2) -> bool:
    return isinstance(number, int | np.integer) and bool(number >= lowest)


def _widened(x: Any) -> jax.ShapeDtypeStruct:
    """The shape of ``x``, and the dtype in which gradients are added."""
    dtype = jnp.result_type(x)
    wide = jnp.float32 if jnp.finfo(dtype).bits < 32 else dtype
    return jax.ShapeDtypeStruct(jnp.shape(x), wide)


def _largest_error(squares: jax.Array, of_sums: jax.Array) -> jax.Array:
    """A bound of the leaves' relative errors; squared errors are ``[D, 2, leaves]``."""
    error = jnp.sqrt(squares[:, 0]).sum(axis=0) + jnp.sqrt(squares[:, 1].sum(axis=0))
    empty = (error == 0) & (of_sums == 0)
    return jnp.where(empty, 0, error / jnp.sqrt(jnp.where(empty, 1, of_sums))).max()
