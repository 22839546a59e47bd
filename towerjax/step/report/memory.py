"""The memory of a compiled program: arguments, reused buffers and the peak."""

import collections
import dataclasses
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

from towerjax.mesh.private_jax import read_arguments
from towerjax.step.report.hlo import Module, Operation, Shape, source_line
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
    donated: bool  # whether a result may reuse the buffer
    aliased: bool  # whether a result reuses it
    why_not: str  # why no result reuses it, though one may; else ""


@dataclasses.dataclass(frozen=True)
class Memory:
    """What one device holds while the program runs, in bytes."""

    buffers: tuple[Buffer, ...]  # the arguments
    results: int  # those in arguments' buffers included
    aliased: int  # of these, the ones in arguments' buffers
    temporaries: int
    code: int  # the program itself, if the compiler says
    peak: int  # the most at once, by the compiler's plan
    capacity: int | None = None  # of the device, where known

    @property
    def fits(self) -> bool:
        """Whether the program fits on the device; True if the capacity is unknown."""
        return self.capacity is None or self.peak <= self.capacity

    @property
    def arguments(self) -> int:
        """Bytes of all arguments that the program reads."""
        return sum(buffer.bytes for buffer in self.buffers)

    @property
    def total(self) -> int:
        """Arguments, results, temporaries and code; aliased buffers count once."""
        return sum(self.by_kind.values())

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes of arguments by kind, and of the rest; together they are `total`."""
        found = dict.fromkeys((buffer.kind for buffer in self.buffers), 0)
        for buffer in self.buffers:
            found[buffer.kind] += buffer.bytes
        others = {"temporaries": self.temporaries, "code": self.code}
        return {**found, "results not aliased": self.results - self.aliased, **others}

    @property
    def not_donated(self) -> tuple[Buffer, ...]:
        """The buffers that no result reuses, though one may."""
        return tuple(buffer for buffer in self.buffers if buffer.why_not)


def memory_of(
    compiled: Any, module: Module, *, roots: Sequence[str], capacity: int | None = None
) -> Memory:
    """The `Memory` of one device; argument ``i`` is called ``roots[i]``."""
    leaves: Any = jax.tree_util.tree_leaves_with_path(compiled.args_info)
    read, taken_over = read_arguments(compiled), {*module.aliased.values()}
    # The last parameters: tokens, if there are any, are the first.
    first = len(module.parameters) - len(read)
    given = dict(zip(read, module.parameters[first:], strict=True))
    results = collections.Counter(module.results)
    donated = collections.Counter(
        op.shapes[0] for i, op in given.items() if leaves[i][1].donated
    )
    buffers = []
    for number, (path, info) in enumerate(leaves):
        op, root = given.get(number), roots[int(path[1].idx)]
        shape = op.shapes[0] if op else Shape(str(info.dtype), tuple(info.shape))
        aliased = op is not None and int(op.operands[0]) in taken_over
        why_not = ""
        if info.donated and not op:
            why_not = "the program does not read it"
        elif info.donated and not aliased:
            why_not = _reason(shape, donated[shape], results[shape])
        elif not info.donated and op and root == "state" and "kept" in roots:
            why_not = "donate=False"
        names = _name_and_kind(root, leaf_name("", path[2:]))
        sizes = (shape.dtype, shape.dims, shape.bytes if op else 0)
        buffers.append(Buffer(*names, *sizes, info.donated, aliased, why_not))
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


def _name_and_kind(root: str, path: str) -> tuple[str, str]:
    """A leaf's name and kind: ``state['params']['w']`` is ``params['w']``."""
    found = _IN_GROUP.match(path)
    if root in ("state", "kept", "counters") and found:
        return found[1] + found[2], _GROUPS.get(found[1], "other")
    return root + path, _GROUPS.get(root, "other")


def _reason(shape: Shape, donated: int, results: int) -> str:
    if not results:
        return f"no result is {shape}: dtype and shape must be the same"
    if results < donated:
        return f"{donated} buffers of {shape} are donated for {results} such results"
    return "the compiler did not take it over"


# Their results lie in the buffers of their operands.
_VIEWS = frozenset("bitcast get-tuple-element opt-barrier tuple while".split())
_RUNS = frozenset("while call conditional async-start".split())
_INDEX = re.compile(r"\bindex=(\d+)")
_IN_OPERAND = re.compile(r"\{(\d*)(?:,(\d+))?\}: \((\d+), \{(\d*)\}\)")
_STATE = re.compile(r"^(?:donated|kept)\['(\w+)'\]")

Output: TypeAlias = tuple[str, int]
"""``(operation, index)``: one of an operation's results."""


@dataclasses.dataclass(frozen=True)
class Alive:
    """A value that is alive when memory is at its peak."""

    name: str  # an argument's leaf, or JAX's name of the operation
    shape: str  # on one device, "f32[128,1024]"
    bytes: int
    line: str  # where it is made, "train.py:12 (loss_fn)"; or ""


def alive_at_peak(module: Module) -> tuple[Alive, ...]:
    """The values that are alive at the peak of memory, the largest first.

    The text of a compiled program is in the order of its schedule: a value is alive
    from the operation that makes it to the last that uses it. Values that XLA puts in
    one buffer without a sign in the text count each.
    """
    found = _at_peak(module, module.entry)
    return tuple(sorted(found, key=lambda value: -value.bytes))


def _at_peak(module: Module, computation: str) -> list[Alive]:
    """The values alive at the peak of a computation, and of those that it runs."""
    operations = list(module.computations[computation].values())
    last_uses = _last_uses(module, computation)
    alive: list[tuple[int, int, Alive]] = []
    inside: list[list[Alive]] = [[] for _ in operations]
    change = np.zeros(len(operations) + 2, np.int64)
    for made, op in enumerate(operations):
        if op.opcode in _RUNS:
            bodies = [_at_peak(module, name) for name in op.called().values()]
            inside[made] = max(bodies, key=_total_bytes, default=[])
        is_held = op.opcode == "parameter"  # by the caller, from the start
        start, name = 0 if is_held else made, _STATE.sub(r"\1", op.op_name) or op.name
        line = "" if is_held else source_line(module, op)
        for part, shape in enumerate(op.shapes):
            end = last_uses.get((op.name, part), -1)
            if end >= start and shape.bytes:
                alive.append((start, end, Alive(name, f"{shape}", shape.bytes, line)))
                change[[start, end + 1]] += shape.bytes, -shape.bytes
    held = change.cumsum()[: len(operations)] + [*map(_total_bytes, inside)]
    worst = int(held.argmax())
    return [x for start, end, x in alive if start <= worst <= end] + inside[worst]


def _last_uses(module: Module, computation: str) -> dict[Output, int]:
    """The last use of each result that has memory of its own.

    Parameters and results of loops and branches have none, nor have the program's
    results that reuse an argument's buffer.
    """
    there, root = module.computations[computation], module.roots[computation]
    parts: dict[str, list[frozenset[Output]]] = {}
    last_uses: dict[Output, int] = {}
    for position, op in enumerate(there.values()):
        each = [parts[name] for name in op.operands if name in parts]
        given = sum(each, [])
        if op.opcode in _VIEWS or op.opcode.endswith("-done"):
            parts[op.name] = _view(op, given)
            continue
        own = [{(op.name, i)} for i in range(len(op.shapes))]
        parts[op.name] = [frozenset(x if op.opcode != "constant" else ()) for x in own]
        for result, buffer in _in_operands(op, each).items():
            parts[op.name][result] = buffer
        used = frozenset[Output]().union(*given, *parts[op.name])
        last_uses |= dict.fromkeys(used, position)
    is_entry = computation == module.entry
    results, found = frozenset[Output]().union(*parts[root]), {}
    reused = module.aliased if is_entry else range(len(parts[root]))
    elsewhere = frozenset[Output]().union(*(parts[root][i] for i in reused))
    for key, end in last_uses.items():
        is_argument = there[key[0]].opcode == "parameter"
        has_own = is_entry if is_argument else key not in elsewhere
        if has_own:
            found[key] = len(there) if is_argument or key in results else end
    return found


def _in_operands(
    op: Operation, each: list[list[frozenset[Output]]]
) -> dict[int, frozenset[Output]]:
    """The results that lie in the memory of operands, of which ``each`` has the parts.

    A collective that is started returns its operands, and then its results.
    """
    given, count = sum(each, []), 0
    if op.opcode.endswith("-start") and op.opcode != "copy-start":
        count = len(given) if len(op.shapes) >= 2 * len(given) else 0
    found = dict(enumerate(given[:count]))
    _, _, pairs = op.attributes.partition("output_to_operand_aliasing=")
    for first, second, operand, part in _IN_OPERAND.findall(pairs):
        result = int(first or 0) * max(count, 1) + int(second or 0)
        found[result] = each[int(operand)][int(part or 0)]
    return found


def _view(op: Operation, given: list[frozenset[Output]]) -> list[frozenset[Output]]:
    """The results in whose memory the parts of a view lie."""
    if found := _INDEX.search(op.attributes):
        given = given[int(found[1]) :][: len(op.shapes)]
    elif op.opcode in ("all-reduce-done", "all-gather-done"):
        given = given[-len(op.shapes) :]  # the operands may stand before them
    if len(given) == len(op.shapes):
        return given
    return [frozenset[Output]().union(*given)] * len(op.shapes)


def _total_bytes(values: list[Alive]) -> int:
    return sum(value.bytes for value in values)
