"""What the analysis of a tower function finds, and the errors made from it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from towerjax.types.refusals import few, listed
from towerjax.types.version import page


class Dependence(NamedTuple):
    """Why a value differs between towers: its source, and the line that made it.

    The source is an input's name, "tower.id" or a primitive.
    """

    source: str
    line: str  # "train.py:12 (loss_fn)"; "" for an input that is returned unchanged

    def told(self) -> str:
        """Write the dependence as text, in the words of a `shard_map`."""
        return self.source.replace("tower.id", "axis_index") + (
            f" at {self.line}" if self.line else ""
        )


class Collective(NamedTuple):
    """One collective in a jaxpr. XLA may join it with others, or remove it."""

    primitive: str
    axes: tuple[str, ...]
    bytes: int  # the size of its operands
    trips: int | None  # lengths of the scans around it, multiplied; None in a while
    line: str
    # If the operand is equal on all towers, this says what the sum of it is for: "added
    # up", "counted" for an integer, or "averaged". It is "" for any other collective.
    of_equals: str


class Hang(NamedTuple):
    """A collective that only some towers reach, for which the others wait forever."""

    primitive: str
    line: str
    control: str
    control_line: str


class Draw(NamedTuple):
    """A draw of random numbers by an rbg key that differs from tower to tower."""

    line: str


class OwnMesh(NamedTuple):
    """An equation of the user's code that places values on a mesh the user made."""

    primitive: str
    axes: tuple[str, ...]
    size: int  # the number of devices
    line: str
    along: Mapping[str, "Analysis"]  # for a `shard_map`, its analysis along each axis
    replicated: int  # the number of results declared replicated, added up over axes
    split: int  # the number of results declared split
    typed: bool  # whether check_vma=True; `jax.grad` then adds gradients over devices


class Unread(NamedTuple):
    """Code that no jaxpr shows, such as a callback, and the line that calls it."""

    primitive: str
    line: str


class Failure(NamedTuple):
    """An error that the analysis itself raised for an equation, and the user's line."""

    error: str
    line: str


class TowerCall(NamedTuple):
    """One operand of a collective that a tower function calls over all towers."""

    name: str  # "tower.reduce", "psum", "ppermute" ...
    line: str
    is_sum: bool
    source: str  # the named input that it depends on, or ""


@dataclasses.dataclass(frozen=True)
class Analysis:
    """All findings of one analysis.

    ``outputs[i]`` is None if output ``i`` is MIRRORED, and otherwise why it differs.
    """

    outputs: tuple[Dependence | None, ...]
    hangs: tuple[Hang, ...]
    collectives: tuple[Collective, ...]
    draws: tuple[Draw, ...] = ()
    factors: tuple[Dependence, ...] = ()
    meshes: tuple[OwnMesh, ...] = ()
    unread: tuple[Unread, ...] = ()
    tower_calls: tuple[TowerCall, ...] = ()  # found only by `depends`
    failures: tuple[Failure, ...] = ()

    @classmethod
    def of(cls, outputs: Sequence[Dependence | None], noted: Sequence[Any]) -> Self:
        """Sort the findings by type, beside these outputs.

        ``noted`` are the findings, in the order of the program.
        """

        def each(kind: type) -> tuple[Any, ...]:
            return tuple([x for x in noted if isinstance(x, kind)])

        kinds = Hang, Collective, Draw, Dependence, OwnMesh, Unread, TowerCall, Failure
        return cls(tuple(outputs), *map(each, kinds))

    @classmethod
    def concat(cls, parts: Sequence["Analysis"]) -> "Analysis":
        """Concatenate the findings of several analyses."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(*[sum([getattr(x, name) for x in parts], ()) for name in names])


_DIFFERING = "These outputs must be the same on every tower, but are not:"
_REDUCE = """\
Return tj.Weighted.mean(values, tower.weight) or tj.Sum(value), which add up over
towers; for gradients call tj.value_and_grad(loss_fn). Or reduce it,
tower.reduce(tj.Reduction.MEAN, value), or keep it per tower: tj.PerTower(value), or
TowerOutput(local=...)."""
_FACTORS = "A mean's factor, or the value in tj.penalty, differs from tower to tower:"
_UNIFY = f"""Multiply the rows, tj.Weighted.mean(values * factor, weight). If you mean
one number for all towers, draw it with tower.shared_rng, or compute it from all rows:
with tower.mean(values, tower.weight), or in an earlier pass, as in
{page("how_to/several_losses", "A function of a mean")}
If you mean each tower's own number, for example to clip its gradient, write
tj.Weighted(total * factor, weight). A term of the rows is a mean of its own:
loss + tj.Weighted.mean(values, tower.weight)."""
_HANGING = "Only some towers reach these collectives, so devices would hang:"
_AGREE = """Make the predicate the same on all towers with tower.reduce, or move the
merge_call or reduction out of the cond or while."""


class ReplicationError(ValueError):
    """A value that must be MIRRORED differs between towers, or a collective would hang.

    It is also raised if a mean's factor differs from tower to tower, if a bare value
    differs from micro-batch to micro-batch, if towers that train alone communicate, or
    if random numbers would depend on how many towers share a device.
    """


def prove_mirrored(
    analysis: Analysis, names: Sequence[str | None], *, advice: str | None = None
) -> None:
    """Raise unless each output that has a name is MIRRORED and no collective hangs.

    ``names`` has None for an output that may differ between towers.
    """
    differing = [
        f"  - {name} depends on {d.source} and is not reduced over all towers; it is "
        + (f"made at {d.line}" if d.line else "returned unchanged")
        for name, d in zip(names, analysis.outputs, strict=True)
        if name is not None and d is not None
    ]
    hanging = [
        f"  - {hang.primitive} at {hang.line}, under the {hang.control} at "
        f"{hang.control_line}, whose predicate differs from tower to tower"
        for hang in analysis.hangs
    ]
    text = differing and [_DIFFERING, *few(differing), advice or _REDUCE]
    text += hanging and [_HANGING, *dict.fromkeys(hanging), _AGREE]
    if text:
        raise ReplicationError("\n".join(text))


def refuse_draws(analysis: Analysis) -> None:
    """Raise if random numbers depend on how many towers share a device."""
    lines = dict.fromkeys(draw.line or "a line of a library" for draw in analysis.draws)
    if lines:
        raise ReplicationError(
            "Under vmap, random numbers of an rbg key depend on how many towers share a"
            f" device. They are drawn at {', '.join(lines)}. Use jax.random.key(seed,"
            " impl='threefry2x32'), tower_loop='scan', or one tower a device."
        )


def refuse_factors(analysis: Analysis) -> None:
    """Raise if the factor of a mean, or a penalty, differs between towers."""
    lines = [
        f"  - a value that depends on {x.source}; it is "
        + (f"made at {x.line}" if x.line else "an unchanged input")
        for x in analysis.factors
    ]
    if lines:
        raise ReplicationError("\n".join([_FACTORS, *dict.fromkeys(lines), _UNIFY]))


def refuse_varying(analysis: Analysis, names: Sequence[str | None]) -> None:
    """Raise if an output with a name, or a factor, differs between micro-batches.

    ``names`` has None for an output that may differ.
    """
    pairs = [*zip(names, analysis.outputs, strict=True)]
    pairs += [("a mean's factor or tj.penalty", x) for x in analysis.factors]
    bare = [f"{name}, made at {x.line}" for name, x in pairs if name and x is not None]
    if bare:
        raise ReplicationError(
            "A bare value must be the same in all micro-batches, but these depend on"
            f" their rows: {listed(bare)}. Return tj.Weighted(sum, weight) or"
            " tj.Sum(x), which are added up. If a loss needs a value of all rows,"
            " compute it in an earlier pass of tj.build_step. Return values that change"
            " in each micro-batch, such as batch statistics, in TowerOutput(local=...)."
            " Wrap an optimizer in tj.estimator.TowerOptimizer. Or write"
            " micro_batches=1."
        )
