"""How many FLOPs does a compiled program make? Counted in its text, loops by trips."""

import re
from collections.abc import Callable

from towerjax.step.report.formulas import (
    Flops,
    Window,
    conv_flops,
    dot_flops,
    largest,
    product_flops,
    sum_of,
)
from towerjax.step.report.hlo import Module, Operation, Shape

_ARITHMETIC = frozenset(
    "add subtract multiply divide power remainder maximum minimum negate abs sign floor"
    " ceil round-nearest-afz round-nearest-even exponential exponential-minus-one log"
    " log-plus-one logistic tanh sine cosine tan sqrt rsqrt cbrt erf atan2 clamp acos"
    " acosh asin asinh atanh cosh sinh".split()
)
_NOT_COUNTED = frozenset(
    "fft cholesky triangular-solve ragged-dot scaled-dot reduce-window"
    " select-and-scatter sort".split()
)
_PRODUCTS = re.compile(r"^__cublas\$|^__onednn\$matmul|^__hipblas|^__cutlass\$gemm")
_CONVOLUTIONS = re.compile(r"^__cudnn\$conv")


def flops_of(module: Module) -> Flops:
    """What one device does in one call, by our own count.

    XLA's ``cost_analysis`` counts the body of a loop once; here it counts as often as
    it runs. A loop whose trips the compiler does not know counts once, and is noted;
    of a condition the branch that makes most counts.
    """
    return _Counter(module).of(module.entry)


class _Counter:
    """Counts each computation once, however often it is called."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._known: dict[str, Flops] = {}

    def of(self, computation: str) -> Flops:
        if computation not in self._known:
            operations = self._module.computations[computation].values()
            self._known[computation] = sum_of(
                self._of_operation(computation, op) for op in operations
            )
        return self._known[computation]

    def _of_operation(self, computation: str, op: Operation) -> Flops:
        called = op.called()
        if op.opcode == "while":
            return self._of_while(op, called)
        if op.opcode == "conditional":
            return largest(self.of(name) for name in called.values())
        if op.opcode == "call":
            return self.of(called["to_apply"])
        if "calls" in called:  # a fusion, or what runs beside
            return self.of(called["calls"])
        if op.opcode in _ARITHMETIC:
            floating = [shape.size for shape in op.shapes if shape.is_floating]
            return Flops(other=sum(floating))
        if op.opcode in _NOT_COUNTED:
            floating = any(shape.is_floating for shape in op.shapes)
            noted = floating and op.opcode != "sort"
            return Flops(notes=(f"{op.opcode} is not counted",) if noted else ())
        rule = _RULES.get(op.opcode)
        if rule is None:
            return Flops()
        return rule(op, self._module.operand_shapes(computation, op))

    def _of_while(self, op: Operation, called: dict[str, str]) -> Flops:
        one = self.of(called["body"]) + self.of(called["condition"])
        if op.trips is not None:
            return one.times(op.trips)
        if not one.total:
            return one
        return one + Flops(notes=("a loop of unknown trips is counted once",))


def _dot(op: Operation, operands: list[Shape]) -> Flops:
    contracted = op.dims("lhs_contracting_dims")
    return Flops(matmul=dot_flops(operands[0].dims, op.shapes[0].dims, contracted))


def _reduce(op: Operation, operands: list[Shape]) -> Flops:
    inputs = operands[: len(operands) // 2]
    added = [
        before.size - after.size
        for before, after in zip(inputs, op.shapes, strict=True)
        if after.is_floating
    ]
    return Flops(other=sum(added))


def _scatter(op: Operation, operands: list[Shape]) -> Flops:
    updates = operands[(len(operands) // 2) + 1 :]
    return Flops(other=sum(shape.size for shape in updates if shape.is_floating))


def _convolution(op: Operation, operands: list[Shape]) -> Flops:
    return _conv_of_roles(op, operands[0], operands[1], op.shapes[0])


def _conv_of_roles(op: Operation, lhs: Shape, rhs: Shape, out: Shape) -> Flops:
    labels = re.search(r"\bdim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    if labels is None:
        return Flops(notes=(f"{op.opcode} without dim_labels is not counted",))
    of_lhs, of_rhs, of_out = labels[1], labels[2], labels[3]
    spatial = sorted(label for label in of_lhs if label.isdigit())
    kernel = rhs.dims[of_rhs.index("i")] * rhs.dims[of_rhs.index("o")]
    made = conv_flops(
        [lhs.dims[of_lhs.index(label)] for label in spatial],
        _windows(op, len(spatial)),
        batch=out.dims[of_out.index("b")],
        kernel=kernel,
    )
    return Flops(matmul=made)


def _windows(op: Operation, rank: int) -> list[Window]:
    found = re.search(r"\bwindow=\{([^}]*)\}", op.attributes)
    fields = dict(part.split("=") for part in (found[1].split() if found else ()))
    pads = [
        pad.split("_") for pad in fields.get("pad", "x".join(["0_0"] * rank)).split("x")
    ]

    def numbers(name: str) -> list[int]:
        text = fields.get(name)
        return [int(x) for x in text.split("x")] if text else [1] * rank

    return [
        Window(size, stride, int(low), int(high), base_dilation, dilation)
        for size, stride, (low, high), base_dilation, dilation in zip(
            numbers("size"),
            numbers("stride"),
            pads,
            numbers("lhs_dilate"),
            numbers("rhs_dilate"),
            strict=True,
        )
    ]


def _custom_call(op: Operation, operands: list[Shape]) -> Flops:
    found = re.search(r'\bcustom_call_target="([^"]*)"', op.attributes)
    target = found[1] if found else "custom-call"
    if _PRODUCTS.match(target):
        dims = [operands[0].dims, operands[1].dims, op.shapes[0].dims]
        return Flops(matmul=product_flops(*dims))
    if _CONVOLUTIONS.match(target):
        # The labels are those of the forward convolution, x * w -> y.
        first, second, out = operands[0], operands[1], op.shapes[0]
        roles = {
            "__cudnn$convBackwardInput": (out, second, first),
            "__cudnn$convBackwardFilter": (first, out, second),
        }
        return _conv_of_roles(op, *roles.get(target, (first, second, out)))
    return Flops(notes=(f"the call of {target} is not counted",))


_RULES: dict[str, Callable[[Operation, list[Shape]], Flops]] = {
    "dot": _dot,
    "convolution": _convolution,
    "reduce": _reduce,
    "scatter": _scatter,
    "custom-call": _custom_call,
}
