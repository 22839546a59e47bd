"""Lower and compile programs so that bits do not depend on the number of devices."""

import collections
import re
import warnings
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.extend.mlir.passmanager import PassManager
from jax.stages import Compiled, Lowered, Traced

from towerjax.mesh.placement import Placement
from towerjax.types.boundary import warn


def lower_on_devices(traced: Traced, placement: Placement) -> Lowered:
    """Lower a traced program; for ``tower_loop="scan"`` in a form that fixes its bits.

    For several devices XLA first inlines calls and merges equal operations. For one
    device it first rewrites operations by how often their operands are used: a division
    by a value that is used once becomes a product with its inverse. So bits would
    depend on the number of devices. To avoid that, calls are inlined and operations are
    merged here.
    """
    # JAX would lower for the platform of this machine, but absent devices have another.
    absent = {"gpu": "cuda"}.get(placement.platform, "tpu")
    platforms = None if placement.absent is None else (absent,)
    try:
        lowered = traced.lower(lowering_platforms=platforms)
    except ValueError as error:
        if "ordered effects" in str(error):
            error.add_note(
                "Devices go at the same time, in no order: write ordered=False in"
                " jax.debug.print and callbacks, or take one device."
            )
        raise
    if placement.tower_loop == "scan":
        # In a tower of several devices XLA splits arrays itself, and fuses products in
        # another way, so divisions are left as they are.
        inline_and_merge(lowered, inverses=not placement.within)
    return lowered


def compile_on_devices(lowered: Lowered, placement: Placement) -> Compiled:
    """Compile a lowered program; for absent GPUs with cuBLAS kernels, if needed."""
    if placement.absent is None:
        return lowered.compile()
    with warnings.catch_warnings():
        # JAX's persistent cache stores programs for absent devices, and cannot read
        # them.
        warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
        try:
            return lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "output tile sizes" not in str(error):
                raise
        # XLA chooses tiles before it knows whether they fit, and finds others only by
        # trials on the device: openxla/xla, pull request 36792.
        compiled = lowered.compile({"xla_gpu_enable_triton_gemm": False})
    warn(
        "XLA's own kernel for a matrix product of this program does not fit, and there"
        " is no GPU here to try others on. The program was compiled for cuBLAS, with"
        " xla_gpu_enable_triton_gemm=false."
    )
    return compiled


def inline_and_merge(lowered: Lowered, *, inverses: bool = True) -> None:
    """Inline calls of a lowered program and merge equal operations, in place.

    With ``inverses`` a division by a broadcast value becomes a product: see
    `_multiply_by_inverse`. Without ``inverses``, as in a tower of several devices,
    divisions stay, and sharding constraints that leave all dims open are removed.
    """
    # MLIR in JAX's build has no inliner. Its CSE is not used, because it would merge
    # operations of a loop's body with earlier ones, while XLA merges only within a
    # block.
    module: Any = lowered.compiler_ir("stablehlo")
    with module.context, ir.Location.unknown():
        functions = {
            ir.StringAttr(op.operation.attributes["sym_name"]).value: op.operation
            for op in module.body.operations
            if op.operation.name == "func.func"
        }
        (block,) = functions["main"].regions[0].blocks
        _inline_in(block, functions)
        _merge_in(block, inverses)
        PassManager.parse("builtin.module(symbol-dce)").run(module.operation)


def _inline_in(block: Any, functions: dict[str, Any]) -> None:
    """Replace each call in a block by the body of its function."""
    calls = collections.deque(view.operation for view in block.operations)
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
        *inside, end = [view.operation for view in body.operations]
        for view in inside:
            view.move_before(op)
        for result, value in zip(op.results, end.operands, strict=True):
            result.replace_all_uses_with(value)
        calls.extendleft(reversed(inside))
        copy.erase()
        op.erase()


# This matches a sharding constraint that leaves all dims open. JAX writes one behind
# each operation where some axes of a mesh are manual. XLA simplifies products across
# such a constraint on one group of devices, and not on several, so that bits differ.
_OPEN = re.compile(r"#sdy\.sharding<@\w+, \[[{}?, ]*\]>")
_BROADCAST = "stablehlo.broadcast_in_dim"
# These are never merged: they have effects, or their regions are computations.
_NEVER_MERGED = frozenset(
    f"stablehlo.{name}"
    for name in (
        "while case if rng infeed outfeed send recv after_all create_token".split()
    )
)


def _merge_in(block: Any, inverses: bool) -> None:
    """Merge equal operations of a block, and of each block nested in it."""
    first: dict[Any, Any] = {}

    def merged(op: Any) -> Any:
        same = first.setdefault(_merge_key(op, {}), op)
        if same is not op:
            for result, other in zip(op.results, same.results, strict=True):
                result.replace_all_uses_with(other)
            op.erase()
        return same

    for op in [view.operation for view in block.operations]:
        for region in op.regions:
            for inside in region.blocks:
                _merge_in(inside, inverses)
        if not inverses and _says_nothing(op):
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
        elif inverses and _divides_by_broadcast(op):
            _multiply_by_inverse(op, merged)
        elif _may_merge(op):
            merged(op)


def _says_nothing(op: Any) -> bool:
    is_constraint = op.name == "sdy.sharding_constraint"
    return is_constraint and bool(_OPEN.fullmatch(str(op.attributes["sharding"])))


def _divides_by_broadcast(op: Any) -> bool:
    if op.name != "stablehlo.divide" or _made_by(op.operands[1]) != _BROADCAST:
        return False
    return isinstance(ir.RankedTensorType(op.result.type).element_type, ir.FloatType)


def _multiply_by_inverse(op: Any, merged: Callable[[Any], Any]) -> None:
    """Replace a division by a broadcast value: multiply by the inverse instead.

    XLA:CPU does this itself where the divisor is used once. Whether it is used once
    depends on the number of devices: on one it divides a whole array, on others each
    piece.
    """
    x, divisor = op.operands
    kind: Any = ir.RankedTensorType(x.type).element_type
    dims: Any = range(x.type.rank)
    wide = ir.F32Type.get() if kind.width < 32 else kind
    while _made_by(divisor) == _BROADCAST:
        spread = divisor.owner
        dims = [dims[at] for at in spread.attributes["broadcast_dimensions"]]
        divisor = spread.operands[0]

    def add(fn: Callable[..., Any], *args: Any) -> Any:
        with ir.InsertionPoint(op):
            return merged(fn(*args).owner).results[0]

    def cast(x: Any, kind: Any) -> Any:
        wide_divisor = ir.RankedTensorType(x.type)
        to = ir.RankedTensorType.get(wide_divisor.shape, kind)
        return x if wide_divisor == to else add(stablehlo.convert, to, x)

    x = cast(x, wide)
    wide_divisor = cast(divisor, wide)
    ones = ir.DenseElementsAttr.get_splat(
        wide_divisor.type, ir.FloatAttr.get(wide, 1.0)
    )
    inverse = add(stablehlo.divide, add(stablehlo.constant, ones), wide_divisor)
    inverse = add(stablehlo.broadcast_in_dim, x.type, inverse, list(dims))
    product = cast(add(stablehlo.multiply, x, inverse), kind)
    op.result.replace_all_uses_with(product)
    op.erase()


def _made_by(x: Any) -> str:
    """Name the operation whose result ``x`` is; "" for an argument."""
    return getattr(x.owner, "name", "")


def _may_merge(op: Any) -> bool:
    """Return whether an operation has no effect, so that equal ones can be merged."""
    if op.name == "stablehlo.custom_call" and "has_side_effect" in op.attributes:
        return not op.attributes["has_side_effect"].value
    is_plain = op.name.startswith(("stablehlo.", "chlo.")) and len(op.results) > 0
    return is_plain and op.name not in _NEVER_MERGED


def _merge_key(op: Any, inside: dict[Any, int]) -> Any:
    """Make a key that is the same for two operations if they compute the same.

    ``inside`` numbers the values that are defined in the operation's regions.
    """
    operands = tuple(inside.get(x, x) for x in op.operands)
    regions = []
    for block in (block for region in op.regions for block in region.blocks):
        defined = [*block.arguments]
        for inner_op in block.operations:
            known = inside | {x: len(inside) + i for i, x in enumerate(defined)}
            regions.append(_merge_key(inner_op.operation, known))
            defined += inner_op.operation.results
    types = tuple(x.type for x in op.results)
    return op.name, operands, _attribute_key(op), types, tuple(regions)


def _attribute_key(op: Any) -> tuple[Any, ...]:
    """Make a hashable value of an operation's attributes."""
    if op.name == "stablehlo.constant" and "complex<" in str(op.results[0].type):
        return (str(op.attributes[0]),)  # the bindings cannot read complex elements
    return tuple((name, op.attributes[name]) for name in op.attributes)
