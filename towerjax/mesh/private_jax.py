"""All uses of JAX's private modules, each with the versions that have it."""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax._src import api_util, distributed  # 0.10 to 0.12
from jax._src.array import ArrayImpl  # 0.10 to 0.12
from jax._src.config import explicit_device_put_scope  # 0.10 to 0.12
from jax._src.core import extend_axis_env_nd  # 0.10 to 0.12
from jax.extend.core import Literal
from jax.extend.mlir import ir
from jax.extend.mlir.passmanager import PassManager
from jax.sharding import NamedSharding
from jaxlib import xla_client  # 0.10 to 0.12

# The class of arrays on devices, which keys and tracers are not. To ask for it takes a
# fifth of the time of ``isinstance(x, jax.Array)``.
DeviceArray = ArrayImpl

_COPIED = xla_client.HostBufferSemantics.IMMUTABLE_ONLY_DURING_CALL
_SHARED = xla_client.HostBufferSemantics.ZERO_COPY

# Raised by a compiled program under ``jax_debug_nans`` and ``jax_debug_infs``.
FoundNonFinite = api_util.InternalFloatingPointError


def put(
    array: np.ndarray, sharding: NamedSharding, *, shared: bool = False
) -> jax.Array:
    """A copy on the devices, in a quarter of the time of ``device_put``, or shared."""
    aval, parts, devices = _split(array.shape, array.dtype, sharding)
    with explicit_device_put_scope():  # ``jax.transfer_guard`` may allow these alone
        return xla_client.batched_device_put(
            aval,
            sharding,
            [array[i] for i in parts],
            devices,
            host_buffer_semantics=_SHARED if shared else _COPIED,
        )


@functools.lru_cache(1024)
def _split(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """The aval of an array of that sharding, each shard's index, and its device."""
    zeros = np.broadcast_to(np.zeros((), dtype), shape)
    parts = sharding.addressable_devices_indices_map(shape)
    aval = jax.device_put(zeros, sharding).aval
    return aval, list(parts.values()), list(parts)


def carries_gradient(x: Any, of: Any) -> bool:
    """Does ``x`` carry a tangent of the differentiation by ``of``, now being traced?"""
    # 0.10 to 0.12
    made_by = [y._trace.tag for y in (x, of) if hasattr(y, "tangent")]
    return len(made_by) == 2 and made_by[0] is made_by[1]


def is_literal_zero(x: Any) -> bool:
    """Is ``x``, now being traced, the number 0, as the tangent of a constant is?"""
    literal = getattr(x, "val", None)
    return isinstance(literal, Literal) and not np.any(literal.val)


def bind_axis(name: str) -> Any:
    """A context in which a named axis of size 1 is bound."""
    return extend_axis_env_nd([(name, 1)])


def coordinator_client() -> Any:
    """JAX's client of the job's key-value store."""
    return distributed.global_state.client


def read_arguments(compiled: Any) -> list[int]:
    """The numbers of the leaves among its arguments that a program reads."""
    return sorted(compiled._executable._kept_var_idx)  # 0.10 to 0.12


def inline_and_merge(lowered: Any) -> None:
    """Inline calls of a lowered program and merge equal operations, in place.

    Broadcasts are written in one way, so that those of one array are equal to XLA, too.
    """
    # JAX's build of MLIR has no inliner, and its CSE would merge operations of a loop
    # body with earlier ones; XLA merges within a block alone.
    module = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        functions = {
            ir.StringAttr(op.operation.attributes["sym_name"]).value: op.operation
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        (block,) = functions["main"].regions[0].blocks
        _inline_in(block, functions)
        _merge_in(block)
        PassManager.parse("builtin.module(symbol-dce)").run(module.operation)


def _inline_in(block: Any, functions: dict[str, Any]) -> None:
    """Replace each call in a block by the body of its function."""
    calls = collections.deque(each.operation for each in block.operations)
    while calls:
        op = calls.popleft()
        for region in op.regions:
            for inside in region.blocks:
                _inline_in(inside, functions)
        if op.name != "func.call":
            continue
        called = functions[ir.FlatSymbolRefAttr(op.attributes["callee"]).value]
        copy = called.clone(ir.InsertionPoint(op))
        body = copy.regions[0].blocks[0]
        for argument, operand in zip(body.arguments, op.operands, strict=True):
            argument.replace_all_uses_with(operand)
        *inside, end = [each.operation for each in body.operations]
        for each in inside:
            each.move_before(op)
        for result, value in zip(op.results, end.operands, strict=True):
            result.replace_all_uses_with(value)
        calls.extendleft(reversed(inside))
        copy.erase()
        op.erase()


# Operations with effects, and those whose regions are computations of their own.
_NEVER_MERGED = frozenset(
    f"stablehlo.{name}"
    for name in (
        "while case if rng infeed outfeed send recv after_all create_token".split()
    )
)


def _merge_in(block: Any) -> None:
    """Merge equal operations of a block, and of each block nested in it."""
    first: dict[Any, Any] = {}

    def merged(op: Any) -> Any:
        same = first.setdefault(_merge_key(op, {}), op)
        if same is not op:
            for result, other in zip(op.results, same.results, strict=True):
                result.replace_all_uses_with(other)
            op.erase()
        return same

    for op in [each.operation for each in block.operations]:
        for region in op.regions:
            for inside in region.blocks:
                _merge_in(inside)
        if op.name == "stablehlo.broadcast_in_dim":
            _broadcast_at_once(op, merged)
        if _may_merge(op):
            merged(op)


def _broadcast_at_once(op: Any, merged: Callable[[Any], Any]) -> None:
    """Let a broadcast begin with the fewest dims: no other's result, no dim of 1.

    Else XLA would drop these for each broadcast anew, and merge what it drops them from
    on several devices alone; and it divides otherwise by what is used once.
    """
    out, x = ir.RankedTensorType(op.result.type), op.operands[0]
    dims = [*op.attributes["broadcast_dimensions"]]
    while _made_by(x) == op.name:
        dims = [dims[at] for at in x.owner.attributes["broadcast_dimensions"]]
        x = x.owner.operands[0]
    given = ir.RankedTensorType(x.type)
    pairs = zip(given.shape, dims, strict=True)
    kept = [(size, at) for size, at in pairs if size == out.shape[at]]
    if len(kept) < len(dims):
        dims = [at for _, at in kept]
        less = ir.RankedTensorType.get([n for n, _ in kept], given.element_type)
        at = ir.InsertionPoint(op)
        reshape = ir.Operation.create("stablehlo.reshape", [less], [x], ip=at)
        x = merged(reshape).results[0]
    op.operands[0] = x
    op.attributes["broadcast_dimensions"] = ir.DenseI64ArrayAttr.get(dims)


def _made_by(x: Any) -> str:
    """The name of the operation that gives it; "" of an argument."""
    return getattr(x.owner, "name", "")


def _may_merge(op: Any) -> bool:
    """Has an operation no effect, so that two equal ones can be one?"""
    if op.name == "stablehlo.custom_call" and "has_side_effect" in op.attributes:
        return not op.attributes["has_side_effect"].value
    is_plain = op.name.startswith(("stablehlo.", "chlo.")) and len(op.results) > 0
    return is_plain and op.name not in _NEVER_MERGED


def _merge_key(op: Any, inside: dict[Any, int]) -> Any:
    """A key that equal operations share; values defined in its regions are numbered."""
    operands = tuple(inside.get(x, x) for x in op.operands)
    regions = []
    for block in (block for region in op.regions for block in region.blocks):
        defined = [*block.arguments]
        for each in block.operations:
            known = inside | {x: len(inside) + i for i, x in enumerate(defined)}
            regions.append(_merge_key(each.operation, known))
            defined += each.operation.results
    types = tuple(x.type for x in op.results)
    return op.name, operands, _attribute_key(op), types, tuple(regions)


def _attribute_key(op: Any) -> tuple[Any, ...]:
    """The attributes of an operation, hashable."""
    if op.name == "stablehlo.constant" and "complex<" in str(op.results[0].type):
        return (str(op.attributes[0]),)  # the bindings cannot read complex elements
    return tuple((name, op.attributes[name]) for name in op.attributes)
