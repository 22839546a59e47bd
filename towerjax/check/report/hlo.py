"""Read a compiled program's text: its collectives, and what runs beside them."""

import dataclasses
import math
import re
from collections.abc import Iterator
from typing import Any

from towerjax.jaxprs.sites import format_line, is_library
from towerjax.step.run.compile import compile_step
from towerjax.types.tables import in_bytes

_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=\s]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(
    r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(, .*)?$"
)
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)"
)
_COLLECTIVES = "all-reduce all-gather all-to-all reduce-scatter collective-permute"
_COLLECTIVES = f"{_COLLECTIVES} collective-broadcast ragged-all-to-all".split()
_NO_WORK = "parameter constant tuple get-tuple-element bitcast after-all".split()
_WHERE_STEPS_ARE_MADE = compile_step.__code__.co_filename


@dataclasses.dataclass(frozen=True)
class Shape:
    """The element type of an array, by XLA's name, and its dims."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The size in bytes; a ``pred`` has one byte per element, a ``token`` none."""
        bits = re.match(r"[a-z]+?(\d+)", self.dtype)
        width = int(bits[1]) if bits else 8 * (self.dtype == "pred")
        return -(-math.prod(self.dims) * width // 8)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation: a line of a computation in a compiled program's text."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]  # the shapes of the results; several for a tuple
    operands: tuple[str, ...]  # names; a parameter's index, or a constant's value
    inputs: tuple[Shape, ...]  # the shapes of the operands, with tuples spread out
    attributes: str  # the rest of the operation's line

    def called(self) -> dict[str, str]:
        """Name the computations that the operation runs.

        Each name is mapped to the attribute that tells its purpose, such as "body" or
        "condition".
        """
        if self.opcode.endswith(("-done", "-update")):
            return {}  # the operation with the end "-start" already names them
        return {
            name: kind
            for kind, text in _CALLED.findall(self.attributes)
            for name in re.findall(r"[\w.\-]+", text)
        }

    @property
    def trips(self) -> int | None:
        """The number of trips of a ``while``, if the compiler knows it."""
        count = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', self.attributes)
        return int(count[1]) if count else None


@dataclasses.dataclass(frozen=True)
class Module:
    """The parsed text of a compiled program."""

    header: str  # the first line of the text
    computations: dict[str, dict[str, Operation]]  # the operations of each, by name
    entry: str  # the name of the computation that runs first
    frames: dict[int, tuple[str, int, str, int]]  # file, line, function and parent

    def stack(self, operation: Operation) -> Iterator[tuple[str, int, str]]:
        """Yield ``(file, line, function)`` of each stack frame of an operation.

        The innermost is the first.
        """
        frame_id = re.search(r"\bstack_frame_id=(\d+)", operation.attributes)
        number = int(frame_id[1]) if frame_id else 0
        while number in self.frames:
            file, line, function, number = self.frames[number]
            yield file, line, function


def parse(text: str) -> Module:
    """Parse the text of a compiled program."""
    header, *lines = text.splitlines()
    computations: dict[str, dict[str, Operation]] = {}
    within = ""
    entry = ""
    for line in lines:
        if head := _HEAD.match(line):
            within = head[2]
            computations[within] = {}
            entry = within if head[1] else entry
        elif operation := _OPERATION.match(line):
            name, results, opcode, inside, rest = operation.groups("")
            before = computations[within]
            names = re.findall(r"%([\w.\-]+)", inside)
            before[name] = Operation(
                name,
                opcode,
                tuple(
                    Shape(x, tuple(map(int, re.findall(r"\d+", dims))))
                    for x, dims in _SHAPE.findall(results)
                ),
                operands=tuple(names or inside.split()),
                inputs=tuple(shape for x in names for shape in before[x].shapes),
                attributes=rest,
            )
    return Module(header, computations, entry, _frames(text))


def _frames(text: str) -> dict[int, tuple[str, int, str, int]]:
    """Read the stack frames in the tables of the text; empty if there are none."""

    def table(name: str, row: str) -> list[Any]:
        block = re.search(rf"^{name}\n((?:\d+ .*\n)+)", text, re.MULTILINE)
        return re.findall(rf"^(\d+) {row}", block[1], re.MULTILINE) if block else []

    files, functions = (
        dict(table(x, '"(.*)"')) for x in ("FileNames", "FunctionNames")
    )
    place = r"\{file_name_id=(\d+) function_name_id=(\d+) line=(\d+)"
    places = {
        i: (files[file], int(line), functions[function])
        for i, file, function, line in table("FileLocations", place)
    }
    # In the text, ``parent_frame_id`` is the parent's number plus 1; 1 is no parent.
    frame = r"\{file_location_id=(\d+) parent_frame_id=(\d+)"
    rows = table("StackFrames", frame)
    return {int(i): (*places[at], int(parent) - 1) for i, at, parent in rows}


@dataclasses.dataclass(frozen=True)
class CompiledCollective:
    """One collective of the compiled program, as one device sees it in one call."""

    opcode: str  # the name of the operation, such as "all-reduce"
    bytes: int  # the bytes of its operands, per execution
    sent: int  # the bytes sent per execution, if it runs as a ring; see ring_bytes
    dtypes: tuple[str, ...]  # the dtypes of the operands, without repetition
    num_devices: int  # the devices in a group
    trips: int  # the executions per call; 1 if the loop's number of trips is unknown
    trips_known: bool
    start: int  # the number of working operations before it in the schedule
    end: int  # start plus the number of working operations that run beside it
    length: int  # the number of working operations in its computation
    beside: int  # the bytes that operations beside it read and write, which hide it
    line: str  # the line of user code, "train.py:12 (loss_fn)"; else towerjax's, or ""

    def cells(self) -> tuple[str, ...]:
        """Write the cells of this collective's row in the report's table."""
        when = f"at {self.start} of {self.length}, exposed"
        if self.start < self.end:
            beside = f"beside {in_bytes(self.beside)} read and written"
            when = f"{self.start} to {self.end} of {self.length}, {beside}"
        trips = f"{self.trips}" if self.trips_known else "unknown"
        sizes = in_bytes(self.bytes), in_bytes(self.sent)
        return self.opcode, *sizes, trips, f"{self.num_devices}", when, self.line


def ring_bytes(opcode: str, operand_bytes: int, num_devices: int) -> int:
    """Count the bytes that each of ``n`` devices sends if a collective is a ring.

    ``2 b (n - 1) / n`` for an all-reduce of ``b`` bytes, ``b (n - 1) / n`` for a
    reduce-scatter or all-to-all, ``b (n - 1)`` for an all-gather, else ``b``.
    """
    if num_devices < 2:
        return 0
    if opcode in ("collective-permute", "collective-broadcast"):
        return operand_bytes
    rounds = {"all-reduce": 2, "all-gather": num_devices}.get(opcode, 1)
    return -(-rounds * operand_bytes * (num_devices - 1) // num_devices)


def collectives_of(
    module: Module,
    computation: str | None = None,
    trips: int = 1,
    known: bool = True,
    when: tuple[Any, ...] | None = None,
) -> Iterator[CompiledCollective]:
    """Yield the collectives of the program, in the order of its text from the entry.

    ``computation`` is the one to read; None is the entry. ``trips`` is how often it
    runs per call, and ``known`` whether that is known. ``when`` is the schedule of the
    operation that runs it asynchronously, as from `_schedule_of`; None if none does.
    """
    there = list(module.computations[computation or module.entry].values())
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
                line=_source_line(module, op),
            )
            continue
        at = _schedule_of(there, op) if op.opcode == "async-start" else when
        often = op.trips if op.opcode == "while" else 1
        for name in op.called():
            yield from collectives_of(
                module, name, trips * (often or 1), known and often is not None, at
            )


def _schedule_of(there: list[Operation], op: Operation) -> tuple[int, ...]:
    """Find ``start``, ``end``, ``length`` and ``beside`` of a collective.

    They are the fields of `CompiledCollective`. ``there`` are the operations of its
    computation.
    """
    working = [other for other in there if other.opcode not in _NO_WORK]
    start = working.index(op)
    done = op.opcode.replace("-start", "-done")
    waits = [other.opcode == done and op.name in other.operands for other in working]
    end = waits.index(True) if any(waits) else start
    between = working[start + 1 : end]
    between = [x for x in between if not x.opcode.endswith(("-start", "-done"))]
    moved = sum(shape.bytes for x in between for shape in (*x.shapes, *x.inputs))
    return start, start + len(between), len(working), moved


def _group_size(module: Module, op: Operation) -> int:
    """Count the devices in a group of a collective.

    The text has the groups as lists, a grid, or mesh axes.
    """
    text = op.attributes
    if groups := re.search(r"\breplica_groups=\{\{([\d,]+)\}", text):
        return len(groups[1].split(","))
    if groups := re.search(r"\breplica_groups=\[(\d+),(\d+)\]", text):
        return int(groups[2])
    if groups := re.search(r"\breplica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", groups[1]))
        axes = re.findall(r"'([^']*)'(?::\(\d+\)(\d+))?", groups[2])
        return math.prod(int(part or sizes[name]) for name, part in axes)
    counts = re.findall(r"\b(?:num_partitions|replica_count)=(\d+)", module.header)
    return math.prod(int(count) for count in counts)


def _source_line(module: Module, op: Operation) -> str:
    """Find the innermost line of user code inside the step.

    If there is none, it is the innermost line of any code.
    """
    stack = list(module.stack(op))
    for file, line, function in stack:
        if file == _WHERE_STEPS_ARE_MADE:
            break  # frames further out are those of the code that calls the step
        if not is_library(file):
            return format_line(file, line, function)
    return format_line(*stack[0]) if stack else ""
