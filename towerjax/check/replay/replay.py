"""Run the towers of a step on their own and on neighbouring devices; compare bits."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import Mesh, NamedSharding

from towerjax.check.replay.report import Prints, ReplayReport, stations_of, vote
from towerjax.data.placer import PlacedBatch
from towerjax.jaxprs.interpreter import with_programs
from towerjax.jaxprs.params import open_jaxpr
from towerjax.lowering import xla
from towerjax.lowering.sharded_values import is_shard, shards_of
from towerjax.mesh.devices import one_thread_at_a_time
from towerjax.mesh.interrupt import uninterrupted
from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import on_neighbours
from towerjax.step.passes.on_device import on_device
from towerjax.step.passes.one_pass import TowersBits, TracedPass
from towerjax.step.run.programs import send_replicated
from towerjax.step.run.trace import Traced, trace
from towerjax.step.state.desync import Bits
from towerjax.step.state.train_state import (
    TrainState,
    split_state,
    state_layout,
    step_number,
)
from towerjax.step.step import Step
from towerjax.towers.executors import over_devices
from towerjax.towers.on_towers import OnTowers
from towerjax.towers.outputs import PerTowerValue, unmark_per_tower
from towerjax.towers.strategies import Mirrored
from towerjax.towers.variables import TowerLocal
from towerjax.types import Layout, PyTree
from towerjax.types.boundary import api_boundary
from towerjax.types.refusals import a_type
from towerjax.types.trees import key_data, parts_of, readable_leaves


@api_boundary
def replay(step: Step, state: TrainState, batch: PyTree) -> ReplayReport:
    """Run a step's towers on neighbouring devices, too, and compare every bit.

    Rows, keys and ``tower.id`` belong to a tower, so its bits do not depend on the
    device. What each tower returns, its gradient, and what each device makes of its
    copy or shard of the state are hashed. If the hashes differ, all runs are repeated
    on the same devices, and a third device votes. Nothing is changed or donated. With
    several processes all must call it; neighbours are devices of one process.

    Args:
      step: The result of `build_train_step` or `build_step`.
      state: The state before the step.
      batch: The step's global batch, or one placed before.

    Returns:
      A `ReplayReport`: ``report.agrees``, ``report.named`` and a text for ``print``.

    Raises:
      ValueError: A process has a single device of the strategy, or the step is none
        that trains; or as a step's call.

    Example:
      >>> import numpy as np, optax, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     return tj.Weighted.mean((params - batch) ** 2, tower.weight)
      >>> strategy = tj.Mirrored(towers=4)  # here on 4 devices
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.5), strategy)
      >>> print(replay(step, step.init(0.0), np.arange(8, dtype=np.float32)))
      All bits are the same on neighbouring devices: 4 devices in step 1.
    """
    return Replayer(step)(state, batch)


class Replayer:
    """Replays steps of one `Step`; programs are kept for batches of a signature."""

    def __init__(self, step: Step) -> None:
        """Refuse a step without neighbouring devices, or one that does not train."""
        if not isinstance(step, Step):
            raise ValueError(
                "A replay needs a step of tj.build_train_step, tj.build_step or of a"
                f" model function, but step is {a_type(step)}."
            )
        if not step.trained.plan.accepts:
            raise ValueError(
                "A sweep's step runs whole steps of its members, which a replay cannot"
                " compare. Replay the step of one member, as build(...) returns it."
            )
        placement = step.strategy.placement
        placement.require_present()
        if placement.groups_each < 2:
            one = "device" if placement.devices_each == 1 else "tower's devices"
            raise ValueError(
                "A replay runs towers on a neighbouring device of the same process, but"
                f" each process has one {one} of {', '.join(placement.devices)}. Give"
                " each process 2 of them, or 3, which can vote."
            )
        self._step = step
        self._rotations: dict[tuple[Any, int], _Rotation] = {}

    def __call__(self, state: TrainState, batch: PyTree) -> ReplayReport:
        """Replay the step after ``state`` on a batch; see `replay`."""
        step = self._step
        placement = step.strategy.placement
        state = step.plan.states.placed(step.start(state))
        placed = send_replicated(step.place_batch(batch))
        own = self._rotation(state, placed, 0)
        inputs, first = own.begin(state, placed)

        def neighbours(by: int) -> Callable[[], list[Prints]]:
            rotation = self._rotation(state, placed, by)
            moved = on_neighbours(inputs, placement, rotation.placement)
            return functools.partial(rotation.run, moved)

        run = neighbours(1)
        runs = [[first], [run()]]
        stations = stations_of(runs, own.update_exchanges)
        if not all(x.agrees for x in stations):
            runs[0].append(own.run(inputs))
            runs[1].append(run())
            if placement.groups_each > 2:
                run = neighbours(2)
                runs.append([run(), run()])
            stations = stations_of(runs, own.update_exchanges)
        return vote(stations, step_number(state) + 1, placement)

    def _rotation(self, state: TrainState, placed: PlacedBatch, by: int) -> "_Rotation":
        """Put the step for such a batch on the devices ``by`` places further on."""
        step = self._step
        kind = step.plan.states.kind(state)
        key = placed.signature, kind
        if (key, by) in self._rotations:
            return self._rotations[key, by]
        if by:
            self._rotations[key, by] = self._rotations[key, 0].rotated(by)
            return self._rotations[key, by]
        known = step.programs.known(placed, kind)
        if known is None:
            traced = trace(step.plan, (*split_state(state), *placed.args))
        else:
            traced = known.traced
        _ = traced.proof  # raises if the proof fails
        self._rotations[key, 0] = _Rotation.of(traced)
        return self._rotations[key, 0]


@dataclasses.dataclass(frozen=True, eq=False)
class _Rotation:
    """A traced step on one order of its devices, with a program for each station."""

    traced: Traced
    # What the step's guards see: all values are finite.
    reports: list[PyTree]
    compiled: dict[int, Any] = dataclasses.field(default_factory=dict, init=False)

    @classmethod
    def of(cls, traced: Traced) -> "_Rotation":
        """Put a traced step on its own devices, with towers that hash."""
        reports = jax.tree.map(
            lambda x: np.ones(x.shape, x.dtype), [x.out[1] for x in traced.passes]
        )
        return cls(traced, reports).rotated(0)

    def rotated(self, by: int) -> "_Rotation":
        """Put the step on the devices that are ``by`` places further on."""
        plan = self.traced.plan
        strategy = plan.strategy
        assert isinstance(strategy, Mirrored)
        devices: dict[str, Any] = {"num_gpus": None, "num_gpus_per_worker": None}
        devices["devices"] = strategy.placement.rotated(by)
        strategy = dataclasses.replace(strategy, **devices)

        alone = dataclasses.replace(strategy.placement, alone=True)

        def moved(of_pass: TracedPass) -> TracedPass:
            fields = {"strategy": strategy, "looks_at": TowersBits()}
            pass_ = dataclasses.replace(of_pass.pass_, **fields)
            run = functools.partial(on_device, pass_)
            layouts = tuple(pass_.ins.values())
            towers = OnTowers(run, alone, layouts, of_pass.args)
            return TracedPass(pass_, of_pass.args, towers)

        passes = tuple(map(moved, self.traced.passes))
        plan = dataclasses.replace(plan, strategy=strategy)
        finish = _moved(self.traced.finish, self.placement, strategy.placement)
        fields = {"plan": plan, "passes": passes, "finish": finish}
        traced = dataclasses.replace(self.traced, **fields)
        return _Rotation(traced, self.reports)

    @property
    def update_exchanges(self) -> bool:
        """Whether devices may exchange what they compute in the update."""
        traced = self.traced
        given = traced.args[0], [of_pass.out[0] for of_pass in traced.passes]
        is_split = bool(parts_of((TowerLocal, PerTowerValue), given))
        return is_split or traced.plan.strategy.state != "mirrored"

    @property
    def placement(self) -> Placement:
        """Where the towers are in this order of the devices."""
        return self.traced.plan.strategy.placement

    def begin(
        self, state: TrainState, placed: PlacedBatch
    ) -> tuple[list[tuple[PyTree, ...]], list[Prints]]:
        """Run all stations; return each one's arguments, and its fingerprints."""
        given = self.traced.plan.passes.given
        merged = list[PyTree]()
        inputs = list[tuple[PyTree, ...]]()
        prints = list[Prints]()
        for number in range(len(self.traced.passes)):
            before = (unmark_per_tower(given(merged)),) if merged else ()
            inputs.append((state, *placed.args, before))
            of_pass, seen = self._call(number, inputs[-1])
            merged.append(of_pass)
            prints.append(self._read(seen))
        inputs.append((*split_state(state), merged))
        prints.append(self._read(self._call(len(merged), inputs[-1])))
        return inputs, prints

    def run(self, inputs: list[tuple[PyTree, ...]]) -> list[Prints]:
        """Run all stations on given arguments, so that none depends on another's."""
        *of_passes, updated = [self._call(i, args) for i, args in enumerate(inputs)]
        return [*map(self._read, [seen for _, seen in of_passes]), self._read(updated)]

    def _read(self, bits: Bits) -> Prints:
        """Copy the fingerprints to the host, as each device of a tower has them."""
        held = {x.device: x.data for x in bits.table.addressable_shards}
        here = [x for x in self.placement.jax_devices if x in held]
        copies = [held[x] for x in here[: self.placement.devices_each]]
        return Prints(bits.names, np.stack(jax.device_get(copies)))

    def _call(self, number: int, args: tuple[PyTree, ...]) -> PyTree:
        """Run a station, which is compiled at its first call, and wait for it."""
        placement = self.placement
        with one_thread_at_a_time(placement.devices):
            if number not in self.compiled:
                in_trace = jax.jit(self._station(number)).trace(*args)
                lowered = xla.lower_on_devices(in_trace, placement)
                compile_it = functools.partial(
                    xla.compile_on_devices, lowered, placement
                )
                self.compiled[number] = uninterrupted(compile_it)
            return jax.block_until_ready(self.compiled[number](*args))

    def _station(self, number: int) -> Callable[..., PyTree]:
        """Choose the function of a pass, or after all passes that of the update."""
        passes = self.traced.passes
        if number == len(passes):
            return self._update

        def run(*args: PyTree) -> tuple[PyTree, Bits]:
            return passes[number].run(args)

        return run

    def _update(self, donated: PyTree, kept: PyTree, merged: list[PyTree]) -> Bits:
        """Hash what each device makes of its copy or shard of the state, ``[D, M]``."""
        out = self.traced.finished(donated, kept, merged, self.reports)
        after = jax.tree.map(key_data, {**out.donated, **out.now})
        strategy = self.traced.plan.strategy
        placement = self.placement
        at = dict(vars(state_layout(strategy)))
        if strategy.state != "mirrored":
            at["params"] = Layout.SHARDED  # each shard is updated by its owner alone
        named = [leaf for x in after.items() for leaf in readable_leaves(*x)]
        names = tuple(("update", name) for name, _ in named)

        def on_device(after: PyTree, _: jax.Array) -> Bits:
            leaves = jax.tree.leaves(after, is_leaf=is_shard)
            pieces = [x.data if is_shard(x) else x for x in leaves]
            triples = zip(*zip(*names, strict=True), pieces, strict=True)
            bits = Bits.of([*triples])
            return dataclasses.replace(bits, table=bits.table[None])

        layouts = {name: at[name] for name in after}
        sharded = {
            name: x if x is Layout.SHARDED else Layout.MIRRORED
            for name, x in layouts.items()
        }
        places = jnp.arange(placement.num_devices)  # pmap needs something split
        size = placement.num_devices, len(names)
        shape: Any = jax.ShapeDtypeStruct(size, jnp.uint32)
        shards = None
        if strategy.state != "mirrored":
            shards = shards_of(
                placement,
                ((after, places), (sharded, Layout.MIRRORED)),
                (Bits(shape, names), Layout.MIRRORED),
                params=donated["params"],
                exact=False,
            )
            layouts = {
                name: Layout.MIRRORED if x is Layout.SHARDED else x
                for name, x in layouts.items()
            }
        per_tower = Layout.PER_TOWER
        bits = over_devices(
            on_device, placement, (layouts, per_tower), per_tower, shards=shards
        )(after, places)
        on_all = placement.sharding(Layout.MIRRORED)
        return jax.tree.map(
            functools.partial(lax.with_sharding_constraint, shardings=on_all), bits
        )


def _moved(program: Any, before: Placement, after: Placement) -> Any:
    """Put the mesh of other devices in a jaxpr where it names that of ``before``.

    An update names a mesh if it runs the strategy's towers, as a merge of towers that
    train alone does.
    """
    move = functools.partial(_moved, before=before, after=after)

    def of_param(value: Any) -> Any:
        if isinstance(value, Mesh) and value == before.mesh:
            return after.mesh
        is_sharding = isinstance(value, NamedSharding) and value.mesh == before.mesh
        return after.sharding_like(value) if is_sharding else value

    def of_eqn(eqn: JaxprEqn) -> JaxprEqn:
        eqn = with_programs(eqn, move)
        params = {key: of_param(value) for key, value in eqn.params.items()}
        is_same = all(params[key] is value for key, value in eqn.params.items())
        return eqn if is_same else eqn.replace(params=params)

    body = open_jaxpr(program)
    eqns = [of_eqn(eqn) for eqn in body.eqns]
    if all(new is old for new, old in zip(eqns, body.eqns, strict=True)):
        return program
    moved = body.replace(eqns=eqns)
    return moved if body is program else program.replace(jaxpr=moved)
