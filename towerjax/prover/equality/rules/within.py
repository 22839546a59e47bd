"""The rule of a `shard_map` over a tower's own devices, and of its collectives.

All towers have equally many devices, and each device has its shard of the tower's
values. Inside the map, a kind describes the values of the devices that have the same
position in their towers. If a tower's devices compute from the same rows or from the
same parts, the result has the kind of these rows or parts.
"""

from typing import Any

from towerjax.jaxprs.params import (
    axes_of_dims,
    manual_axes,
    named_axes,
    names_in,
    open_jaxpr,
)
from towerjax.prover.equality.kinds.equation_pair import EquationPair
from towerjax.prover.equality.kinds.kinds import (
    ELEMENTS,
    LINEAR,
    Copy,
    Kind,
    NotOfOneKindError,
    Unknown,
    Zero,
    blocks_of,
    copy,
    rows,
)

_LINEAR_MEETINGS = """
    psum psum_invariant all_gather all_gather_invariant ppermute reduce_scatter
    psum_scatter all_to_all
""".split()
# These change only the type of a value.
_NO_MEETINGS = frozenset("pvary pcast".split())


def mapped_within(pair: EquationPair) -> list[Kind]:
    """Run a `shard_map` over a tower's own devices."""
    axes = manual_axes(pair.first)
    towers = {name for names in pair.walk.axes for name in names}
    if axes & towers or axes != manual_axes(pair.second):
        raise NotOfOneKindError("a shard_map in a {one} is over the {many}")
    split = _axes_of_rows(pair)
    parts = [_given_part(pair, x) for x in pair.ins]
    bodies = [open_jaxpr(x.params["jaxpr"]) for x in (pair.first, pair.second)]
    outs = pair.inside(
        bodies,
        parts,
        within=pair.scope.within | (axes - split),
        # If a tower's rows are split over its devices, a device has a chunk of them.
        in_chunks=pair.scope.in_chunks or bool(split),
    )
    return [_of_parts(pair, i, x, split) for i, x in enumerate(outs)]


def _axes_along(spec: Any, dim: int | None) -> frozenset[str]:
    """Find the mesh axes over which a spec splits the dim ``dim``."""
    dims = axes_of_dims(spec)
    names = dims[dim] if dim is not None and dim < len(dims) else ()
    return frozenset(name for name in names if name is not None)


def _axes_of_rows(pair: EquationPair) -> frozenset[str]:
    """Find the mesh axes over which a tower's rows are split.

    They must be equal for all operands that have rows. An operand without rows must not
    be split over them: a row would be combined only with the shard on its own device.
    """
    specs = [*zip(pair.params["in_specs"], pair.rows_in, strict=True)]
    splits = {_axes_along(spec, axis) for spec, axis in specs if axis is not None}
    if len(splits) > 1:
        raise NotOfOneKindError(
            "rows that are split over some mesh axes are combined with rows that are"
            " split over others"
        )
    split = splits.pop() if splits else frozenset()
    if any(axis is None and names_in(spec) & split for spec, axis in specs):
        raise NotOfOneKindError(
            "rows that are split over a {one}'s devices are combined with another value"
            " that differs between these devices"
        )
    return split


def _given_part(pair: EquationPair, x: Kind) -> Kind:
    """Give each device of a tower its shard of an operand."""
    if isinstance(x, LINEAR | Unknown) and blocks_of(x) == 1:
        return x if isinstance(x, Copy) else x.bare()
    return pair.unknown(f"no rule for a shard_map of {x}")


def _of_parts(pair: EquationPair, result: int, x: Kind, split: frozenset[str]) -> Kind:
    """Join the shards on a tower's devices to the tower's result.

    ``x`` is the kind of the shard on each device. ``split`` are the mesh axes over
    which the tower's rows are split.
    """
    axis = pair.rows_out[result]
    along = _axes_along(pair.params["out_specs"][result], axis)
    is_whole = isinstance(x, Copy | Zero) or not split
    if axis is not None:
        is_whole = along == split and blocks_of(x) == 1
    if not isinstance(x, Unknown) and not (isinstance(x, LINEAR) and is_whole):
        return pair.unknown(f"a shard_map within a {{one}} returns {x}")
    return x.bare()


def is_within(pair: EquationPair) -> bool:
    """Return whether a collective joins only devices of one tower, for each tower.

    Each of these devices has all rows of its tower.
    """
    axes = frozenset(named_axes(pair.first))
    return bool(axes) and axes <= pair.scope.within and pair.name not in _NO_MEETINGS


def met_within(pair: EquationPair) -> list[Kind]:
    """Let a collective join the devices of each tower; the kinds stay.

    Along the dim of rows it joins or splits whole blocks of all rows.
    """
    if pair.name == "axis_index":
        return [copy()]
    kinds = LINEAR if pair.name in _LINEAR_MEETINGS else ELEMENTS
    met = [x.bare() for x in pair.ins]
    for i, x in enumerate(met):
        blocks = _blocks_met(pair, i)
        if not isinstance(x, kinds) or blocks is None:
            raise NotOfOneKindError(f"no rule for {pair.name} of {x} within a {{one}}")
        if blocks != blocks_of(x) and not isinstance(x, Zero):
            met[i] = rows(x.power, blocks)
    return met


def _blocks_met(pair: EquationPair, operand: int) -> int | None:
    """Count how often a dim repeats all rows after a collective within a tower.

    The result is None if the collective may cut a block, or mix its rows.
    """
    x = pair.ins[operand]
    before = pair.rows_in[operand]
    after = pair.rows_out[operand]
    names = ["all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis"]
    along = [pair.params[name] for name in names if name in pair.params]
    if not {before, after} & {*along}:
        return blocks_of(x)
    is_one_side = len({*along}) == len(along) and pair.params.get("tiled", False)
    if before is None or before != after or not is_one_side:
        return None
    blocks = blocks_of(x) * pair.out_shape(operand)[before]
    whole, left = divmod(blocks, pair.shape(operand)[before])
    return None if left else whole
