"""The rule of a `shard_map`, and so of a `pmap`, whose devices are the towers.

The program around the map is of all devices. Its results must be the same for any
number of devices. In that program a `Copy` is an array that is the same for any number,
and a `Stacked` is an array of the devices' own values, one after another.

A mesh of several axes can be read in the ways that `mesh_axes` gives. Each way is
sound, so a result has the kind that any of them finds.

A `Joined` array has the devices' own values of any other kind. Only a map reads it, and
only by the spec and the mesh by which it was joined: its device then has its own value.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from jax.sharding import PartitionSpec

from towerjax.jaxprs.params import names_in, open_jaxpr
from towerjax.prover.equality.kinds.equation_pair import (
    EquationPair,
    Scope,
    Sizes,
    sizes_of_a_share,
)
from towerjax.prover.equality.kinds.joined import Joined, places_of
from towerjax.prover.equality.kinds.kinds import (
    EXTREME,
    LINEAR,
    Copy,
    Groups,
    InPadding,
    Kind,
    Maximum,
    Minimum,
    NotOfOneKindError,
    Part,
    TowerRows,
    Unknown,
    Zero,
    blocks_of,
    copy,
    rows,
)
from towerjax.prover.equality.kinds.stacked import Stacked, of_one_tower
from towerjax.prover.equality.loops.mesh_axes import (
    MeshAxes,
    only_others_grow,
    readings_of,
)
from towerjax.prover.equality.rules.rules import NUMBER, OF_ONE_TOWER, rule
from towerjax.prover.equality.rules.within import mapped_within
from towerjax.prover.equality.walk.walk import Walk

_STACKABLE: TypeAlias = Copy | TowerRows | Part | Maximum | Minimum
# A value of these kinds may leave a map and enter another one. They say nothing that
# holds in one map only, such as which rows have a flag.
_KEPT: TypeAlias = LINEAR | EXTREME | NUMBER | Groups | Stacked


class _Reading(NamedTuple):
    """A way to read the devices of two meshes, and their numbers of rows.

    Attributes:
      axes: The mesh axes along which the towers are.
      rows_each: The number of rows of a device, in both programs.
    """

    axes: MeshAxes
    rows_each: tuple[int, int]


@rule("shard_map", every=OF_ONE_TOWER | Stacked | Joined | Unknown)
def _mapped(pair: EquationPair, *operands: Kind) -> list[Kind]:
    """Run a `shard_map` whose devices are the towers.

    A device gets its own rows of an operand that is split over the devices.
    """
    if pair.walk.axes or only_others_grow(pair):
        return mapped_within(pair)
    kinds = list[Kind]()
    why = NotOfOneKindError("")
    for axes in readings_of(pair):
        try:
            kinds = _better(kinds, _of_reading(pair, axes, is_first=not kinds))
        except NotOfOneKindError as error:
            why = error
    if not kinds:
        raise why
    return kinds


def _better(kinds: Sequence[Kind], others: Sequence[Kind]) -> list[Kind]:
    """Take each result's kind from ``kinds``, or from ``others`` if it is unknown.

    A `Joined` array of both has the kinds of both.
    """
    if not kinds:
        return [*others]
    return [_better_of(x, y) for x, y in zip(kinds, others, strict=True)]


def _better_of(x: Kind, y: Kind) -> Kind:
    if isinstance(x, Joined) and isinstance(y, Joined):
        return x.replace(values=(*x.values, *y.values))
    if isinstance(y, Unknown) or not isinstance(x, Unknown | Joined):
        return x
    return y


def _of_reading(pair: EquationPair, axes: MeshAxes, *, is_first: bool) -> list[Kind]:
    """Run a map by one reading of its mesh axes.

    With ``is_first``, the kinds of all values in the map's program are recorded.
    """
    bodies = [open_jaxpr(eqn.params["jaxpr"]) for eqn in (pair.first, pair.second)]
    within = pair.scope.within | axes.alone | axes.still
    scope = Scope(pair.site, within=within)
    avals = [*zip(*[[v.aval for v in body.outvars] for body in bodies], strict=True)]
    kinds = list[Kind]()
    # The number of a device's rows is not given. Arrays may be split along dims of
    # several sizes, such as words and hidden units, so each is tried as that number.
    for rows_each in _rows_each(pair, bodies, axes.counts):
        reading = _Reading(axes, rows_each)
        ins = [_given_device(pair, i, reading) for i in range(len(pair.ins))]
        sizes = Sizes(axes.counts, rows_each)
        walk = Walk(sizes, [axes.towers], has_keys=False, alone=axes.alone)
        if is_first and not kinds:
            walk.kinds = pair.walk.kinds
        outs = walk.closed(bodies[0], bodies[1], ins, scope)
        results = [
            _of_all_devices(pair, i, value, both, reading)
            for i, (value, both) in enumerate(zip(outs, avals, strict=True))
        ]
        kinds = _better(kinds, results)
        if not any(isinstance(x, Unknown | Joined) for x in kinds):
            break
    return kinds


def _rows_each(
    pair: EquationPair, bodies: list[Any], towers: tuple[int, int]
) -> list[tuple[int, int]]:
    """List the sizes that may be a device's number of rows, in both programs.

    They are the sizes of dims that are split over the devices, and those by which a
    `Joined` operand has its kinds.
    """
    shapes = zip(*[[v.aval.shape for v in x.invars] for x in bodies], strict=True)
    sizes = sizes_of_a_share(shapes, towers)
    joined = [x for x in pair.ins if isinstance(x, Joined)]
    sizes += [rows_each for x in joined for (_, rows_each), _ in x.values]
    first, second = towers
    return [*dict.fromkeys(sizes)] or [(second, first)]


def _given_device(pair: EquationPair, operand: int, reading: _Reading) -> Kind:
    """Give one device its shard of an operand of a map."""
    x = pair.ins[operand]
    spec = pair.params["in_specs"][operand]
    axes = reading.axes
    if isinstance(x, Joined):
        return _own_value(pair, x, spec, reading)
    if isinstance(x, Unknown | Zero):
        return x
    # The dim that is split over the devices; None if the operand is replicated.
    split = axes.dim_split(spec)
    has_rows = pair.rows_in[operand] is not None
    if isinstance(x, Copy) and not has_rows:
        own_rows = rows(x.power).replace(in_padding=InPadding.AS_EXAMPLE)
        return x if split is None else own_rows
    is_of_each = split is not None and axes.has_each_tower_of(pair.sizes)
    if isinstance(x, Stacked) and is_of_each:
        if pair.towers_in[operand] == split and isinstance(x.of, type):
            axis = pair.rows_in[operand]
            return of_one_tower(x, axis, dealt=TowerRows, each=pair.sizes.rows)
    return pair.unknown(f"no rule for a shard_map of {x}")


def _own_value(
    pair: EquationPair, x: Joined, spec: PartitionSpec, reading: _Reading
) -> Kind:
    """Give a device its own value in a `Joined` array.

    The map must read the array by the spec, and on the mesh, by which it was joined.
    """
    if places_of((pair.first, pair.second), spec) != x.places:
        return pair.unknown(
            "a shard_map reads an array by another spec or mesh than that by which it"
            " was joined"
        )
    return dict(x.values).get(reading, x.outside)


def _of_all_devices(
    pair: EquationPair,
    result: int,
    value: Kind,
    avals: tuple[Any, Any],
    reading: _Reading,
) -> Kind:
    """Join the devices' results of a map.

    ``avals`` are the types of a device's result in both programs.
    """
    if isinstance(value, Unknown | Zero):
        return value
    axes = reading.axes
    own_rows, _ = Sizes(axes.counts, reading.rows_each).axes(*avals)
    spec = pair.params["out_specs"][result]
    try:
        split = axes.dim_split(spec)
    except NotOfOneKindError as error:
        return _joined(pair, spec, value, reading, str(error))
    if split is None:
        if isinstance(value, Copy) and own_rows is None:
            return copy(value.power)
        return pair.unknown(
            f"out_specs of a shard_map declare {value} the same on all {{many}}"
        )
    if isinstance(value, _STACKABLE) and blocks_of(value) == 1:
        if own_rows != split and axes.has_each_tower_of(pair.sizes):
            of = type(value) if own_rows is None else TowerRows
            return Stacked(value.power, of=of)
        if own_rows == split and isinstance(value, TowerRows | Copy):
            return copy(value.power)
    why = f"out_specs of a shard_map join {value}"
    return _joined(pair, spec, value, reading, why)


def _joined(
    pair: EquationPair, spec: PartitionSpec, value: Kind, reading: _Reading, why: str
) -> Kind:
    """Join all devices' values to an array; unknown if it does not have all.

    The reason ``why`` says what is wrong with the array outside of a map.
    """
    unknown = pair.unknown(why)
    has_all = {*reading.axes.towers} <= names_in(spec)
    is_in_order = not isinstance(value, Groups) or value.layout.order is None
    is_plain = isinstance(value, _KEPT) and is_in_order
    if not (has_all and is_plain) or spec.unreduced or spec.reduced:
        return unknown
    return Joined(
        places=places_of((pair.first, pair.second), spec),
        values=((reading, value.without_identity()),),
        outside=unknown,
    )
