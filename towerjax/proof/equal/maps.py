"""The rule of a `shard_map`, and so of a `pmap`, whose devices are the towers.

The program around it is a program of all devices, whose results must be the same for
any number of devices. There a COPY is an array that is the same for any number. STACKED
is an array that has the devices' own values, one after another.

The devices may lie along several axes of the mesh that always act together: each array
is split over all of them, and each collective names all of them, in the mesh's order.
"""

import math
from typing import Any, TypeAlias

from jax.sharding import PartitionSpec

from towerjax.jaxprs.params import axes_of_dims, manual_axes, open_jaxpr
from towerjax.proof.equal.equation_pair import EquationPair, Scope, Sizes
from towerjax.proof.equal.kinds import (
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
    rows,
)
from towerjax.proof.equal.rules import OF_ONE_TOWER, rule
from towerjax.proof.equal.walk import Walk
from towerjax.proof.equal.within import mapped_within
from towerjax.types.refusals import listed

_STACKABLE: TypeAlias = Copy | TowerRows | Part | Maximum | Minimum


@rule("shard_map", every=OF_ONE_TOWER | Stacked | Unknown)
def _mapped(pair: EquationPair, *operands: Kind) -> list[Kind]:
    """The kinds of a map's results; a device gets its own rows of split operands."""
    if pair.walk.axes:
        return mapped_within(pair)
    axes = _axes_of(pair)
    bodies = [open_jaxpr(eqn.params["jaxpr"]) for eqn in (pair.first, pair.second)]
    sizes = Sizes(pair.sizes.towers, _rows_each(bodies, pair.sizes.towers))
    alone = manual_axes(pair.first) - {*axes}
    walk = Walk(sizes, [axes], has_keys=False, alone=alone)
    walk.kinds = pair.walk.kinds
    splits = [_dim_split(spec, axes) for spec in pair.params["in_specs"]]
    ins = [_given_device(pair, i, split) for i, split in enumerate(splits)]
    outs = walk.closed(bodies[0], bodies[1], ins, Scope(pair.site, within=alone))
    avals = zip(*[[v.aval for v in body.outvars] for body in bodies], strict=True)
    specs = pair.params["out_specs"]
    each = zip(outs, avals, specs, strict=True)
    return [
        _of_all_devices(pair, value, sizes.axes(*both)[0], _dim_split(spec, axes))
        for value, both, spec in each
    ]


def _axes_of(pair: EquationPair) -> tuple[str, ...]:
    """The axes of the mesh that have several devices, which must be all of them."""
    first, second = [eqn.params["mesh"].shape for eqn in (pair.first, pair.second)]
    both = {name: (size, second.get(name, 0)) for name, size in first.items()}
    along = tuple(name for name, sizes in both.items() if sizes != (1, 1))
    towers = math.prod(first[x] for x in along), math.prod(both[x][1] for x in along)
    is_mesh = [*first] == [*second] and {*along} <= manual_axes(pair.first)
    if not (along and is_mesh) or towers != pair.sizes.towers:
        raise NotOfOneKindError(
            f"no rule for a shard_map over a mesh of {dict(first)} devices, and of"
            f" {dict(second)}"
        )
    return along


def _rows_each(bodies: list[Any], towers: tuple[int, int]) -> tuple[int, int]:
    """The rows of a device, taken from the first array that is split."""
    a, b = towers
    pairs = zip(*[body.invars for body in bodies], strict=True)
    for first, second in pairs:
        for m, n in zip(first.aval.shape, second.aval.shape, strict=True):
            if m != n and m * a == n * b:
                return m, n
    return b, a


def _dim_split(spec: PartitionSpec, axes: tuple[str, ...]) -> int | None:
    """The dim that is split over the axes; None if there is none."""
    if spec.unreduced or spec.reduced:
        raise NotOfOneKindError(f"no rule for a shard_map with {spec}")
    dims = [
        tuple(name for name in names if name in axes) for names in axes_of_dims(spec)
    ]
    split = [(i, names) for i, names in enumerate(dims) if names]
    if any(names != axes for _, names in split):
        raise NotOfOneKindError(
            f"no rule for {spec} in a shard_map over {listed(map(repr, axes))}, which"
            " must act together"
        )
    return split[0][0] if split else None


def _given_device(pair: EquationPair, operand: int, split: int | None) -> Kind:
    """The kind of an operand on one device."""
    x = pair.ins[operand]
    has_rows = pair.rows_in[operand] is not None
    if isinstance(x, Unknown | Zero):
        return x
    if isinstance(x, Copy) and not has_rows:
        own = rows(x.power).replace(in_padding=InPadding.AS_EXAMPLE)
        return x if split is None else own
    if isinstance(x, Stacked) and split is not None:
        if pair.towers_in[operand] == split and isinstance(x.of, type):
            return x.of(x.power)
    return pair.unknown(f"no rule for a shard_map of {x}")


def _of_all_devices(
    pair: EquationPair, value: Kind, own_rows: int | None, split: int | None
) -> Kind:
    """The kind of a result, from its kind on one device."""
    if isinstance(value, Unknown | Zero):
        return value
    if split is None:
        if isinstance(value, Copy) and own_rows is None:
            return copy(value.power)
        return pair.unknown(
            f"out_specs of a shard_map call the same on all {{many}} {value}"
        )
    if not isinstance(value, _STACKABLE) or blocks_of(value) > 1:
        return pair.unknown(f"out_specs of a shard_map join {value}")
    if own_rows != split:
        return Stacked(value.power, of=type(value) if own_rows is None else TowerRows)
    if isinstance(value, TowerRows | Copy):
        return copy(value.power)
    return pair.unknown(f"out_specs of a shard_map join {value}")
