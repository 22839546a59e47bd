"""The collectives of a compiled program: bytes, trips, schedule and source line."""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from towerjax.proof.equation import format_line, is_library
from towerjax.step.report.hlo import Module, Operation

_COLLECTIVES = frozenset(
    "all-reduce all-gather all-to-all reduce-scatter collective-permute"
    " collective-broadcast ragged-all-to-all".split()
)
_NO_WORK = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all".split()
)
_WHERE_STEPS_ARE_MADE = str(Path(__file__).parents[1] / "program.py")


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """One collective that the compiler left, as one device sees it in one call."""

    opcode: str  # such as "all-reduce"
    bytes: int  # of its operands, each time
    sent: int  # each time, if it travels round a ring: ring_bytes
    dtypes: tuple[str, ...]  # of the operands, each once
    num_devices: int  # in a group
    trips: int  # how often in a call; 1 in a loop of unknown trips
    trips_known: bool
    start: int  # its place in the schedule: working operations before it
    end: int  # start, plus the working operations that run while it is under way
    length: int  # working operations in its computation
    beside: int  # bytes read and written between start and end: what hides it
    line: str  # the user's, "train.py:12 (loss_fn)"; else towerjax's, or ""


def ring_bytes(opcode: str, operand_bytes: int, num_devices: int) -> int:
    """Bytes that each of ``n`` devices sends if a collective runs as a ring.

    Of ``b`` bytes of operands: all-reduce ``2 b (n - 1) / n``; reduce-scatter and
    all-to-all ``b (n - 1) / n``; all-gather ``b (n - 1)``; a permute or broadcast
    ``b``.
    """
    others = num_devices - 1
    if others <= 0:
        return 0
    if opcode == "all-gather":
        return operand_bytes * others
    if opcode in ("collective-permute", "collective-broadcast"):
        return operand_bytes
    rounds = 2 if opcode == "all-reduce" else 1
    return -(-rounds * operand_bytes * others // num_devices)


def collectives_of(module: Module) -> tuple[CompiledCollective, ...]:
    """Every collective of the program, in the order of its text from the entry on."""
    return tuple(_collectives_in(module, module.entry, 1, True))


def _collectives_in(
    module: Module, computation: str, trips: int, known: bool, when: Any = None
) -> Iterator[CompiledCollective]:
    there = list(module.computations[computation].values())
    for op in there:
        opcode = op.opcode.removesuffix("-start")
        if opcode in _COLLECTIVES:
            size = sum(shape.bytes for shape in op.inputs)
            devices = _group_size(module, op)
            yield CompiledCollective(
                opcode,
                size,
                ring_bytes(opcode, size, devices),
                tuple(dict.fromkeys(shape.dtype for shape in op.inputs)),
                devices,
                trips,
                known,
                *(when or _schedule_of(there, op)),
                line=source_line(module, op),
            )
            continue
        inside = trips * (op.trips or 1), known and (op.trips or op.opcode != "while")
        at = _schedule_of(there, op) if op.opcode == "async-start" else when
        for name in op.called().values():
            yield from _collectives_in(module, name, inside[0], bool(inside[1]), at)


def _schedule_of(there: list[Operation], op: Operation) -> tuple[int, ...]:
    """``start``, ``end``, ``length`` and ``beside`` of a collective."""
    working = [other for other in there if other.opcode not in _NO_WORK]
    start, done = working.index(op), op.opcode.replace("-start", "-done")
    waits = [other.opcode == done and op.name in other.operands for other in working]
    end = waits.index(True) if any(waits) else start
    between = working[start + 1 : end]
    between = [x for x in between if not x.opcode.endswith(("-start", "-done"))]
    moved = sum(shape.bytes for x in between for shape in (*x.shapes, *x.inputs))
    return start, start + len(between), len(working), moved


def _group_size(module: Module, op: Operation) -> int:
    """The devices of a group: HLO writes a list of groups, a grid, or mesh axes."""
    text = op.attributes
    if found := re.search(r"\breplica_groups=\{\{([\d,]+)\}", text):
        return len(found[1].split(","))
    if found := re.search(r"\breplica_groups=\[(\d+),(\d+)\]", text):
        return int(found[2])
    if found := re.search(r"\breplica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", found[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", found[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    return module.num_devices


def source_line(module: Module, op: Operation) -> str:
    """The innermost line of user code below the step, else the innermost of all."""
    stack = list(module.stack(op))
    for file, line, function in stack:
        if file == _WHERE_STEPS_ARE_MADE:
            break  # frames further out called the step
        if not is_library(file):
            return format_line(file, line, function)
    return format_line(*stack[0]) if stack else ""
