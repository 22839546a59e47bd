"""Compare the kernels of absent GPUs' programs: equal ones give equal bits.

Each case of `benchmarks.same_bits` is compiled for several numbers of absent devices.
What each kernel computes with floating values is compared with the kernels for the
first number. Equal kernels are needed for the same bits, and are not enough: among
equal kernels a device still chooses the fastest, unless XLA_FLAGS says
``--xla_gpu_deterministic_ops=true``.

Run: ``python -m benchmarks.same_kernels [--only attention] [--on h200]``
"""

import collections
import re
import sys
from collections.abc import Sequence

import jax

from benchmarks.harness import begin, options_of, parser_of
from benchmarks.same_bits import LOCAL, Case, cases, train_step
from towerjax.check.report.hlo import Module, Operation, parse
from towerjax.collectives import PinnedTree
from towerjax.mesh.absent import Absent
from towerjax.towers.strategies import Mirrored

_NO_ROUNDING = frozenset(
    """abs after-all and bitcast bitcast-convert broadcast call clamp compare complex
    concatenate conditional constant copy dynamic-slice dynamic-update-slice floor
    fusion-done gather get-tuple-element imag iota is-finite maximum minimum negate not
    opt-barrier or pad parameter partition-id real reshape reverse select sign slice
    transpose tuple while""".split()
)
_FUSED = ("fusion", "fusion-start")  # fused operations, perhaps beside others
_OF_SUMS = "towerjax.sums"  # the scope in which towers are added

Kernels = collections.Counter[tuple[str, ...]]


def kernels_of(text: str) -> Kernels:
    """Count how often a compiled program names each kernel.

    A kernel is ``(tiles, operation, ...)``: what it computes with floating values, and
    in which tiles. Operations that round nothing, orders of dims, dims of 1, and the
    tree that adds the towers' sums are left out. This tree has other parts if nothing
    is sent.
    """
    module = parse(text)
    within = {
        called
        for inside in module.computations.values()
        for op in inside.values()
        for called, kind in op.called().items()
        if kind == "to_apply" or op.opcode in _FUSED
    }
    found = Kernels()
    for name in module.computations.keys() - within:
        for op in module.computations[name].values():
            if computed := sorted(_computed(module, op)):
                tiles = re.search(r'"output_tiles":(\[.*?\]\}\])', op.attributes)
                found[(tiles[1] if tiles else "", *computed)] += 1
    return found


def _computed(module: Module, operation: Operation) -> list[str]:
    """Return what an operation, and those fused into it, compute with floats."""
    if operation.opcode in _FUSED:
        (called,) = operation.called()
        inside = module.computations[called]
        return [x for op in inside.values() for x in _computed(module, op)]
    rounded = [shape for shape in operation.shapes if shape.dtype[0] in "bcf"]
    is_sum = _OF_SUMS in operation.attributes  # this is in JAX's name of the operation
    if not rounded or is_sum or operation.opcode in _NO_ROUNDING:
        return []
    dims = sorted(dim for dim in rounded[0].dims if dim > 1)
    return [f"{operation.opcode} {rounded[0].dtype}{dims}"]


def compiled(case: Case, strategy: Mirrored) -> str:
    """Return the text of a case's train step, compiled for absent devices."""
    step = train_step(case, strategy)
    shapes = jax.eval_shape(lambda: case.params())
    batch = next(case.batches(strategy.num_towers, 1))
    state = step.shapes(shapes, local=LOCAL)
    return step.program(state, jax.eval_shape(lambda: batch)).call.as_text()


def compare(
    case: Case, *, target: str, towers: int, devices: Sequence[int]
) -> dict[int, Kernels]:
    """Return by ``D`` the kernels that differ from those for the first ``D``.

    Missing kernels are counted, too.
    """
    found: dict[int, Kernels] = {}
    for number in devices:
        absent = Absent(target, number)
        ops = PinnedTree()
        strategy = Mirrored(
            absent, towers=towers, tower_loop="scan", cross_tower_ops=ops
        )
        found[number] = kernels_of(compiled(case, strategy))
    first = found[devices[0]]
    return {number: (now - first) + (first - now) for number, now in found.items()}


def main() -> None:
    """Print the table; end with status 1 if kernels differ."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--on", default="h200", help="a GPU, as tj.Absent takes it")
    parser.add_argument("--towers", type=int, default=8)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8])
    options = options_of(parser, only="linear", devices=[1, 2])
    about = f"kernels that are not as for {options.devices[0]} {options.on}"
    columns = {"case": "", **{f"D={number}": "" for number in options.devices}}
    table = begin(about, columns, options)
    differ = False
    for name, case in cases().items():
        if options.only not in name or case.by_model_fn:
            continue
        given = {"target": options.on, "towers": options.towers}
        found = compare(case, devices=options.devices, **given)
        differ = differ or any(found.values())
        table.row(name, *(kernels.total() for kernels in found.values()))
    sys.exit(int(differ))


if __name__ == "__main__":
    main()
