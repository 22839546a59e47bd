"""The rule of a `shard_map`, and so of a `pmap`, whose devices are the towers.

The program around it is a program of all devices, whose results must be the same for
any number of devices. There a COPY is an array that is the same for any number. STACKED
is an array that has the devices' own values, one after another.
"""

from typing import Any

from jax.sharding import PartitionSpec

from towerjax.jaxprs.equation import axes_of_dims, manual_axes, open_jaxpr
from towerjax.proof.equal.equation_pair import EquationPair, Scope, Sizes, rule
from towerjax.proof.equal.kinds import (
    InPadding,
    Kind,
    Known,
    NotOfOneKindError,
    copy,
    rows,
)
from towerjax.proof.equal.walk import Walk
from towerjax.proof.equal.within import mapped_within

_STACKABLE = {Kind.COPY, Kind.ROWS, Kind.PART, Kind.MAXIMUM, Kind.MINIMUM}


@rule("shard_map", knows_unknown=True, kinds=[Kind.STACKED])
def _mapped(pair: EquationPair) -> list[Known]:
    """The kinds of a map's results; a device gets its own rows of split operands."""
    if pair.walk.axes:
        return mapped_within(pair)
    axis = _axis_of(pair)
    bodies = [open_jaxpr(eqn.params["jaxpr"]) for eqn in (pair.first, pair.second)]
    sizes = Sizes(pair.sizes.towers, _rows_each(bodies, pair.sizes.towers))
    alone = manual_axes(pair.first) - {axis}
    walk = Walk(sizes, [axis], has_keys=False, alone=alone)
    walk.kinds = pair.walk.kinds
    splits = [_dim_split(spec, axis) for spec in pair.params["in_specs"]]
    ins = [_given_device(pair, i, split) for i, split in enumerate(splits)]
    outs = walk.closed(bodies[0], bodies[1], ins, Scope(pair.site, within=alone))
    avals = zip(*[[v.aval for v in body.outvars] for body in bodies], strict=True)
    specs = pair.params["out_specs"]
    each = zip(outs, avals, specs, strict=True)
    return [
        _of_all_devices(pair, value, sizes.axes(*both)[0], _dim_split(spec, axis))
        for value, both, spec in each
    ]


def _axis_of(pair: EquationPair) -> str:
    """The one axis of the mesh that has several devices, which must be all of them."""
    first, second = [eqn.params["mesh"].shape for eqn in (pair.first, pair.second)]
    both = {name: (first[name], second.get(name)) for name in first}
    along = [name for name, sizes in both.items() if sizes != (1, 1)]
    is_one = [both[name] for name in along] == [pair.sizes.towers]
    if not is_one or [*first] != [*second] or along[0] not in manual_axes(pair.first):
        raise NotOfOneKindError(
            f"no rule for a shard_map over a mesh of {dict(first)} devices, and of"
            f" {dict(second)}"
        )
    return along[0]


def _rows_each(bodies: list[Any], towers: tuple[int, int]) -> tuple[int, int]:
    """The rows of a device, taken from the first array that is split."""
    a, b = towers
    pairs = zip(*[body.invars for body in bodies], strict=True)
    for first, second in pairs:
        for m, n in zip(first.aval.shape, second.aval.shape, strict=True):
            if m != n and m * a == n * b:
                return m, n
    return b, a


def _dim_split(spec: PartitionSpec, axis: str) -> int | None:
    """The dim that is split over an axis; None if there is none."""
    if spec.unreduced or spec.reduced:
        raise NotOfOneKindError(f"no rule for a shard_map with {spec}")
    dims = enumerate(axes_of_dims(spec))
    return next((i for i, names in dims if axis in names), None)


def _given_device(pair: EquationPair, operand: int, split: int | None) -> Known:
    """The kind of an operand on one device."""
    x = pair.ins[operand]
    has_rows = pair.rows_in[operand] is not None
    if x.kind in (Kind.UNKNOWN, Kind.ZERO):
        return x
    if x.kind is Kind.COPY and not has_rows:
        own = rows(x.power)._replace(in_padding=InPadding.AS_EXAMPLE)
        return x if split is None else own
    if x.kind is Kind.STACKED and split is not None:
        if pair.towers_in[operand] == split:
            return Known(x.note, x.power)
    return pair.unknown(f"no rule for a shard_map of {x}")


def _of_all_devices(
    pair: EquationPair, value: Known, own_rows: int | None, split: int | None
) -> Known:
    """The kind of a result, from its kind on one device."""
    if value.kind in (Kind.UNKNOWN, Kind.ZERO):
        return value
    if split is None:
        if value.kind is Kind.COPY and own_rows is None:
            return copy(value.power)
        return pair.unknown(
            f"out_specs of a shard_map call the same on all towers {value}"
        )
    if value.kind not in _STACKABLE or value.blocks > 1:
        return pair.unknown(f"out_specs of a shard_map join {value}")
    if own_rows != split:
        note = value.kind if own_rows is None else Kind.ROWS
        return Known(Kind.STACKED, value.power, note=note)
    if value.kind in (Kind.ROWS, Kind.COPY):
        return copy(value.power)
    return pair.unknown(f"out_specs of a shard_map join {value}")
