"""`build_step`: a step of tower functions and of an update function."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.data.placer import BATCH_LAYOUT, PlacedBatch
from towerjax.data.shard import Remainder, batch_signature
from towerjax.mesh.transfer import place
from towerjax.step.caller import state_taken_by
from towerjax.step.compiled_step import CompiledStep, StepOptions
from towerjax.step.engine import Engine, Guard, OnNonfinite
from towerjax.step.faults import Place
from towerjax.step.gradient import refusing_tangents
from towerjax.step.one_pass import Pass
from towerjax.step.program import Runner, send_shared
from towerjax.step.proving import Proof, prove
from towerjax.step.state import (
    TrainState,
    check_params,
    init_state,
    is_maker,
    join_local,
    make_on_devices,
    make_state,
    split_state,
    step_number,
)
from towerjax.step.state_checks import (
    check_is_state,
    check_leaves,
    check_made,
    check_made_for,
    with_numbers_placed,
)
from towerjax.towers.strategies import Strategy, check_roles, with_specs
from towerjax.towers.variables import stack_local
from towerjax.types import Layout, PyTree
from towerjax.types.door import door
from towerjax.types.options import check_function, check_whole


class Step(CompiledStep):
    """A pure step: ``(state, batch) -> (state, metrics)``.

    Made by `build_step`. Compiled at its first call, once.
    """

    def __init__(
        self,
        engine: Engine,
        strategy: Strategy,
        options: StepOptions,
        **makes: Callable[[PyTree], PyTree],
    ) -> None:
        """``makes`` gives, by its name, a field of the first state from parameters."""
        super().__init__(engine.step, strategy, options, engine=engine)
        self._makes = makes

    @property
    def fn(self) -> Callable[[TrainState, PyTree], tuple[TrainState, dict[str, Any]]]:
        """The step as a JAX function of global arrays, ``(state, batch)``.

        For ``jax.jit``, ``lax.scan``, ``jax.vmap`` over states and ``jax.grad``. It is
        proved where it is traced. Nothing is placed or donated, and a refused step
        leaves the state unchanged and does not raise. Inside a tower function write
        that of a step of one device.

        Example:
          >>> import numpy as np, optax, towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean((params - batch) ** 2, tower.weight)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.5), tj.Mirrored(towers=2))
          >>> batches = np.array([[1, 3], [5, 5]], np.float32)
          >>> state, metrics = jax.lax.scan(step.fn, step.init(0.0), batches)
          >>> float(state.params), metrics["loss"].tolist()
          (5.0, [5.0, 9.0])
        """

        def fn(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, Any]]:
            check_is_state(state)
            check_made(state, self._made(state.params))
            placed = self._placer.fit_traced(batch)
            out = self._runner.trace(split_state(state), placed)
            metrics = {**out.metrics["one"], **out.metrics["own"]}
            return dataclasses.replace(state, **out.donated, **out.now), metrics

        return door(fn)

    @jax.transfer_guard("allow")  # a call that places, which a guard cannot see
    def init(
        self,
        params: PyTree | Callable[[jax.Array], PyTree],
        *,
        opt_state: PyTree = None,
        local: PyTree = None,
        extra: PyTree = None,
        rng: jax.Array | None = None,
    ) -> TrainState:
        """The state before the first step, placed on the strategy's devices.

        Args:
          params: Arrays; copied, so that yours stay usable. Or a function of ``rng``
            that returns them: with ``state="sharded"`` each device makes its part.
          opt_state: What ``update_fn`` keeps, such as ``optimizer.init(params)``;
            copied. A train step makes it, where none is given.
          local: Tower-local variables: a pytree of ``TowerLocal`` of the value that
            each tower's copy starts with.
          extra: Mirrored values that do not train, ``state.extra``: any pytree.
          rng: One key; None is ``jax.random.key(0)``.

        Returns:
          A ``TrainState``.

        Raises:
          ValueError: A leaf is of a dtype that devices do not hold, or one that is
            trained has no gradient; ``local`` says no reduction; or a device is not on
            this machine.
        """
        make = self._makes.get("opt_state", lambda _: ())
        make = (lambda _: opt_state) if opt_state is not None else make
        made, first = {}, params
        if is_maker(params):
            made = make_on_devices(self.strategy, params, make, rng)
            params, first, make = made["params"], 0.0, lambda _: ()
        if more := self._makes.get("local", lambda _: {})(params):
            local = join_local(local, more)
        parts = self.strategy, first, make(check_params(first)), local
        state = init_state(*parts, like=made.get("params"), rng=rng, extra=extra)
        return dataclasses.replace(state, **made)

    def _made(self, params: PyTree) -> dict[str, PyTree]:
        """The shapes of the fields of a state that the step makes, by their names."""
        makes = self._makes.items()
        made = {name: jax.eval_shape(make, params) for name, make in makes}
        if more := made.pop("local", None):
            made["local"] = stack_local(more, self.strategy.num_towers, shapes=True)
        return made

    def start(self, state: TrainState) -> TrainState:
        """The state to start a loop from: the same, its numbers on the devices.

        Args:
          state: On the step's devices, but for numbers.

        Returns:
          The state.

        Raises:
          ValueError: It is no ``TrainState``, lies elsewhere, or its tower-local
            variables have another number of towers.
        """
        check_is_state(state)
        check_leaves(state)
        made = self._made(state.params)
        check_made(state, made)
        number: Any = jax.ShapeDtypeStruct((), jnp.int32)
        expected = dataclasses.replace(state, step=number, **made)
        runners = self._runner, *self._runners.values()
        if known := [x for runner in runners for x in runner.programs.values()]:
            expected = state_taken_by(known[-1])
        placed = with_numbers_placed(state, self.strategy.placement, expected)
        check_made_for(placed, self.strategy)
        return placed

    def check(
        self,
        params: PyTree,
        batch: PyTree,
        *,
        opt_state: PyTree = (),
        local: PyTree = None,
        extra: PyTree = None,
    ) -> Proof:
        """The proof that the step's towers stay the same, without any device.

        Args:
          params: Arrays or ``jax.ShapeDtypeStruct``; or a whole state of such.
          batch: A global batch, arrays or shapes ``[B, ...]``.
          opt_state: As for `init`, arrays or shapes; a train step makes it.
          local: Tower-local variables, as for ``init``, arrays or shapes.
          extra: As for `init`, arrays or shapes.

        Returns:
          The ``Proof``, with the collectives of the step.

        Raises:
          ReplicationError: A result depends on the tower, or a collective could
            hang; names leaf and line.
          ValueError: The batch is malformed, or does not divide.

        Example:
          >>> import jax.numpy as jnp, optax, towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean(params * batch["x"], tower.weight)
          >>> strategy = tj.Mirrored(towers=4096)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
          >>> spec = jax.ShapeDtypeStruct((8192,), jnp.float32)
          >>> proof = step.check(jax.ShapeDtypeStruct((), jnp.float32), {"x": spec})
          >>> proof.analysis.collectives[0].primitive
          'psum'
        """
        if not isinstance(params, TrainState):
            params = self.shapes(params, opt_state=opt_state, local=local, extra=extra)
        check_made(params, self._made(params.params))
        args = (*split_state(params), *self._placer.shapes(batch))
        return prove(self._runner.recipe, self.strategy.placement, args)

    def shapes(
        self,
        params: PyTree,
        *,
        opt_state: PyTree = (),
        local: PyTree = None,
        extra: PyTree = None,
    ) -> TrainState:
        """The shapes of the state before the first step, without any device.

        Arguments are as for `init`, or ``jax.ShapeDtypeStruct`` in place of arrays.

        Returns:
          A ``TrainState`` of ``jax.ShapeDtypeStruct``.
        """
        towers = self.strategy.num_towers
        state = make_state(towers, params, opt_state, local, extra=extra, shapes=True)
        self.strategy.placement.specs_within((), state.params)
        made = self._made(state.params)
        if jax.tree.leaves(opt_state):
            made["opt_state"] = state.opt_state
        if "local" in made:
            made["local"] = join_local(state.local, made["local"])
        return dataclasses.replace(state, **made)

    def _shapes_of(self, state: Any) -> TrainState:
        return state if isinstance(state, TrainState) else self.shapes(state)

    def locate(
        self,
        state: TrainState,
        batch: PyTree,
        *,
        number: int | None = None,
        index: int = 0,
    ) -> tuple[Place, ...]:
        """Which towers' values of a step are not finite, before any reduction.

        Runs the towers once more, in a program of its own, without an update.

        Args:
          state: The state before the step, or after it if it was refused.
          batch: The step's batch.
          number: The step's number; None is the state's.
          index: Which batch, of several that were placed together.

        Returns:
          The places, pass after pass: after one, all towers may have what one had.

        Example:
          >>> import numpy as np, optax, towerjax as tj
          >>> def loss_fn(params, batch, tower):
          ...     return tj.Weighted.mean(params["w"] * batch["x"], tower.weight)
          >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
          >>> batch = {"x": np.array([1, 2, np.inf, 4], np.float32)}
          >>> [place] = step.locate(step.init({"w": 0.0}), batch)[1:]
          >>> place.tower, place.leaf, place.part, place.kind
          (1, 'params/w', 'gradient', 'infinity')
        """
        placement = self.strategy.placement
        state, placed = self.start(state), send_shared(self.place_batch(batch))
        number = step_number(state) if number is None else number
        at = place(np.asarray(number).astype(np.int32), placement, Layout.MIRRORED)
        if placed.num_steps is not None:
            placed = _one_of_several(placed, index)
        donated_kept = split_state(dataclasses.replace(state, step=at))
        (found,) = self._locator(donated_kept, placed)
        places = [place for x in jax.device_get(found) for place in x.places(number)]
        return tuple(dict.fromkeys(places))  # each pass has the parameters

    @functools.cached_property
    def _locator(self) -> Runner:
        find, out = self.engine.find_flags, (Layout.MIRRORED,)
        changes: Any = {"fn": find, "out_layouts": out, "donate": False}
        recipe = dataclasses.replace(self._runner.recipe, **changes)
        return dataclasses.replace(self._runner, recipe=recipe)


def _one_of_several(placed: PlacedBatch, index: int) -> PlacedBatch:
    """One of several batches that were placed together."""
    check_whole("index", index, 0, (placed.num_steps or 1) - 1)
    shardings = tuple(map(placed.placement.sharding, BATCH_LAYOUT.values()))
    take = functools.partial(jax.tree.map, lambda x: x[index])
    args = jax.jit(take, out_shardings=shardings)(placed.args[:3])
    return dataclasses.replace(placed, args=args, signature=batch_signature(*args[::2]))


def engine_of(
    tower_fns: tuple[Callable[..., PyTree], ...],
    update_fn: Callable[..., Any],
    strategy: Strategy,
    options: StepOptions,
    **of_passes: Any,
) -> Engine:
    """The engine of these functions; ``of_passes`` are further fields of its passes."""
    how: Any = {"guards_sums": options.guard == "gradients", **of_passes}
    how["micro_batches"] = options.micro_batches
    passes = tuple(Pass(tower_fn, strategy, **how) for tower_fn in tower_fns)
    return Engine(passes, update_fn, options.on_nonfinite, options.guard)


def build_step(
    tower_fn: Callable[..., PyTree] | Sequence[Callable[..., PyTree]],
    update_fn: Callable[[TrainState, Any], tuple[TrainState, Any]],
    strategy: Strategy,
    *,
    micro_batches: int = 1,
    remainder: Remainder = "error",
    on_nonfinite: OnNonfinite = "raise",
    guard: Guard = "loss",
    donate: bool = True,
    max_programs: int = 1,
    audit: bool = False,
    specs: Any = None,
) -> Step:
    """A step of your own: towers compute, what they return is merged, one update.

    A leaf's type says how it is merged: ``Weighted`` and other metric states over
    micro-batches and towers, divided once; ``Sum`` is added; ``Rows`` become the rows
    of the global batch; ``PerTower`` and ``TowerLocal`` stay each tower's own, ``[T,
    ...]``, and ``PerTower(Weighted(...))`` is merged over the tower's micro-batches; a
    bare array is proved to be the same on every tower, or refused. Each pass is given
    the merged result of the one before, rows included.

    Args:
      tower_fn: ``(state, batch, tower) -> tree`` of one tower and its own rows; or
        several, ``(state, batch, tower, merged) -> tree`` from the second on.
      update_fn: ``(state, merged) -> (state, metrics)``, once, of global values.
        ``merged`` holds the types that towers returned: ``merged["grads"].value``;
        ``metrics`` are a mapping of names to arrays or metric states. The step itself
        adds 1 to ``state.step``. Of ``(state, metrics, fine)`` the state is taken as it
        is, and where ``fine``, a bool, is False, ``on_nonfinite="raise"`` raises.
      strategy: Which towers, where, and how they reduce.
      micro_batches: As for `build_train_step`.
      remainder: As for `build_train_step`.
      on_nonfinite: As for `build_train_step`.
      guard: What must be finite: ``"loss"`` is ``metrics["loss"]``, or all metrics
        where none has that name; ``"gradients"`` is also every sum over towers, except
        those under ``"metrics"``.
      donate: As for `build_train_step`.
      max_programs: As for `build_train_step`.
      audit: As for `build_train_step`; every leaf of what towers return is compared.
      specs: As for `build_train_step`.

    Returns:
      A `Step`.

    Raises:
      ValueError: An option has no such value, or a function takes other arguments.

    Example:
      >>> import numpy as np, towerjax as tj
      >>> def loss_fn(w, batch, tower):
      ...     return tj.Weighted.mean((w - batch) ** 2, tower.weight)
      >>> def tower_fn(state, batch, tower):
      ...     loss, grads = tj.value_and_grad(loss_fn)(state.params, batch, tower)
      ...     return {"loss": loss, "grads": grads, "square": tj.Sum(grads.sum**2)}
      >>> def update_fn(state, merged):
      ...     params = state.params - 0.5 * merged["grads"].value
      ...     metrics = {"loss": merged["loss"], "square": merged["square"]}
      ...     return dataclasses.replace(state, params=params), metrics
      >>> step = build_step(tower_fn, update_fn, tj.Mirrored(towers=2))
      >>> state, metrics = step(step.init(0.0), np.array([1, 5], np.float32))
      >>> float(state.params), float(metrics["loss"]), float(metrics["square"])
      (3.0, 13.0, 104.0)
    """
    tower_fns = tuple(tower_fn) if isinstance(tower_fn, Sequence) else (tower_fn,)
    first = next(iter(tower_fns), None)
    check_roles("build_step", tower_fn=first, update_fn=update_fn, strategy=strategy)
    for i, one in enumerate(tower_fns):
        form = f"tower_fn(state, batch, tower{', merged' * (i > 0)})"
        check_function("tower_fn", one, form)
    check_function("update_fn", update_fn, "update_fn(state, merged)")
    strategy = with_specs(strategy, specs)
    of_batch = micro_batches, remainder, on_nonfinite, guard
    options = StepOptions(*of_batch, donate, max_programs, audit)
    fns = tuple(map(refusing_tangents, tower_fns))
    engine = engine_of(fns, update_fn, strategy, options, rows_used_later=True)
    # A step without examples is accepted: what it does, update_fn says.
    engine = dataclasses.replace(engine, needs_examples=False)
    return Step(engine, strategy, options)
