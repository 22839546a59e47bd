"""What does JAX offer under no public name? All of it that is used here."""

import collections
import functools
from typing import Any

import jax
import numpy as np
from jax._src import api_util, distributed
from jax._src.config import explicit_device_put_scope
from jax._src.core import extend_axis_env_nd
from jax._src.interpreters.pxla import batched_device_put
from jax.sharding import NamedSharding
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

# What a compiled program raises under ``jax_debug_nans`` and ``jax_debug_infs``.
FoundNonFinite = api_util.InternalFloatingPointError


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """As ``jax.device_put`` of an array of a dtype that devices hold, which calls this.

    In a quarter of its time, which for small batches is longer than a step's call. The
    devices may share the array's memory.
    """
    aval, parts, devices = _split(array.shape, array.dtype, sharding)
    with explicit_device_put_scope():  # of which ``jax.transfer_guard`` takes note
        return batched_device_put(aval, sharding, [array[i] for i in parts], devices)


@functools.lru_cache(1024)
def _split(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Any:
    """The type of such an array, which part of it goes to which device."""
    zeros = np.broadcast_to(np.zeros((), dtype), shape)
    parts = sharding.addressable_devices_indices_map(shape)
    aval = jax.device_put(zeros, sharding).aval
    return aval, list(parts.values()), list(parts)


def carries_gradient(x: Any, of: Any) -> bool:
    """Does the gradient by ``of``, in whose making this is called, go through ``x``?

    Not through what ``lax.stop_gradient`` or a comparison gave.
    """
    made_by = [y._trace.tag for y in (x, of) if hasattr(y, "tangent")]
    return len(made_by) == 2 and made_by[0] is made_by[1]


def with_axis(name: str) -> Any:
    """A context in which a named axis of one is bound, as ``lax.axis_size`` tells."""
    return extend_axis_env_nd([(name, 1)])


def coordinator_client() -> Any:
    """JAX's client of the job's key-value store."""
    return distributed.global_state.client


def inline_and_merge(lowered: Any) -> None:
    """Rewrites a lowered program: no calls are left, and no equal operations.

    They are merged in each computation by itself, as XLA does it. MLIR's own passes do
    not inline in JAX's build, and merge what a loop computes with what stands before.
    """
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
    """Puts what functions do where they are called."""
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


# Of computations of their own, or with effects.
_NEVER_MERGED = frozenset(
    f"stablehlo.{name}"
    for name in (
        "while case if rng infeed outfeed send recv after_all create_token".split()
    )
)


def _merge_in(block: Any) -> None:
    """Makes equal operations of a block one, and of each block inside of them."""
    first: dict[Any, Any] = {}
    for op in [each.operation for each in block.operations]:
        for region in op.regions:
            for inside in region.blocks:
                _merge_in(inside)
        if not _may_merge(op):
            continue
        same = first.setdefault(_key(op, {}), op)
        if same is not op:
            for result, other in zip(op.results, same.results, strict=True):
                result.replace_all_uses_with(other)
            op.erase()


def _may_merge(op: Any) -> bool:
    """Does an operation only compute, so that one will do for two?"""
    if op.name == "stablehlo.custom_call":
        attributes = op.attributes
        return not (
            "has_side_effect" in attributes and attributes["has_side_effect"].value
        )
    is_plain = op.name.startswith(("stablehlo.", "chlo.")) and len(op.results) > 0
    return is_plain and op.name not in _NEVER_MERGED


def _key(op: Any, inside: dict[Any, int]) -> Any:
    """What equal operations have in common; values of its own regions are numbered."""
    operands = tuple(inside.get(x, x) for x in op.operands)
    attributes = _attributes(op)
    regions = []
    for region in op.regions:
        for block in region.blocks:
            inside = inside | {
                x: len(inside) + i for i, x in enumerate(block.arguments)
            }
            for each in block.operations:
                regions.append(_key(each.operation, inside))
                for x in each.operation.results:
                    inside = inside | {x: len(inside)}
    types = tuple(x.type for x in op.results)
    return op.name, operands, attributes, types, tuple(regions)


def _attributes(op: Any) -> tuple[Any, ...]:
    """What an operation says besides its operands, as what can be compared."""
    if op.name == "stablehlo.constant" and "complex<" in str(op.results[0].type):
        return (str(op.attributes[0]),)  # JAX's bindings do not hand the numbers out
    return tuple((name, op.attributes[name]) for name in op.attributes)
