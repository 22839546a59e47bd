"""What does a compiled program hold in memory, what of it again, and at its peak?"""

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax

from towerjax.step.report.communication import line_of
from towerjax.step.report.hlo import Module, Operation, Shape
from towerjax.types import leaf_name

_GROUPS = {
    "params": "parameters",
    "opt_state": "optimizer state",
    "local": "local",
    "batch": "batch",
    "num_valid": "batch",
}
_IN_GROUP = re.compile(r"^(?:\['|\.)(\w+)(?:'\])?(.*)$", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One argument of the program, on one device."""

    name: str  # the leaf's, "params['w']"
    kind: str  # "parameters", "optimizer state", "local", "batch" or "other"
    dtype: str  # by XLA's name, "f32"
    shape: tuple[int, ...]
    bytes: int
    donated: bool  # may a result take over the buffer?
    aliased: bool  # does one?
    why_not: str  # why none does, where one could be asked to; else ""


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one device holds while the program runs, in bytes."""

    buffers: tuple[Buffer, ...]  # the arguments
    results: int  # those taken over from arguments included
    aliased: int  # of these, the ones taken over
    temporaries: int
    code: int  # the program itself, where the compiler says
    peak: int  # the most at once, by the compiler's own plan
    capacity: int | None = None  # of the device, where known

    @property
    def fits(self) -> bool:
        """Is there room for it on the device? True where nobody knows."""
        return self.capacity is None or self.peak <= self.capacity

    @property
    def arguments(self) -> int:
        """Bytes of all arguments that the program reads."""
        return sum(buffer.bytes for buffer in self.buffers)

    @property
    def total(self) -> int:
        """Arguments, results, temporaries and code; what is aliased, once."""
        return (
            self.arguments + self.results - self.aliased + self.temporaries + self.code
        )

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of the arguments by kind, then of the rest; they add up to `total`."""
        found: dict[str, int] = collections.defaultdict(int)
        for buffer in self.buffers:
            found[buffer.kind] += buffer.bytes
        found["results not aliased"] = self.results - self.aliased
        found["temporaries"] = self.temporaries
        found["code"] = self.code
        return dict(found)

    @property
    def not_donated(self) -> tuple[Buffer, ...]:
        """The buffers that no result takes over, though one might."""
        return tuple(buffer for buffer in self.buffers if buffer.why_not)


def memory_of(
    compiled: Any,
    module: Module,
    *,
    roots: Sequence[str],
    keeps: bool = False,
    capacity: int | None = None,
) -> Memory:
    """What one device holds."""
    leaves = _argument_leaves(compiled, roots)
    results = collections.Counter(module.results)
    donors = _matched(leaves, module.parameters)
    wishes = collections.Counter(
        p.shapes[0] for leaf, p in donors if p is not None and leaf.donated
    )
    buffers = []
    for leaf, parameter in donors:
        shape, size, aliased, why_not = Shape(leaf.dtype, leaf.shape), 0, False, ""
        if parameter is not None:
            shape = parameter.shapes[0]
            size, aliased = shape.bytes, int(parameter.operands[0]) in module.aliased
        if leaf.donated and parameter is None:
            why_not = "the program does not read it"
        elif leaf.donated and not aliased:
            why_not = _reason(shape, wishes[shape], results[shape])
        elif keeps and leaf.first and parameter is not None and not aliased:
            why_not = "donate=False"
        kinds = (*_named(leaf), shape.dtype, shape.dims, size)
        buffers.append(Buffer(*kinds, leaf.donated, aliased, why_not))
    analysis = compiled.memory_analysis()
    return Memory(
        buffers=tuple(buffers),
        results=sum(shape.bytes for shape in module.results),
        aliased=sum(buffer.bytes for buffer in buffers if buffer.aliased),
        temporaries=analysis.temp_size_in_bytes,
        code=analysis.generated_code_size_in_bytes,
        peak=analysis.peak_memory_in_bytes,
        capacity=capacity,
    )


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """An argument's leaf as it was passed; ``path`` is below the argument."""

    root: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    donated: bool
    first: bool  # of the first argument


def _argument_leaves(compiled: Any, roots: Sequence[str]) -> list[_Leaf]:
    paths: Any = jax.tree_util.tree_leaves_with_path(compiled.args_info)
    # The tree is (args, kwargs), and of args one a position.
    return [
        _Leaf(
            root=roots[int(path[1].idx)],
            path=leaf_name("", path[2:]),
            dtype=str(info.dtype),
            shape=tuple(info.shape),
            donated=info.donated,
            first=path[1].idx == 0,
        )
        for path, info in paths
    ]


def _matched(
    leaves: list[_Leaf], parameters: list[Operation]
) -> list[tuple[_Leaf, Operation | None]]:
    """Each leaf with its parameter: the same order, unread ones left out."""
    pairs: list[tuple[_Leaf, Operation | None]] = []
    waiting = collections.deque(parameters)
    for number, leaf in enumerate(leaves):
        left = len(leaves) - number
        fits = waiting and (
            left == len(waiting)
            or (
                waiting[0].op_name.endswith(leaf.path)
                and len(waiting[0].shapes[0].dims) >= len(leaf.shape)
            )
        )
        pairs.append((leaf, waiting.popleft() if fits else None))
    return pairs


def _named(leaf: _Leaf) -> tuple[str, str]:
    """A leaf's name and kind: ``state['params']['w']`` is ``params['w']``."""
    found = _IN_GROUP.match(leaf.path)
    if leaf.root in ("state", "kept") and found:
        return found[1] + found[2], _GROUPS.get(found[1], "other")
    return leaf.root + leaf.path, _GROUPS.get(leaf.root, "other")


def _reason(shape: Shape, wishes: int, results: int) -> str:
    if not results:
        return f"no result is {shape}: dtype and shape must be the same"
    if results < wishes:
        return f"{wishes} buffers of {shape} are donated for {results} such results"
    return "the compiler did not take it over"


# These hand on the buffers that they are given.
_VIEWS = frozenset("bitcast get-tuple-element opt-barrier tuple while".split())
_RUNS = frozenset("while call conditional async-start".split())
_INDEX = re.compile(r"\bindex=(\d+)")
_STATE = re.compile(r"^(?:donated|kept)\['(\w+)'\]")

Part: TypeAlias = tuple[str, int]
"""An operation, and which of its results."""


@dataclasses.dataclass(frozen=True)
class Alive:
    """A value that lies in memory when most does."""

    name: str  # an argument's leaf, or what JAX calls the operation
    shape: str  # of one device, "f32[128,1024]"
    bytes: int
    line: str  # where it is made, "train.py:12 (loss_fn)"; or ""


def alive_at_peak(module: Module) -> tuple[Alive, ...]:
    """The values that are alive when most bytes are, the largest first.

    The text of a compiled program is in the order in which a device works: what was
    made before a moment and is used after it lies in memory at it. Values that XLA puts
    in one place without saying so in its text count each.
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
