"""Which of the user's meshes and Refs the towers and the update of a step may use.

A tower runs on one device. The update runs once, on all devices of the step, and all of
them get the same result. A `shard_map` in the update over these devices is analysed
axis by axis, as towers are. If its ``out_specs`` declare a result the same along an
axis, it must not differ along that axis, or copies of the parameters would drift apart.
"""

from collections.abc import Sequence

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from towerjax.jaxprs.flow import is_ref
from towerjax.jaxprs.params import is_hidden, named_axes, open_jaxpr, trace_hidden
from towerjax.jaxprs.sites import Site, all_sites, outwards, user_line
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.prover.replication.analysis import along_each_axis
from towerjax.prover.replication.findings import Analysis, ReplicationError
from towerjax.types.refusals import listed
from towerjax.types.tables import number_of

_KEEP = (
    "Keep its value in the state: step.init(..., extra=value), or for each tower"
    " local=tj.TowerLocal(value, ...)."
)
_KERNELS = frozenset("core_map mpmd_map pallas_call".split())
_WITHIN = (
    "Leave it out: the step already maps towers over the devices, and they communicate"
    " with tower.reduce and tower.all_gather. An optimizer that shards over the step's"
    " devices does so in its update. For sharded parameters write"
    " tj.Mirrored(state='sharded')."
)


def refuse_in_towers(
    analysis: Analysis, jaxpr: ClosedJaxpr, towers: int, on: int, axes: Sequence[str]
) -> None:
    """Raise if a tower function uses a mesh that is not its own, or a Ref from outside.

    ``towers`` and ``on`` are the numbers of towers and of devices. ``axes`` are the
    axes of the devices within a tower, over which the function may map.
    """
    if towers > 1 and _closes_over_ref(jaxpr):
        raise ValueError(
            f"A tower function closes over a Ref, which {towers} towers would share."
            f" {_KEEP}"
        )
    for x in analysis.meshes:
        if (on > 1 or x.size > 1) and x.axes != axes:
            raise ReplicationError(
                f"A tower runs on one device, but {x.primitive} at"
                f" {x.line or 'a line of a library'} puts its values on a mesh with the"
                f" axes {x.axes}. {_WITHIN}"
            )
        for axis, in_axis in x.along.items():
            for mistake in mistakes(in_axis, axis):
                line = x.line or "a line of a library"
                raise ReplicationError(f"shard_map at {line} in a tower: {mistake}")


def refuse_kept_axis(jaxpr: ClosedJaxpr, axis: str, *, shared: bool) -> None:
    """Raise if code that cannot be rewritten for the devices names the towers' axis.

    Such code is inside a kernel, for example. ``shared`` tells whether several towers
    share a device; a kernel then does not know the axis of the towers on its device.
    """
    for site in all_sites(jaxpr):
        eqn, outer = site
        if not (named := named_axes(eqn)):
            continue
        around = [x.primitive.name for x in outwards(outer)]
        names = {axis, DEVICE_AXIS} if shared and _KERNELS & {*around} else {axis}
        if names.intersection(named):
            raise ReplicationError(
                f"{eqn.primitive} at {user_line(site) or 'a line of a library'} names"
                f" the towers' axis inside {around[0]}, where it is not known when"
                " towers run. Compute tower.id or tower.reduce(...) before, and pass"
                " the result as an operand."
            )


def prove_update(jaxpr: ClosedJaxpr, axis: str, towers: int, on: int) -> None:
    """Raise if the update communicates over ``axis``, or if its results would differ.

    The copies of a result on all devices must be equal. ``jaxpr`` is the step's program
    for ``towers`` towers on ``on`` devices. Its equation that runs the towers is
    skipped.
    """
    if on > 1 and _closes_over_ref(jaxpr):
        raise ValueError(
            f"The update closes over a Ref, which belongs to one device. {_KEEP}"
        )
    for site in all_sites(jaxpr, enter=lambda eqn: not _is_of_towers(eqn)):
        eqn = site[0]
        names = {*named_axes(eqn)}
        if is_hidden(eqn) and (hidden := trace_hidden(eqn, {axis: towers})):
            names |= {x for inner in all_sites(hidden) for x in named_axes(inner[0])}
        if axis in names:
            raise ReplicationError(
                f"The update must not communicate: {eqn.primitive} at"
                f" {user_line(site) or 'a line of a library'} names the axis {axis!r}."
                " The update runs once, on the towers' merged results. Leave the"
                " collective out."
            )
        if eqn.primitive.name == "shard_map" and not _is_of_towers(eqn):
            _prove_mapped(site, on)


def refuse_mapped(jaxpr: ClosedJaxpr) -> None:
    """Raise if an update that each device runs for its own shards has a `shard_map`."""
    for site in all_sites(jaxpr):
        if site[0].primitive.name == "shard_map":
            line = user_line(site) or "a line of a library"
            raise ValueError(
                f"shard_map at {line} is in the update of a sharded state, which with"
                " tj.PinnedTree() each device computes for its own shard. Leave it out,"
                " or use state='mirrored'."
            )


def _prove_mapped(site: Site, on: int) -> None:
    """Raise if a `shard_map` of the update has a mistake along one of its axes.

    ``on`` is the number of the step's devices.
    """
    params = site[0].params
    mesh = params["mesh"]
    line = user_line(site) or "a line of a library"
    if mesh.size != on:
        raise ValueError(
            f"The step has {number_of(on, 'device')}, but shard_map at {line}, in its"
            f" update, runs on {mesh.size}. Make its mesh from the step's devices,"
            " or leave the shard_map out."
        )
    for axis, analysis in along_each_axis(site).items():
        texts = mistakes(analysis, axis)
        if sums := of_equals(analysis, "added up", "counted"):
            texts.append(
                f"a value that is the same on all devices is added up over {axis!r},"
                f" which multiplies it by their number, at {sums}. The update already"
                " gets the sums of all towers. Leave the sum out, or write"
                f" jax.lax.pmean(x, {axis!r})."
            )
        for text in texts:
            raise ReplicationError(f"shard_map at {line} in the update: {text}")


def of_equals(analysis: Analysis, *uses: str) -> str:
    """List the lines where a value that is equal on all devices is summed.

    ``uses`` are the values of `Collective.of_equals` for which lines are returned.
    """
    lines = [x.line for x in analysis.collectives if x.of_equals in uses]
    return listed(dict.fromkeys([x or "a line of a library" for x in lines]))


def mistakes(analysis: Analysis, axis: str) -> list[str]:
    """Describe each mistake along an axis, with what to write instead."""
    texts = []
    if any(analysis.outputs):
        outputs = enumerate(analysis.outputs)
        lines = [f"result {i} depends on {x.told()}" for i, x in outputs if x]
        texts.append(
            "its out_specs call results the same on all devices, but these differ along"
            f" {axis!r}, so copies would drift apart: {listed(lines)}. Write"
            f" out_specs=P({axis!r}), or reduce them with jax.lax.psum or pmean(x,"
            f" {axis!r})."
        )
    if analysis.hangs:
        lines = [f"{x.primitive} at {x.line}" for x in analysis.hangs]
        texts.append(
            f"not all devices along {axis!r} reach {listed(dict.fromkeys(lines))}, so"
            " they would hang. Make the predicate the same on all devices."
        )
    return texts


def _is_of_towers(eqn: JaxprEqn) -> bool:
    """Return whether this equation is the step's own map of its towers over devices."""
    mesh = eqn.params.get("mesh") if eqn.primitive.name == "shard_map" else None
    return mesh is not None and DEVICE_AXIS in mesh.axis_names


def _closes_over_ref(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    return any(map(is_ref, open_jaxpr(jaxpr).constvars))
