"""The strategies Mirrored and OneDevice: towers, devices, options and methods."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, TypeVar, get_args

import jax

from towerjax.collectives import AllReduce, CrossTowerOps, PinnedTree
from towerjax.collectives.ops import ChecksDevices
from towerjax.data.batch_rows import Remainder
from towerjax.data.distribute import DistributedDataset, InputOptions, Split
from towerjax.jaxprs.tags import DEVICE_AXIS, LOCAL_AXIS, TOWER_AXIS
from towerjax.mesh import live
from towerjax.mesh.absent import Absent
from towerjax.mesh.cluster.start import require_joined
from towerjax.mesh.devices import (
    canonical_device_name,
    canonical_device_names,
    first_of_each_process,
)
from towerjax.mesh.placement import Placement
from towerjax.mesh.specs import Specs
from towerjax.towers.pick import count_groups, names_by_process, pick_devices
from towerjax.towers.reduce import reduce_values
from towerjax.towers.values import StrategyFields, unwrap
from towerjax.types.boundary import api_boundaries
from towerjax.types.notes import explain_missing
from towerjax.types.options import (
    cast_ints,
    check_choice,
    check_takes,
    check_whole,
    short_repr,
)
from towerjax.types.refusals import a_type
from towerjax.types.version import page

# Compilers fuse and round the arithmetic of a few elements in other ways than that of
# many. Shards of at least this many elements have the bits of whole arrays.
_EXACT_RUN = 128

StateLayout: TypeAlias = Literal["mirrored", "sharded_optimizer", "sharded"]
"""The layout of a step's state between steps; see `Mirrored`."""


_Class = TypeVar("_Class", bound=type)


@api_boundaries
class StrategyMethods(StrategyFields):
    """The methods of every strategy: pure functions of all towers' values.

    They are called outside of a step. A value is a pytree: its ``PerTower`` leaves and
    ``TowerLocal`` variables hold one value per tower, and its other leaves are
    replicated. With several processes, the first process's replicated values are used.
    Each method raises a ``ValueError`` for a value with another number of towers than
    the strategy, for a per-tower value where one value is needed, for a dtype that no
    device holds, and for devices that are not there.
    """

    reduce = reduce_values
    unwrap = unwrap

    __repr__ = short_repr

    def __getstate__(self) -> dict[str, Any]:
        """Keep the options alone, as a cached placement's devices do not pickle."""
        names = [field.name for field in dataclasses.fields(self)]  # type: ignore
        return {name: getattr(self, name) for name in names}

    @classmethod
    def _class_like(cls, plain: _Class) -> _Class:
        """Choose the class for a strategy like this one: ``plain``, or a subclass."""
        return plain

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """The names of the devices that the towers run on, in tower order."""
        return self.placement.devices

    def distribute_dataset(
        self,
        source: Any,
        *,
        split: Split = "batch",
        remainder: Remainder = "pad",
        micro_batches: int = 1,
    ) -> DistributedDataset:
        """Place a data set's batches on the towers, one batch per step.

        The order is kept. ``prefetch_on_device`` batches are placed in advance.

        Args:
          source: An iterable of batches, a loader (Grain, ``tf.data``, PyTorch), or a
            function without arguments that returns one. Then every process reads all of
            it and places the rows of its own towers. Or a function of an
            `InputContext`, which returns the batches of its own process alone.
          split: ``"batch"`` splits each element, a global batch, over the towers.
            ``"elements"`` gives each tower an element of its own, so that a step takes
            ``T`` elements, as TensorFlow's ``MirroredStrategy`` did.
          remainder: What to do with rows that the towers cannot share evenly, and when
            elements or a process's batches run out: ``"pad"`` with rows of weight 0,
            ``"drop"`` them, or raise an ``"error"``.
          micro_batches: The step's own number, which must divide a tower's rows, too.

        Returns:
          A `DistributedDataset`.

        Raises:
          ValueError: ``source`` cannot be iterated, or an option is wrong.

        Example:
          >>> import numpy as np, towerjax as tj
          >>> strategy = tj.Mirrored(devices=("cpu:0",), towers=2)
          >>> batches = [np.arange(4), np.arange(4, 7)]
          >>> for placed in strategy.distribute_dataset(batches):
          ...     print(placed.arrays.tolist(), placed.counts.tolist())
          [0, 1, 2, 3] [2, 2]
          [4, 5, 6, 6] [2, 1]
        """
        options = InputOptions(split, remainder, micro_batches, self.prefetch_on_device)
        return DistributedDataset(self.placement, source, options)


METHODS_OF_TENSORFLOW = """
    assign assign_add assign_sub batch_reduce broadcast call_for_each_tower configure
    create_var fetch map read_var regroup run_steps_on_dataset select_tower update
""".split()
PROPERTIES_OF_TENSORFLOW = """
    between_graph is_single_tower parameter_devices should_checkpoint should_init
    should_save_summary worker_device_index
""".split()


_OTHERS = (
    f"What to write for each name of TensorFlow: {page('reference/mirrored_strategy')}"
)


def explain_names_of_tensorflow(name: str) -> Callable[[Any, str], Any]:
    """Make a ``__getattr__`` that names the class of ``tj.tf1`` to use.

    ``name`` is that class, such as ``"MirroredStrategy"``.
    """
    notes = {}
    for kind, names in (
        ("method", METHODS_OF_TENSORFLOW),
        ("property", PROPERTIES_OF_TENSORFLOW),
    ):
        for x in names:
            notes[x] = (
                f"{x} is a {kind} of tj.tf1.{name}: write"
                f" strategy = tj.tf1.{name}(...), with the same options."
            )
    return explain_missing(_OTHERS, **notes)


@api_boundaries
@dataclasses.dataclass(frozen=True, repr=False)
class Mirrored(StrategyMethods):
    """``T`` towers that share mirrored parameters, with one reduction per step.

    Attributes:
      devices: ``"platform:index"`` names or ``jax.Device`` objects, in tower order.
        None takes every accelerator of every process, or the CPUs if there is none. The
        index counts over all processes, one process after the other. With `Absent`
        devices, steps are proved and compiled but do not run.
      num_gpus: How many GPUs of each process to use, the first ones; 0 is the CPU.
      num_gpus_per_worker: Another name of ``num_gpus``.
      towers: The number of towers ``T``, a multiple of the number of devices; None is
        one tower per device. If ``devices`` is None, the strategy uses the largest
        number of devices that divides ``T``.
      tower_loop: How the ``k = T / D`` towers of a device run: ``"vmap"`` runs them
        together, ``"scan"`` one after another, which needs the memory of one tower.
      executor: ``"shard_map"``, or ``"pmap"``, JAX's legacy path.
      cross_tower_ops: How sums are communicated: `AllReduce`, `PinnedTree`, `Packed`,
        `ReduceToOneDevice` or `Hierarchical`; see
        `choose_cross_tower_ops`.
      prefetch_on_device: How many placed batches `distribute_dataset` keeps ready; 0
        places each batch when it is requested.
      axis_name: The name of the axis of all towers, as ``tower.axis_names`` returns it;
        for code with a fixed axis name, such as ``"batch"``.
      state: The layout of a step's state. ``"mirrored"`` keeps all of it on each
        device. With ``"sharded_optimizer"`` each device holds and updates a shard of
        the optimizer's state (ZeRO-1). With ``"sharded"`` parameters and gradients are
        sharded, too, and gathered where the loss uses them (FSDP). See
        <https://github.com/towerjax/towerjax/blob/main/docs/how_to/larger_than_a_device.md>.
      within: The axes of a tower of several devices, with their sizes, such as
        ``{"model": 2}``; kept as pairs. In a tower function
        ``jax.lax.with_sharding_constraint``, Flax's partitioning and ``jax.shard_map``
        know these axes. ``D`` then counts the groups of devices, which are neighbours
        in ``devices``.
      rows: The axis of ``within`` along which a tower's rows are split; with None each
        device of a tower has all its rows.
      specs: How parameters are split over the axes of ``within``: a tree (or tree
        prefix) of ``jax.sharding.PartitionSpec``, or a function ``(name, leaf) ->
        PartitionSpec`` of names such as ``"dense/kernel"``. The optimizer's state of a
        parameter, such as its momentum, is split in the same way. With None each
        parameter is whole on each device.

    Raises:
      ValueError: Two options exclude each other; there are no devices, or one is named
        twice; a name is invalid; ``towers`` is no multiple of the devices; these
        devices cannot run ``cross_tower_ops``; or the axes do not divide the devices.

    Example:
      >>> Mirrored(devices=("CPU:0",), towers=8, tower_loop="scan")
      Mirrored(devices=('cpu:0',), towers=8, tower_loop='scan')
    """

    devices: Sequence[Any] | Absent | None = None
    num_gpus: int | None = None
    num_gpus_per_worker: int | None = None
    towers: int | None = None
    tower_loop: Literal["vmap", "scan"] = "vmap"
    executor: Literal["shard_map", "pmap"] = "shard_map"
    cross_tower_ops: CrossTowerOps = AllReduce()
    prefetch_on_device: int = 2
    axis_name: str = TOWER_AXIS
    state: StateLayout = "mirrored"
    within: Mapping[str, int] | tuple[tuple[str, int], ...] = ()
    rows: str | None = None
    specs: Any = None

    if not TYPE_CHECKING:
        __getattr__ = explain_names_of_tensorflow("MirroredStrategy")

    def __post_init__(self) -> None:
        """Check the options as far as that is possible without asking for devices."""
        object.__setattr__(self, "within", _checked_axes(self.within, self.axis_name))
        object.__setattr__(self, "specs", Specs.of(self.specs))
        _check_choices(self)
        cast_ints(self)
        if not isinstance(self.devices, Absent | None):
            object.__setattr__(self, "devices", canonical_device_names(self.devices))
        devices = self._named_devices()
        if devices is not None:
            groups = count_groups(len(devices), self._each)
            if self.towers is not None and self.towers % groups:
                below = self.towers // groups * groups
                use = f"{below} or {below + groups}" if below else below + groups
                devices_each = self._each
                are = (
                    "devices"
                    if devices_each == 1
                    else f"groups of {devices_each} devices"
                )
                raise ValueError(
                    f"towers={self.towers} is not a multiple of the {groups} {are}, so"
                    f" they cannot share the towers evenly. Use towers={use}, or"
                    " another number of devices."
                )
            _check_ops(self.cross_tower_ops, devices[:: self._each])

    @property
    def exact(self) -> bool:
        """Whether results have the same bits on any number of devices.

        The cross-tower ops then add the towers in an order that does not depend on
        devices.
        """
        return self.cross_tower_ops.needs_every_tower

    @property
    def _each(self) -> int:
        """The number of devices of a tower."""
        return math.prod(dict(self.within).values())

    @functools.cached_property
    def placement(self) -> Placement:
        """Where the towers are, by the names of their devices."""
        if not isinstance(self.devices, Absent):
            require_joined()
        devices = self._devices()
        devices_each = self._each
        groups = count_groups(len(devices), devices_each)
        _check_ops(self.cross_tower_ops, devices[::devices_each])
        return Placement(
            devices=devices,
            num_towers=self.towers or groups,
            tower_loop=self.tower_loop,
            executor=self.executor,
            axis_name=self.axis_name,
            absent=self.devices if isinstance(self.devices, Absent) else None,
            shard_run=_EXACT_RUN if self.exact else 1,
            within=tuple(dict(self.within).items()),
            rows=self.rows,
            specs=self.specs,
        )

    @property
    def _gpus_per_process(self) -> int | None:
        return self.num_gpus_per_worker if self.num_gpus is None else self.num_gpus

    def _named_devices(self) -> tuple[str, ...] | None:
        """Name the devices that the options give; None if they give none."""
        if isinstance(self.devices, Absent):
            return self.devices.names
        if self.devices is not None:
            return tuple(self.devices)
        if (gpus := self._gpus_per_process) is None:
            return None
        return tuple(f"gpu:{i}" for i in range(gpus)) or ("cpu:0",)

    def _devices(self) -> tuple[str, ...]:
        gpus = self._gpus_per_process
        named = self._named_devices()
        if gpus is not None and jax.process_count() > 1:
            return first_of_each_process(gpus)
        if named is not None:
            return named
        of_each = names_by_process(jax.devices())
        if self.towers is None:
            return tuple(name for names in of_each.values() for name in names)
        return pick_devices(of_each, self.towers, self._each)


@api_boundaries
@dataclasses.dataclass(frozen=True, repr=False)
class OneDevice(StrategyMethods):
    """One tower on one device: no split, no scaling, no communication.

    Attributes:
      device: A ``"platform:index"`` name, a ``jax.Device``, or `Absent` of one device;
        None is the default device.
      prefetch_on_device: As for `Mirrored`.
      axis_name: As for `Mirrored`.

    Raises:
      ValueError: ``device`` is not the name of a device, or stands for several absent
          ones.

    Example:
      >>> OneDevice("CPU:0")
      OneDevice(device='cpu:0')
    """

    device: str | Absent | None = None
    prefetch_on_device: int = 2
    axis_name: str = TOWER_AXIS

    state: ClassVar[StateLayout] = "mirrored"  # one device has nothing to shard
    cross_tower_ops: ClassVar[CrossTowerOps] = AllReduce()  # no communication
    exact: ClassVar[bool] = False  # it never runs on another number of devices

    if not TYPE_CHECKING:
        __getattr__ = explain_names_of_tensorflow("OneDeviceStrategy")

    def __post_init__(self) -> None:
        _check_axis_name(self.axis_name)
        check_whole("prefetch_on_device", self.prefetch_on_device, 0)
        if isinstance(self.device, Absent):
            if len(self.device) != 1:
                raise ValueError(
                    f"OneDevice(device={self.device!r}) is {len(self.device)} devices."
                    f" Write tj.Mirrored(devices={self.device!r}) for a tower on each."
                )
        elif self.device is not None:
            object.__setattr__(self, "device", canonical_device_name(self.device))

    @functools.cached_property
    def placement(self) -> Placement:
        """Where the tower is, by the name of its device."""
        absent = self.device if isinstance(self.device, Absent) else None
        if absent is None:
            require_joined()
        name = self.device or canonical_device_name(jax.local_devices()[0])
        names = absent.names if absent else (str(name),)
        return Placement(names, 1, axis_name=self.axis_name, absent=absent)


Strategy = Mirrored | OneDevice
"""The towers, their devices, and how values are laid out and reduced."""


def with_specs(strategy: Strategy, specs: Any) -> Strategy:
    """Give the strategy a builder's ``specs``; change nothing if they are None."""
    if specs is None:
        return strategy
    if not isinstance(strategy, Mirrored):
        raise ValueError(
            "specs=... splits parameters within towers of several devices, but a tower"
            f" of {strategy!r} has one device. Write tj.Mirrored(towers=1,"
            " within={'model': 2})."
        )
    return dataclasses.replace(strategy, specs=specs)


def on_those_left(strategy: Strategy) -> Strategy:
    """Put the strategy on the most devices that are left and share the towers.

    The devices are those of the strategy whose processes are not left out. If all are
    left, the strategy is the same. Processes may be left over.
    """
    placement = strategy.placement
    left = {*live.numbers_left()}
    if not isinstance(strategy, Mirrored) or left.issuperset(
        placement.processes.numbers
    ):
        return strategy
    of_each = {
        number: names
        for number, names in names_by_process(placement.jax_devices).items()
        if names
    }
    towers = placement.num_towers
    size = placement.devices_each
    return dataclasses.replace(
        strategy,
        devices=pick_devices(of_each, towers, size, spares=True),
        towers=towers,
        num_gpus=None,
        num_gpus_per_worker=None,
    )


def on_one_tower(strategy: Strategy) -> Strategy:
    """Cut the strategy down to one tower, on its first device or group."""
    if strategy.placement.within:
        return on_one_group(strategy, 1)
    return strategy._class_like(OneDevice)(strategy.placement.devices[0])


def on_one_group(strategy: Strategy, towers: int, *, narrow: bool = False) -> Mirrored:
    """Put ``towers`` towers on the devices of a single tower.

    They are devices of this process. With ``narrow`` the strategy uses one device, and
    the axes within a tower have size 1.
    """
    placement = strategy.placement
    here = jax.process_index()
    pairs = zip(placement.devices, placement.jax_devices, strict=True)
    names_here = [name for name, device in pairs if device.process_index == here]
    within = tuple((name, 1 if narrow else size) for name, size in placement.within)
    return strategy._class_like(Mirrored)(
        devices=names_here[: 1 if narrow else placement.devices_each],
        towers=towers,
        tower_loop=placement.tower_loop,  # type: ignore[arg-type]
        axis_name=strategy.axis_name,
        within=within,
        rows=placement.rows,
        specs=placement.specs,
    )


def check_roles(builder: str, **functions: Any) -> None:
    """Raise unless each argument of a builder can be what its parameter means.

    An optimizer in the place of a strategy, for example, is refused.
    """

    def is_module(x: Any) -> bool:
        bases = type(x).__mro__
        roots = {(y.__module__.partition(".")[0], y.__name__) for y in bases}
        return ("flax", "Module") in roots

    def fits(role: str, x: Any) -> bool:
        if role == "strategy":
            return isinstance(x, Strategy)
        if role == "optimizer":
            return hasattr(x, "init") and hasattr(x, "update")
        return callable(x) and not isinstance(x, type) and not is_module(x)

    wrong = [role for role, x in functions.items() if not fits(role, x)]
    if not wrong:
        for role in functions.keys() & {"loss_fn", "metric_fn", "predict_fn"}:
            check_takes(f"{role}(params, batch, tower)", functions[role])
        return
    shown = ", ".join(f"{role} is {a_type(functions[role])}" for role in wrong)
    swapped = any(fits(a, functions[b]) for a in wrong for b in wrong if a != b)
    are = "a strategy such as tj.Mirrored()"
    if "optimizer" in wrong:
        are = f"an optimizer of optax (of nnx.Optimizer(model, tx) the tx) and {are}"
    for role in wrong:
        x = functions[role]
        if is_module(x):
            are += (
                f"; a module is no {role}: write a function that calls it, such as"
                " model.apply({'params': params}, batch['x'])"
            )
        elif role == "optimizer" and _is_schedule(x):
            are += "; this is a schedule: write optimizer=optax.adam(schedule)"
        elif isinstance(x, jax.sharding.Mesh):
            are += f"; in place of this mesh write tj.Mirrored(towers={x.size})"
        elif callable(x) and not swapped:
            are += f"; call it, {role}={getattr(x, '__name__', role)}(...)"
    raise ValueError(
        f"{builder}: {shown}{', as if arguments were swapped' if swapped else ''}."
        f" Write {builder}({', '.join(functions)}), with {are}."
    )


def _is_schedule(x: Any) -> bool:
    """Guess by its argument's name whether a value is an optax schedule."""
    try:
        names = [*inspect.signature(x).parameters]
    except (TypeError, ValueError):
        return False
    return names in (["count"], ["step"])


def _check_choices(strategy: Mirrored) -> None:
    choices = (strategy.devices, strategy.num_gpus, strategy.num_gpus_per_worker)
    if len([x for x in choices if x is not None]) > 1:
        raise ValueError(
            "devices, num_gpus and num_gpus_per_worker exclude each other. Give one of"
            " them."
        )
    for name in ("num_gpus", "num_gpus_per_worker"):
        check_whole(name, getattr(strategy, name), 0, or_none=True)
    check_whole("towers", strategy.towers, or_none=True)
    check_whole("prefetch_on_device", strategy.prefetch_on_device, 0)
    check_choice("tower_loop", strategy.tower_loop, ("vmap", "scan"))
    check_choice("executor", strategy.executor, ("shard_map", "pmap"))
    check_choice("state", strategy.state, get_args(StateLayout))
    _check_axis_name(strategy.axis_name)
    if strategy.tower_loop == "scan" and strategy.axis_name != TOWER_AXIS:
        raise ValueError(
            f"axis_name={strategy.axis_name!r} is for towers that communicate, but"
            " under tower_loop='scan' they cannot. Use tower_loop='vmap', or leave out"
            " axis_name."
        )
    ops = strategy.cross_tower_ops
    if isinstance(ops, type) or not hasattr(ops, "sum_over_towers"):
        raise ValueError(
            f"cross_tower_ops={ops!r:.200} is not a cross-tower op; write"
            " tj.AllReduce(), tj.PinnedTree(), or tj.collectives.Packed() and the like."
        )
    if strategy.state != "mirrored" and strategy.executor == "pmap":
        raise ValueError(
            f"state={strategy.state!r} cannot run under executor='pmap'. Use"
            " executor='shard_map'."
        )
    if strategy.state == "sharded_optimizer" and isinstance(ops, PinnedTree):
        raise ValueError(
            f"state={strategy.state!r} cannot have the same bits on any number of"
            " devices, which tj.PinnedTree() promises: each device updates its shard,"
            " and sums are rounded by the number of shards. Use state='mirrored' or"
            " 'sharded', or tj.AllReduce()."
        )
    axes = dict(strategy.within)
    if strategy.executor == "pmap" and axes:
        raise ValueError(
            "within=... cannot run under executor='pmap', which has one axis. Use"
            " executor='shard_map'."
        )
    if strategy.rows is not None and strategy.rows not in axes:
        raise ValueError(
            f"rows={strategy.rows!r} is not an axis of within=..., whose axes are"
            f" {', '.join(map(repr, axes)) or 'none'}. Name one of them, or leave rows"
            " out."
        )
    if strategy.specs is not None and not axes:
        raise ValueError(
            "specs=... splits parameters over the axes of within=..., but there are"
            " none. Write within={'model': 2}, or leave specs out."
        )


def _check_ops(ops: CrossTowerOps, devices: tuple[str, ...]) -> None:
    if isinstance(ops, ChecksDevices):
        ops.check_devices(devices)


def _check_axis_name(name: Any) -> None:
    if not isinstance(name, str) or name in ("", DEVICE_AXIS, LOCAL_AXIS):
        raise ValueError(
            f"axis_name={name!r} must be a name that nothing else has, such as 'batch'."
        )


def _checked_axes(within: Any, tower_axis: str) -> tuple[tuple[str, int], ...]:
    """List the axes within a tower as pairs; raise if names or sizes are wrong."""
    axes: Any = list(within.items()) if isinstance(within, Mapping) else within
    pairs: Any = axes if isinstance(axes, list | tuple) else [None]
    if not all(isinstance(x, tuple) and len(x) == 2 for x in pairs):
        raise ValueError(
            f"within={within!r:.200} must be a dict of axis names and sizes, such as"
            " {'model': 2}."
        )
    names: list[Any] = [name for name, _ in pairs]
    reserved = ("", DEVICE_AXIS, LOCAL_AXIS, tower_axis)
    for name, size in pairs:
        if not isinstance(name, str) or name in reserved or names.count(name) > 1:
            raise ValueError(
                f"within={within!r:.200}: {name!r} must be a name that nothing else"
                f" has, such as 'model'; {tower_axis!r} is the towers' axis."
            )
        check_whole(f"within[{name!r}]", size)
    return tuple((name, int(size)) for name, size in pairs)
