"""What lies in memory when most does? The values alive, in the compiler's order.

The text of a compiled program is in the order in which a device works. What was made
before a moment and is used after it lies in memory at it.
"""

import collections
import dataclasses
import re
from typing import TypeAlias

from towerjax.step.report.communication import line_of
from towerjax.step.report.hlo import Module, Operation

# These hand on the buffers that they are given.
_VIEWS = frozenset("bitcast get-tuple-element opt-barrier tuple while".split())
_RUNS = frozenset("while call conditional async-start".split())
_INDEX = re.compile(r"\bindex=(\d+)")
_STATE = re.compile(r"^(?:carry|clock)\['(\w+)'\]")

Part: TypeAlias = tuple[str, int]
"""An operation, and which of its results."""


@dataclasses.dataclass(frozen=True)
class Alive:
    """A value that lies in memory when most does.

    Attributes:
      name: An argument's leaf, or what JAX calls the operation that made it.
      shape: Such as ``"f32[128,1024]"``, of one device.
      bytes: Its size.
      line: Where it is made, like ``"train.py:12 (loss_fn)"``; ``""`` of an argument,
        or where the compiler does not say.
    """

    name: str
    shape: str
    bytes: int
    line: str


def alive_at_peak(module: Module) -> tuple[Alive, ...]:
    """The values that are alive when most bytes are, the largest first.

    Values that XLA puts in one place without saying so in its text count each.
    """
    found = _at_peak(module, module.entry)
    return tuple(sorted(found, key=lambda value: -value.bytes))


def _at_peak(module: Module, computation: str) -> list[Alive]:
    """What is alive at a computation's worst moment, in what it runs too."""
    operations = list(module.computations[computation].values())
    lives = _lives(module, computation)
    alive: list[tuple[int, int, Alive]] = []
    change = collections.Counter[int]()
    inside: dict[int, list[Alive]] = {}
    for made, op in enumerate(operations):
        if op.opcode in _RUNS:
            bodies = [_at_peak(module, name) for name in op.called().values()]
            inside[made] = max(bodies, key=_bytes, default=[])
        for part, shape in enumerate(op.shapes):
            start, end = made, lives.get((op.name, part), -1)
            if op.opcode == "parameter":  # the caller has it all along
                start, end = 0, min(end, len(operations) - 1)
            if end >= start and shape.bytes:
                alive.append((start, end, _value(module, op, part)))
                change[start] += shape.bytes
                change[end + 1] -= shape.bytes
    held, worst, most = 0, 0, -1
    for position in range(len(operations)):
        held += change[position]
        if (size := held + _bytes(inside.get(position, []))) > most:
            worst, most = position, size
    here = [value for start, end, value in alive if start <= worst <= end]
    return [*here, *inside.get(worst, [])]


def _value(module: Module, op: Operation, part: int) -> Alive:
    name = _STATE.sub(r"\1", op.op_name) or op.name
    line = "" if op.opcode == "parameter" else line_of(module, op)
    return Alive(name, f"{op.shapes[part]}", op.shapes[part].bytes, line)


def _lives(module: Module, computation: str) -> dict[Part, int]:
    """For each result with memory of its own where it is used last.

    In a loop or branch what it is given and gives back has none, nor have the program's
    results that take over an argument's buffer.
    """
    there, root = module.computations[computation], module.roots[computation]
    parts: dict[str, list[frozenset[Part]]] = {}
    lives: dict[Part, int] = {}
    is_entry = computation == module.entry
    for position, op in enumerate(there.values()):
        given = [parts[name] for name in op.operands if name in parts]
        if op.opcode in _VIEWS or op.opcode.endswith("-done"):
            parts[op.name] = _viewed(op, sum(given, []))
            continue
        parts[op.name] = [frozenset(((op.name, i),)) for i in range(len(op.shapes))]
        for key in frozenset[Part]().union(*sum(given, [])):
            if key in lives:
                lives[key] = max(lives[key], position)
        if op.opcode != "constant" and (is_entry or op.opcode != "parameter"):
            end = len(there) if op.opcode == "parameter" else position
            lives |= {(op.name, i): end for i in range(len(op.shapes))}
    for key in frozenset[Part]().union(*parts[root]):
        if key in lives:
            lives[key] = len(there)
    taken = [*range(len(parts[root]))]
    if is_entry:
        taken = [int(x or 0) for x in re.findall(r"\{(\d*)\}: \(\d+, ", module.header)]
    for index in taken:
        for name, part in parts[root][index]:
            if there[name].opcode != "parameter":
                lives.pop((name, part), None)
    return lives


def _viewed(op: Operation, given: list[frozenset[Part]]) -> list[frozenset[Part]]:
    """In which results' memory the parts of a view lie."""
    if found := _INDEX.search(op.attributes):
        given = given[int(found[1]) :][: len(op.shapes)]
    if len(given) == len(op.shapes):
        return given
    return [frozenset[Part]().union(*given)] * len(op.shapes)


def _bytes(values: list[Alive]) -> int:
    return sum(value.bytes for value in values)
