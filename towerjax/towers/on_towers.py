"""A function on all towers, which is traced once, proved, and then run."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.lowering.sharded_values import Shards
from towerjax.lowering.tower_axis import TowerPrograms, over_local_towers
from towerjax.mesh.placement import Placement, TowerAxes
from towerjax.mesh.transfer import place, place_rows, wait_on_cpus
from towerjax.prover.replication.analysis import analyse
from towerjax.prover.replication.findings import Analysis, prove_mirrored, refuse_draws
from towerjax.prover.replication.meshes import refuse_in_towers, refuse_kept_axis
from towerjax.towers.executors import (
    Static,
    closed_over_kinds,
    fingerprint_of_program,
    in_tower_fn,
    is_inside_tower,
    over_devices,
    trace_one_tower,
)
from towerjax.towers.tower import tower_of
from towerjax.towers.values import StrategyFields
from towerjax.types import Layout, PyTree
from towerjax.types.trees import has_tracers, is_traced, shapes_of

_IN_TURN = (
    "A tower names the towers' axis, but tower_loop='scan' runs the towers of a device"
    " one after another, and they cannot communicate. Use tower_loop='vmap'."
)


class OnTowers:
    """A function on all towers: traced once, proved, and then run on the devices.

    ``on_device(axes, programs)`` makes the function that a device runs.

    Attributes:
      axes: The axes of the same towers, each alone on a device, for another trace.
      programs: The traced tower functions of each trace; see `over_local_towers`.
      jaxpr: The program of one device.
      out: The shapes of its results.
    """

    def __init__(
        self,
        on_device: Callable[[TowerAxes, TowerPrograms], Callable[..., PyTree]],
        placement: Placement,
        in_layouts: Sequence[PyTree],
        args: Sequence[PyTree],
    ) -> None:
        self._on_device = on_device
        self._placement = placement
        self._in_layouts = in_layouts
        self._args = args
        self.axes = placement.abstract_axes
        self.programs = TowerPrograms()
        self.jaxpr, self.out = self._trace(self.axes)

    def _trace(self, axes: TowerAxes) -> tuple[ClosedJaxpr, PyTree]:
        try:
            run = self._on_device(axes, self.programs)
            return trace_one_tower(run, axes, self._in_layouts, self._args)
        except NameError as error:
            if not axes.in_turn or axes.tower_axis not in str(error):
                raise
            raise ValueError(_IN_TURN) from error

    def analyse(
        self, names: Sequence[str | None], *, is_free: bool = False
    ) -> Analysis:
        """Find what depends on the tower; refuse equations that towers cannot run.

        ``names`` has a name for each argument's leaf that is per tower, and None for
        others. With ``is_free`` nothing has to be the same on all towers.
        """
        axes = self.axes
        placement = self._placement
        axis = None if is_free else DEVICE_AXIS
        analysis = analyse(self.jaxpr, names, axis, axes.num_towers)
        if placement.shares_devices:
            refuse_draws(analysis)
        axis_names = placement.tower_mesh.axis_names
        refuse_in_towers(
            analysis, self.jaxpr, axes.num_towers, placement.num_devices, axis_names
        )
        shared = placement.shares_devices
        refuse_kept_axis(self.jaxpr, axes.tower_axis, shared=shared)
        return analysis

    def rehearse(self) -> None:
        """Trace the towers of a device together, without a device; raise if that fails.

        Towers that share a device run under `jax.vmap`, which not all of JAX supports.
        """
        if self._placement.axes != self.axes:
            self._trace(self._placement.axes)

    def run(
        self,
        out_layouts: PyTree,
        args: Sequence[PyTree],
        finish: Callable[[PyTree], PyTree] | None = None,
        *,
        shards: Shards | None = None,
    ) -> PyTree:
        """Run all devices, and return their results as global values.

        If ``finish`` is given, each device runs it on its results.
        """
        # `programs` already has the towers' programs, so what runs is what was proved.
        axes = self._placement.axes
        device_fn = self._on_device(axes, self.programs)

        def finished(*args: Any) -> Any:
            results = device_fn(*args)
            return results if finish is None else finish(results)

        run = device_fn if finish is None else finished
        # If each tower has a device for itself, the device's whole program was traced,
        # too, and is run as it is.
        is_proved = finish is None and axes == self.axes
        traced = (self.jaxpr, self.out) if is_proved else None
        place = self._placement
        return over_devices(
            run, place, self._in_layouts, out_layouts, traced=traced, shards=shards
        )(*args)


@jax.tree_util.register_static
@dataclasses.dataclass(eq=False)
class TracedCall(Static):
    """The arguments with which a function was traced, and what it closes over."""

    first: Any  # the call for which the function was traced
    closes_over: str  # see `closed_over_kinds`
    # Whether all processes are known to have traced the same program.
    is_agreed: bool = dataclasses.field(default=False, init=False)

    @classmethod
    def of(cls, value: Any, call: Any, jaxpr: ClosedJaxpr) -> "TracedCall":
        """Record that ``call`` was traced as ``jaxpr``.

        ``value`` is static data that this call and later ones return.
        """
        return cls(value, call, closed_over_kinds(jaxpr))


def run_traced(jitted: Any, placement: Placement, call: Any, *args: PyTree) -> Any:
    """Run ``jitted(call, *args)``, whose last result is a `TracedCall`.

    Returns the other results, and the static value in the `TracedCall`. Raises before
    it runs if the processes have traced different programs, or if this call would use
    constants that the traced call has closed over.
    """
    if placement.num_processes > 1 and not is_traced(args):
        traced = jitted.trace(call, *args)  # the call below reuses this trace
        if not (call_kept := traced.out_info[-1]).is_agreed:
            placement.processes.require_same(
                "A function on all towers",
                fingerprint_of_program(traced, traced.lower()),
                "What it closes over and Python numbers among its arguments are parts"
                " of the program: give it arrays, np.float32(x), of which the first"
                " process's are used.",
            )
            call_kept.is_agreed = True
    *out, call_kept = jitted(call, *args)
    if call_kept.closes_over and call_kept.first is not call:
        raise ValueError(
            "A tower function closes over arrays that a strategy has placed, such as a"
            " variable's value, or gets them in an object that is no pytree:"
            f" {call_kept.closes_over}. It was traced with those of its first call, and"
            " is called again. Pass them as arguments, of fn(tower, variable):"
            " strategy.call_for_each_tower(fn, variable); or in the carry of"
            " run_steps_on_dataset."
        )
    return *out, call_kept.value


_IN_LAYOUTS = (Layout.PER_TOWER, Layout.MIRRORED)
_Call: TypeAlias = tuple[StrategyFields, Placement, Callable[..., Any], str]
"""The key of the jit cache: a function on the towers, and advice for its errors."""


def call_on_towers(
    strategy: StrategyFields,
    tower_fn: Callable[..., Any],
    rows: Sequence[Any],
    arrays: Sequence[Any],
    *,
    advice: str,
) -> tuple[list[jax.Array], list[bool], Any]:
    """Call a function on all towers; return its arrays, and which are mirrored.

    ``tower_fn(tower, rows, arrays)`` gets its own row of ``rows``, leaves ``[T, ...]``,
    and ``arrays`` whole. It returns ``(arrays, wanted, rest)``. For each array
    ``wanted`` has ``Layout.PER_TOWER`` if it stays one per tower; the name of a value
    that must be the same on all towers; or None, for either.

    Returns ``(arrays, whether each is mirrored, rest)``. Equal functions are traced,
    proved and compiled once. The call may stand inside ``jax.jit``, ``jax.grad`` and
    ``lax.scan``. ``advice`` says what to do with a named value that differs.
    """
    placement = strategy.placement
    if is_inside_tower():
        on_first = {"devices": placement.devices[:1], "within": (), "rows": None}
        placement = dataclasses.replace(placement, **on_first, specs=None)
    # The first argument is only there because pmap needs at least one argument with a
    # row per tower, and jit needs one that lies on the strategy's device.
    rows = [np.arange(placement.num_towers, dtype=np.int32), *rows]
    traced = is_traced(())
    rows = [_placed_argument(x, placement, Layout.PER_TOWER, traced) for x in rows]
    arrays = [_placed_argument(x, placement, Layout.MIRRORED, traced) for x in arrays]
    call = (strategy, placement, tower_fn, advice)
    out, (mirrored, rest) = run_traced(_run, placement, call, rows, arrays)
    return wait_on_cpus(out), mirrored, rest


def _placed_argument(x: Any, placement: Placement, layout: Layout, traced: bool) -> Any:
    """Place an argument on the strategy's devices, unless JAX is tracing."""
    if traced or has_tracers(x):
        return jax.tree.map(jnp.asarray, x)
    if placement.num_processes > 1 and layout is Layout.MIRRORED:
        return place(x, placement, layout)  # the first process's value, on all
    return place_rows(x, placement, layout)


def _on_device(
    call: _Call, axes: TowerAxes, programs: TowerPrograms
) -> Callable[..., PyTree]:
    """Build the function that a device runs.

    It returns arrays ``[k, ...]``, and the call's other results as static data.
    """
    strategy, _, tower_fn, _ = call

    def of_tower(
        tower_id: jax.Array, rows: list[jax.Array], arrays: list[jax.Array]
    ) -> tuple[PyTree, PyTree]:
        tower = tower_of(strategy, axes, tower_id)
        with in_tower_fn():
            output, wanted, rest = tower_fn(tower, rows[1:], arrays)
        return (), (output, Static((tuple(wanted), rest)))

    def run(rows: list[jax.Array], arrays: list[jax.Array]) -> PyTree:
        _no_sums, results = over_local_towers(
            of_tower, axes, rows, arrays, stack_sums=False, programs=programs
        )
        return results

    return run


# ``keep_unused`` keeps that first argument, which no tower reads: it tells the device
# of a call that has no other arguments.
@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def _run(
    call: _Call, rows: list[jax.Array], arrays: list[jax.Array]
) -> tuple[list[jax.Array], TracedCall]:
    """Prove and run a call; it is compiled once.

    Returns the arrays, and the other results in a `TracedCall`.
    """
    _, placement, _, advice = call
    args = (rows, arrays)
    names = ["argument"] * len(jax.tree.leaves(rows)) + [None] * len(arrays)
    on_device = functools.partial(_on_device, call)
    towers = OnTowers(on_device, placement, _IN_LAYOUTS, shapes_of(args))
    analysis = towers.analyse(names)
    by_pmap = placement.executor == "pmap" and placement.num_devices > 1
    if by_pmap and has_tracers(towers.jaxpr.consts):
        # pmap would silently give each device a slice of such a value.
        raise ValueError(
            "fn closes over a value of the jit, grad or scan around it, which"
            " executor='pmap' cannot handle. Pass the value to fn as an argument."
        )
    wanted, rest = towers.out[1].value
    same = [x if isinstance(x, str) else None for x in wanted]
    prove_mirrored(analysis, same, advice=advice)
    pairs = zip(analysis.outputs, wanted, strict=True)
    mirrored = [x is None and kind is not Layout.PER_TOWER for x, kind in pairs]

    def finish(out: tuple[list[jax.Array], Static]) -> list[jax.Array]:
        return [x[0] if m else x for x, m in zip(out[0], mirrored, strict=True)]

    layouts = [Layout.MIRRORED if m else Layout.PER_TOWER for m in mirrored]
    call_kept = TracedCall.of((mirrored, rest), call, towers.jaxpr)
    return towers.run(layouts, args, finish), call_kept
