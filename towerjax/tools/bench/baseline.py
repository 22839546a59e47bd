"""Build the steps to time: by towerjax, by hand, by jit, by pmap; a bare reduction."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from towerjax.data.shard import split_rows
from towerjax.mesh.placement import DEVICE_AXIS, Placement, place
from towerjax.metrics.weighted import Weighted
from towerjax.step.checking import Check
from towerjax.step.state import TrainState
from towerjax.step.train import build_train_step
from towerjax.tools.bench.models import Model
from towerjax.towers.executors import over_devices, shapes_of
from towerjax.towers.strategies import Strategy
from towerjax.types import Layout, PyTree

LEARNING_RATE, MOMENTUM = 0.01, 0.9
_OUT = (Layout.MIRRORED, Layout.MIRRORED)


def sgd() -> optax.GradientTransformation:
    """The optimizer of all contenders, which has one formula in every framework."""
    return optax.sgd(LEARNING_RATE, MOMENTUM)


@dataclasses.dataclass
class Contender:
    """A compiled step and its state."""

    call: Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (state, loss)
    params: Callable[[Any], PyTree]  # the part of a state that is awaited
    state: Any
    batch: Any  # on the devices
    compile_seconds: float  # of tracing, proving (by towerjax) and compiling
    loss: Any = None  # the loss of the last call
    program: str = ""  # the compiled HLO, for a step built by towerjax

    def run(self) -> Any:
        """Dispatch one call."""
        self.state, self.loss = self.call(self.state, self.batch)
        return self.params(self.state), self.loss


@dataclasses.dataclass(frozen=True)
class Work:
    """The model, batch and options of a step."""

    model: Model
    params: PyTree  # on the host
    batch: PyTree  # on the host
    micro_batches: int = 1  # A
    steps_per_call: int = 1  # K, each of the same batch
    optimizer: optax.GradientTransformation = dataclasses.field(default_factory=sgd)

    def train(
        self, state: Any, batch: PyTree, mean: Callable[[PyTree], PyTree]
    ) -> tuple[Any, jax.Array]:
        """One step as users write it with JAX and optax alone."""
        params, opt_state = state

        def loss_fn(params: PyTree, rows: PyTree) -> jax.Array:
            return self.model.losses(params, rows).mean()

        value_and_grad = jax.value_and_grad(loss_fn)
        if self.micro_batches == 1:
            loss, grads = mean(value_and_grad(params, batch))
        else:
            parts = split_rows(batch, self.micro_batches)
            zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))

            def add(total: PyTree, rows: PyTree) -> tuple[PyTree, None]:
                return jax.tree.map(lax.add, total, value_and_grad(params, rows)), None

            total, _ = lax.scan(add, zeros, parts)
            part = jax.tree.map(lambda x: x / self.micro_batches, total)
            loss, grads = mean(part)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def stack_batch(self) -> tuple[PyTree, Layout]:
        """The batch, repeated for each step of a call, and its layout."""
        if self.steps_per_call == 1:
            return self.batch, Layout.PER_TOWER
        copies = [self.batch] * self.steps_per_call
        batch = jax.tree.map(lambda *leaves: np.stack(leaves), *copies)
        return batch, Layout.PER_TOWER_STEPS


def by_hand(work: Work, placement: Placement) -> Contender:
    """``jit(shard_map(...))`` with ``pmean(gradients)``, as users write it."""

    def mean(value: PyTree) -> PyTree:
        return lax.pmean(value, DEVICE_AXIS) if placement.num_devices > 1 else value

    return _step_contender(work, placement, mean, by_shard_map=True)


def by_jit(work: Work, placement: Placement) -> Contender:
    """Plain ``jit`` of the global step with sharded inputs."""
    return _step_contender(work, placement, lambda value: value, by_shard_map=False)


def _step_contender(
    work: Work,
    placement: Placement,
    mean: Callable[[PyTree], PyTree],
    *,
    by_shard_map: bool,
) -> Contender:
    def one(state: Any, batch: PyTree) -> tuple[Any, jax.Array]:
        return work.train(state, batch, mean)

    step: Any = one if work.steps_per_call == 1 else functools.partial(lax.scan, one)
    host_batch, layout = work.stack_batch()
    state = (work.params, work.optimizer.init(work.params))
    state = place(state, placement, Layout.MIRRORED)
    batch = place(host_batch, placement, layout)
    layouts = (Layout.MIRRORED, layout)
    if by_shard_map:
        step = over_devices(step, placement, layouts, _OUT)
    call, seconds = _compile(step, placement, layouts, (state, batch))
    return Contender(call, lambda state: state[0], state, batch, seconds)


def _compile(
    fn: Any, placement: Placement, layouts: tuple[Layout, ...], args: tuple[Any, ...]
) -> tuple[Any, float]:
    """The compiled program, and the seconds of tracing and compiling it."""
    start = time.perf_counter()
    ins, outs = jax.tree.map(placement.sharding, (layouts, _OUT))
    jitted = jax.jit(fn, in_shardings=ins, out_shardings=outs, donate_argnums=0)
    call = jitted.lower(*map(shapes_of, args)).compile()
    return call, time.perf_counter() - start


def by_pmap(work: Work, placement: Placement) -> Contender:
    """``jax.pmap`` as users wrote it: a copy of the state on each device."""
    num_devices, axis = placement.num_devices, "device"

    def step(state: Any, batch: PyTree) -> tuple[Any, jax.Array]:
        return work.train(state, batch, lambda value: lax.pmean(value, axis))

    def copies(x: Any) -> np.ndarray:
        return np.stack([np.asarray(x)] * num_devices)

    state = jax.tree.map(copies, (work.params, work.optimizer.init(work.params)))
    batch = split_rows(work.batch, num_devices)
    devices = list(placement.jax_devices)
    start = time.perf_counter()
    pmapped = jax.pmap(step, axis_name=axis, devices=devices, donate_argnums=(0,))
    call = pmapped.lower(state, batch).compile()
    seconds = time.perf_counter() - start
    state, batch = jax.device_put((state, batch), call.input_shardings[0])
    return Contender(call, lambda state: state[0], state, batch, seconds)


def by_towerjax(
    work: Work, strategy: Strategy, *, check: Check | None = None
) -> Contender:
    """The step, built by towerjax."""

    def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
        return Weighted.mean(work.model.losses(params, batch), tower.weight)

    step = build_train_step(
        loss_fn, work.optimizer, strategy, micro_batches=work.micro_batches, check=check
    )
    state = step.init(work.params)
    several, steps = work.steps_per_call > 1, work.steps_per_call
    if several:
        batch = step.place_batches([work.batch] * steps, steps)
    else:
        batch = step.place_batch(work.batch)
    start = time.perf_counter()
    program = step.program(state, batch)
    seconds = time.perf_counter() - start

    def call(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        # As `run` calls it: verdicts are read later, once they are there.
        dispatch = step.dispatch(state, batch) if several else step(state, batch)
        return dispatch[0], dispatch[1]["loss"]

    text = program.call.as_text()
    return Contender(
        call, lambda state: state.params, state, batch, seconds, program=text
    )


CHAIN = 8


def bare_reduction(work: Work, strategy: Strategy) -> Contender:
    """The communication of a step alone, `CHAIN` times, one after the other.

    Sums a tree like the gradients and a loss over all towers, by the strategy's op;
    each sum takes the result of the one before, so that XLA can merge or drop none.
    """
    placement, ops = strategy.placement, strategy.cross_tower_ops
    axes = placement.axes
    # A factor for each tower: pmap needs an argument that is split.
    layouts = (Layout.MIRRORED, Layout.PER_TOWER)

    def each_tower(x: jax.Array) -> jax.Array:
        return lax.broadcast(x, (axes.num_local,))

    def device_fn(tree: PyTree, factors: jax.Array) -> tuple[PyTree, jax.Array]:
        factor = factors[0]
        for _ in range(CHAIN):
            tree = jax.tree.map(lambda x: x * factor.astype(x.dtype), tree)
            sent = jax.tree.map(each_tower, tree) if ops.needs_every_tower else tree
            tree = ops.sum_over_towers(sent, axes).tree()
            tree = lax.optimization_barrier(tree)
        return tree, jax.tree.leaves(tree)[0].ravel()[0]

    tree = place((work.params, np.float32(0)), placement, Layout.MIRRORED)
    factors = np.full(placement.num_towers, 1 / placement.num_towers, np.float32)
    factors = place(factors, placement, Layout.PER_TOWER)
    fn = over_devices(device_fn, placement, layouts, _OUT)
    call, seconds = _compile(fn, placement, layouts, (tree, factors))
    return Contender(call, lambda tree: tree, tree, factors, seconds)
