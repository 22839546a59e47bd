"""The rule of a `shard_map`, and so of a `pmap`, whose devices are the towers.

The program around the map is of all devices. Its results must be the same for any
number of devices. In that program a `Copy` is an array that is the same for any number,
and a `Stacked` is an array of the devices' own values, one after another.

A mesh of several axes can be read in the ways that `mesh_axes` gives. Each way is
sound, so a result has the kind that any of them finds.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from towerjax.jaxprs.params import open_jaxpr
from towerjax.prover.equality.kinds.equation_pair import EquationPair, Scope, Sizes
from towerjax.prover.equality.kinds.kinds import (
    Copy,
    InPadding,
    Kind,
    Maximum,
    Minimum,
    NotOfOneKindError,
    Part,
    Stacked,
    TowerRows,
    Unknown,
    Zero,
    blocks_of,
    copy,
    of_one_tower,
    rows,
)
from towerjax.prover.equality.loops.mesh_axes import (
    MeshAxes,
    only_others_grow,
    readings_of,
)
from towerjax.prover.equality.rules.rules import OF_ONE_TOWER, rule
from towerjax.prover.equality.rules.within import mapped_within
from towerjax.prover.equality.walk.walk import Walk

_STACKABLE: TypeAlias = Copy | TowerRows | Part | Maximum | Minimum


@rule("shard_map", every=OF_ONE_TOWER | Stacked | Unknown)
def _mapped(pair: EquationPair, *operands: Kind) -> list[Kind]:
    """Return the kinds of a `shard_map`'s results, whose devices are the towers.

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
    """Return each result's kind from ``kinds``, or from ``others`` if it is unknown."""
    if not kinds:
        return [*others]
    return [
        y if isinstance(x, Unknown) and not isinstance(y, Unknown) else x
        for x, y in zip(kinds, others, strict=True)
    ]


def _of_reading(pair: EquationPair, axes: MeshAxes, *, is_first: bool) -> list[Kind]:
    """Return the kinds of a map's results by one reading of its mesh axes.

    With ``is_first``, the kinds of all values in the map's program are recorded.
    """
    bodies = [open_jaxpr(eqn.params["jaxpr"]) for eqn in (pair.first, pair.second)]
    splits = [axes.dim_split(spec) for spec in pair.params["in_specs"]]
    splits_out = [axes.dim_split(spec) for spec in pair.params["out_specs"]]
    ins = [_given_device(pair, i, split, axes) for i, split in enumerate(splits)]
    within = pair.scope.within | axes.alone | axes.still
    scope = Scope(pair.site, within=within)
    avals = [*zip(*[[v.aval for v in body.outvars] for body in bodies], strict=True)]
    kinds = list[Kind]()
    # The number of a device's rows is not given. Arrays may be split along dims of
    # several sizes, such as words and hidden units, so each is tried as that number.
    for rows_each in _rows_each(bodies, axes.counts):
        sizes = Sizes(axes.counts, rows_each)
        walk = Walk(sizes, [axes.towers], has_keys=False, alone=axes.alone)
        if is_first and not kinds:
            walk.kinds = pair.walk.kinds
        outs = walk.closed(bodies[0], bodies[1], ins, scope)
        triples = zip(outs, avals, splits_out, strict=True)
        results = [
            _of_all_devices(pair, value, sizes.axes(*both)[0], split, axes)
            for value, both, split in triples
        ]
        kinds = _better(kinds, results)
        if all(not isinstance(x, Unknown) for x in kinds):
            break
    return kinds


def _rows_each(bodies: list[Any], towers: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the sizes that may be a device's number of rows, in both programs.

    They are the sizes of dims that are split over the devices.
    """
    a, b = towers
    pairs = zip(*[body.invars for body in bodies], strict=True)
    sizes = [
        (m, n)
        for first, second in pairs
        for m, n in zip(first.aval.shape, second.aval.shape, strict=True)
        if m != n and m * a == n * b
    ]
    return [*dict.fromkeys(sizes)] or [(b, a)]


def _given_device(
    pair: EquationPair, operand: int, split: int | None, axes: MeshAxes
) -> Kind:
    """Return the kind that an operand of a map has on one device.

    ``split`` is the dim that is split over the devices; None if it is replicated.
    """
    x = pair.ins[operand]
    has_rows = pair.rows_in[operand] is not None
    if isinstance(x, Unknown | Zero):
        return x
    if isinstance(x, Copy) and not has_rows:
        own_rows = rows(x.power).replace(in_padding=InPadding.AS_EXAMPLE)
        return x if split is None else own_rows
    is_of_each = split is not None and axes.has_each_tower_of(pair.sizes)
    if isinstance(x, Stacked) and is_of_each:
        if pair.towers_in[operand] == split and isinstance(x.of, type):
            return of_one_tower(x, pair.rows_in[operand])
    return pair.unknown(f"no rule for a shard_map of {x}")


def _of_all_devices(
    pair: EquationPair,
    value: Kind,
    own_rows: int | None,
    split: int | None,
    axes: MeshAxes,
) -> Kind:
    """Return the kind of a map's result, from its kind on one device.

    ``own_rows`` is the dim of a device's rows, ``split`` the dim along which the
    devices' results are joined.
    """
    if isinstance(value, Unknown | Zero):
        return value
    if split is None:
        if isinstance(value, Copy) and own_rows is None:
            return copy(value.power)
        return pair.unknown(
            f"out_specs of a shard_map declare {value} the same on all {{many}}"
        )
    if not isinstance(value, _STACKABLE) or blocks_of(value) > 1:
        return pair.unknown(f"out_specs of a shard_map join {value}")
    if own_rows != split and axes.has_each_tower_of(pair.sizes):
        return Stacked(value.power, of=type(value) if own_rows is None else TowerRows)
    if own_rows == split and isinstance(value, TowerRows | Copy):
        return copy(value.power)
    return pair.unknown(f"out_specs of a shard_map join {value}")
