"""`OnTowers`: a function on all towers, as passes and call_for_each_tower run it."""

from collections.abc import Callable, Sequence

from jax.extend.core import ClosedJaxpr

from towerjax.lowering.sharded_values import Shards
from towerjax.lowering.tower_axis import TowerPrograms
from towerjax.mesh.placement import DEVICE_AXIS, Placement, TowerAxes
from towerjax.proof.analysis import analyse
from towerjax.proof.findings import Analysis, refuse_draws
from towerjax.proof.meshes import refuse_in_towers, refuse_kept_axis
from towerjax.towers.executors import over_devices, trace_one_tower
from towerjax.types import PyTree

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
        """The findings on what depends on the tower; raise for what towers cannot run.

        ``names`` names the leaves of the arguments that are per tower. With ``is_free``
        nothing has to be the same on all towers.
        """
        axes = self.axes
        placement = self._placement
        axis = None if is_free else DEVICE_AXIS
        analysis = analyse(self.jaxpr, names, axis, axes.num_towers)
        if placement.shares_devices:
            refuse_draws(analysis)
        counts = axes.num_towers, placement.num_devices
        own = placement.tower_mesh.axis_names
        refuse_in_towers(analysis, self.jaxpr, *counts, own)
        shared = placement.shares_devices
        refuse_kept_axis(self.jaxpr, axes.tower_axis, shared=shared)
        return analysis

    def rehearse(self) -> None:
        """Trace the towers of one device without a device, and raise if that fails.

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
        """The results of all devices as global values; each device runs ``finish``."""
        # The towers' program is the one that was proved.
        axes = self._placement.axes
        run = device_fn = self._on_device(axes, self.programs)
        if finish is not None:
            run = lambda *args: finish(device_fn(*args))  # noqa: E731
        # Where each tower is alone on a device, so is the whole device's.
        is_proved = run is device_fn and axes == self.axes
        traced = (self.jaxpr, self.out) if is_proved else None
        place = self._placement
        layouts = (self._in_layouts, out_layouts)
        return over_devices(run, place, *layouts, traced=traced, shards=shards)(*args)
