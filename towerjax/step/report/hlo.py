"""Parse the text of a compiled program: operations, shapes and source lines."""

import dataclasses
import math
import re
from collections.abc import Iterator

_SHAPE = re.compile(r"\b([a-z]\w*)\[([\d,<=\s]*)\]")
_HEAD = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)"
)


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
    frames: dict[int, tuple[str, int, str, int]]  # (file, line, function, around or 0)

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
    def aliased(self) -> frozenset[int]:
        """The arguments whose buffers results take over, by number."""
        pairs = re.findall(r"\{[\d, ]*\}: \((\d+), \{[\d, ]*\}", self.header)
        return frozenset(int(number) for number in pairs)

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
    lines = text.splitlines()
    computations, roots, entry = {}, {}, ""
    inside: dict[str, Operation] = {}
    for line in lines[1:]:
        if head := _HEAD.match(line):
            inside = computations[head[2]] = {}
            name = head[2]
            entry = name if head[1] else entry
        elif (found := _OPERATION.match(line)) and computations:
            inside[found[2]] = _operation(found[2], found[3], inside)
            if found[1]:
                roots[name] = found[2]
    return Module(lines[0], computations, entry, roots, _frames(text))


def _operation(name: str, text: str, before: dict[str, Operation]) -> Operation:
    """Parse what follows ``%name =``."""
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    shapes = tuple(
        Shape(m[1], tuple(map(int, re.findall(r"\d+", m[2]))))
        for m in _SHAPE.finditer(text[:end])
    )
    opening = text.index("(", end)
    opcode, closing = text[end:opening].strip(), _closing(text, opening)
    inside, attributes = text[opening + 1 : closing], text[closing + 1 :]
    if opcode in ("parameter", "constant"):
        return Operation(name, opcode, shapes, (inside,), (), attributes)
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    inputs = tuple(shape for operand in operands for shape in before[operand].shapes)
    return Operation(name, opcode, shapes, operands, inputs, attributes)


def _closing(text: str, opening: int) -> int:
    """The position of the bracket that closes one."""
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"A bracket does not close in the compiler's text: {text[:120]}")


def _frames(text: str) -> dict[int, tuple[str, int, str, int]]:
    """The tables at the head of the text; empty where there are none."""
    tables = {
        name: dict(re.findall(r"^(\d+) (.*)$", body, re.MULTILINE))
        for name, body in re.findall(
            r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n((?:\d+ .*\n)*)",
            text,
            re.MULTILINE,
        )
    }
    frames = tables.get("StackFrames", {})
    # Some versions print parents one higher, so that 0 is "none": frame 1 has none.
    shift = int(_fields(frames.get("1", "")).get("parent_frame_id") == "1")
    found = {}
    for i, frame in frames.items():
        fields = _fields(frame)
        place = _fields(tables["FileLocations"][fields["file_location_id"]])
        file = tables["FileNames"][place["file_name_id"]].strip('"')
        names = tables.get("FunctionNames", {})
        function = names.get(place.get("function_name_id", ""), "").strip('"')
        parent = int(fields.get("parent_frame_id", 0)) - shift
        around = parent if 0 < parent < int(i) else 0
        found[int(i)] = (file, int(place["line"]), function, around)
    return found


def _fields(text: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\d+)", text))
