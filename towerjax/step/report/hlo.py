"""A compiled program's text: its operations, collectives and source lines."""

import dataclasses
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

from towerjax.proof.equation import format_line, is_library

_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=\s]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(
    r"^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(, .*)?$"
)
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)"
)
_COLLECTIVES = frozenset(
    "all-reduce all-gather all-to-all reduce-scatter collective-permute"
    " collective-broadcast ragged-all-to-all".split()
)
_NO_WORK = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all".split()
)
_WHERE_STEPS_ARE_MADE = str(Path(__file__).parents[1] / "program.py")


Frame: TypeAlias = tuple[str, int, str, int]
"""``(file, line, function, number)``, the last of the frame around it, or 0."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array's element type, by XLA's name, and dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """How many bytes; a ``pred`` has one, a ``token`` none."""
        bits = re.match(r"[a-z]+?(\d+)", self.dtype)
        width = int(bits[1]) if bits else 8 * (self.dtype == "pred")
        return -(-math.prod(self.dims) * width // 8)

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclasses.dataclass(frozen=True)
class Operation:
    """One line of a computation."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # the results': several for a tuple
    operands: tuple[str, ...]  # names; a parameter's number, or a constant's value
    inputs: tuple[Shape, ...]  # the operands' shapes, tuples spread
    attributes: str  # the rest of the line

    def called(self) -> dict[str, str]:
        """Attribute -> computation that the operation runs or reduces by."""
        if self.opcode.endswith(("-done", "-update")):
            return {}  # the -start operation named them
        return {
            f"{kind}[{i}]" if text.startswith("{") else kind: name
            for kind, text in _CALLED.findall(self.attributes)
            for i, name in enumerate(re.findall(r"[\w.\-]+", text))
        }

    @property
    def op_name(self) -> str:
        """JAX's name for it; the path of an argument."""
        found = re.search(r'\bop_name="((?:[^"\\]|\\.)*)"', self.attributes)
        return re.sub(r"\\(.)", r"\1", found[1]) if found else ""

    @property
    def trips(self) -> int | None:
        """The trips of a ``while``, if the compiler knows them."""
        found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(found[1]) if found else None


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program's text, taken apart."""

    header: str  # its first line
    computations: dict[str, dict[str, Operation]]  # operations in order
    entry: str
    roots: dict[str, str]  # computation -> the operation that is its result
    frames: dict[int, Frame]

    @property
    def parameters(self) -> list[Operation]:
        """The program's arguments, in order."""
        there = self.computations[self.entry].values()
        found = [op for op in there if op.opcode == "parameter"]
        return sorted(found, key=lambda op: int(op.operands[0]))

    @property
    def results(self) -> tuple[Shape, ...]:
        """The shapes of the program's results."""
        return self.computations[self.entry][self.roots[self.entry]].shapes

    @property
    def aliased(self) -> dict[int, int]:
        """Result -> the argument whose buffer it takes over, both by number."""
        pairs = re.findall(r"\{(\d*)\}: \((\d+), \{", self.header)
        return {int(result or 0): int(argument) for result, argument in pairs}

    @property
    def num_devices(self) -> int:
        """On how many devices it runs."""
        counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", self.header)
        return math.prod(int(count) for count in counts)

    def stack(self, operation: Operation) -> Iterator[tuple[str, int, str]]:
        """``(file, line, function)`` of each frame, innermost first."""
        text = operation.attributes
        if found := re.search(r'source_file="([^"]*)" source_line=(\d+)', text):
            yield found[1], int(found[2]), ""
        found = re.search(r"\bstack_frame_id=(\d+)", text)
        number = int(found[1]) if found else 0
        while number in self.frames:
            file, line, function, number = self.frames[number]
            yield file, line, function


def parse(text: str) -> Module:
    """A compiled program's text, taken apart."""
    header, *lines = text.splitlines()
    computations: dict[str, dict[str, Operation]] = {}
    roots, within, entry = {}, "", ""
    for line in lines:
        if head := _HEAD.match(line):
            within = head[2]
            computations[within] = {}
            entry = within if head[1] else entry
        elif found := _OPERATION.match(line):
            is_root, name, results, opcode, inside, rest = found.groups("")
            before, names = computations[within], re.findall(r"%([\w.\-]+)", inside)
            before[name] = Operation(
                name,
                opcode,
                tuple(Shape(x, _numbers(dims)) for x, dims in _SHAPE.findall(results)),
                operands=tuple(names or inside.split()),
                inputs=tuple(shape for x in names for shape in before[x].shapes),
                attributes=rest,
            )
            if is_root:
                roots[within] = name
    return Module(header, computations, entry, roots, _frames(text))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def _frames(text: str) -> dict[int, Frame]:
    """The tables at the head of the text, joined; empty where there are none."""
    tables: Any = {
        name: {int(i): _table_row(row) for i, row in re.findall(r"(\d+) (.*)\n", body)}
        for name, body in re.findall(r"^(\w+)\n((?:\d+ .*\n)+)", text, re.MULTILINE)
    }
    frames, functions = (tables.get(x, {}) for x in ("StackFrames", "FunctionNames"))
    # Some versions print parents one higher, so that 0 is "none": frame 1 has none.
    shift = int(frames.get(1, {}).get("parent_frame_id") == 1)
    found = {}
    for i, frame in frames.items():
        place = tables["FileLocations"][frame["file_location_id"]]
        file = tables["FileNames"][place["file_name_id"]]
        function = functions.get(place.get("function_name_id"), "")
        parent = frame.get("parent_frame_id", 0) - shift
        found[i] = (file, place["line"], function, parent if parent < i else 0)
    return found


def _table_row(text: str) -> Any:
    """A name in quotes, or numbers by name."""
    if text.startswith('"'):
        return text.strip('"')
    return {name: int(x) for name, x in re.findall(r"(\w+)=(\d+)", text)}


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
    if num_devices < 2:
        return 0
    if opcode in ("collective-permute", "collective-broadcast"):
        return operand_bytes
    rounds = {"all-reduce": 2, "all-gather": num_devices}.get(opcode, 1)
    return -(-rounds * operand_bytes * (num_devices - 1) // num_devices)


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
        at = _schedule_of(there, op) if op.opcode == "async-start" else when
        often = op.trips if op.opcode == "while" else 1
        inside = (trips * (often or 1), known and often is not None, at)
        for name in op.called().values():
            yield from _collectives_in(module, name, *inside)


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
