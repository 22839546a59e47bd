"""The steps that the benchmarks time, by towerjax, by hand and by other libraries.

`build` and `by_hand` are for ``tj.tools.bench``: see docs/benchmarks/grid.toml.
"""

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

from benchmarks.models import MODELS, Model
from towerjax import collectives
from towerjax.data.batch_rows import split_rows
from towerjax.mesh.placement import DEVICE_AXIS, Placement
from towerjax.mesh.transfer import place
from towerjax.metrics.weighted import Weighted
from towerjax.step.make.train import build_train_step
from towerjax.towers.executors import over_devices, shapes_of
from towerjax.towers.strategies import Mirrored, OneDevice, Strategy
from towerjax.types import Layout, PyTree

LEARNING_RATE = 0.01
MOMENTUM = 0.9
NUM_LOSSES = 3
# of peers that time themselves
ROUNDS = 9
SECONDS_PER_ROUND = 0.1
_OUT = (Layout.MIRRORED, Layout.MIRRORED)


@dataclasses.dataclass(frozen=True)
class Trial:
    """One thing to time: the arguments of `build`."""

    model: str
    batch: int  # B
    by: str = "towerjax"  # or "jit", "pmap", "keras", "tensorflow", "torch"
    strategy: str = "mirrored"  # or "mirrored_scan", "mirrored_pmap", "one_device"
    towers: int = 1  # T
    devices: int = 1  # D
    cross_tower_ops: str = "AllReduce"
    dtype: str = "float32"
    micro_batches: int = 1  # A


def build(**config: Any) -> Any:
    """A step and its state and batch, by whom ``by`` says; see `Trial`."""
    config.setdefault("devices", config.get("towers", 1))
    trial = Trial(**config)
    if trial.by in ("keras", "tensorflow", "torch"):
        from benchmarks import peers

        return getattr(peers, trial.by)(trial)
    strategy = strategy_of(trial)
    work = work_of(trial)
    if trial.by == "towerjax":
        found = by_towerjax(work, strategy)
    else:
        found = by_hand(work, strategy.placement, trial.by)
    return found.call, found.state, found.batch


def build_by_hand(**config: Any) -> Any:
    """The hand-written step on the same devices, one tower on each."""
    config.setdefault("devices", config.get("towers", 1))
    trial = Trial(**config)
    found = by_hand(work_of(trial), strategy_of(trial).placement)
    return found.call, found.state, found.batch


@dataclasses.dataclass
class Contender:
    """A compiled step and its state."""

    call: Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (state, loss)
    state: Any
    batch: Any  # on the devices
    compile_seconds: float  # of tracing, proving (by towerjax) and compiling
    loss: Any = None  # the loss of the last call
    program: str = ""  # the compiled HLO, for a step built by towerjax

    def run(self) -> Any:
        """Dispatch one call."""
        self.state, self.loss = self.call(self.state, self.batch)
        return self.state, self.loss


@dataclasses.dataclass(frozen=True)
class Work:
    """The model, batch and options of a step.

    All contenders have the same optimizer, of one formula in every framework.
    """

    model: Model
    params: PyTree  # on the host
    batch: PyTree  # on the host
    micro_batches: int = 1  # A
    optimizer: optax.GradientTransformation = dataclasses.field(
        default_factory=lambda: optax.sgd(LEARNING_RATE, MOMENTUM)
    )

    def train(
        self, state: Any, batch: PyTree, mean: Callable[[PyTree], PyTree]
    ) -> tuple[Any, jax.Array]:
        """One step as users write it with JAX and optax alone."""
        params, opt_state = state

        def loss_fn(params: PyTree, rows: PyTree) -> jax.Array:
            return self.model.losses(params, rows).mean()

        value_and_grad = jax.value_and_grad(loss_fn)
        if self.micro_batches == 1:
            found = value_and_grad(params, batch)
        else:
            zeros = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))

            def add(total: PyTree, rows: PyTree) -> tuple[PyTree, None]:
                return jax.tree.map(lax.add, total, value_and_grad(params, rows)), None

            total, _ = lax.scan(add, zeros, split_rows(batch, self.micro_batches))
            found = jax.tree.map(lambda x: x / self.micro_batches, total)
        loss, grads = mean(found)
        updates, opt_state = self.optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    def init(self) -> Any:
        """The first state of `train`."""
        return self.params, self.optimizer.init(self.params)


def by_hand(work: Work, placement: Placement, way: str = "shard_map") -> Contender:
    """``jit(shard_map(...))`` with ``pmean(gradients)``, as users write it.

    Other ways are plain ``"jit"`` of the global step with sharded inputs, and
    ``"pmap"``, with a copy of the state on each device.
    """
    num_devices = placement.num_devices

    def mean(value: PyTree) -> PyTree:
        is_sent = way == "pmap" or (way == "shard_map" and num_devices > 1)
        return lax.pmean(value, DEVICE_AXIS) if is_sent else value

    step: Any = functools.partial(work.train, mean=mean)
    if way == "pmap":
        devices = list(placement.jax_devices)
        fn = jax.pmap(step, DEVICE_AXIS, devices=devices, donate_argnums=(0,))
        state = jax.tree.map(lambda x: np.stack([x] * num_devices), work.init())
        found = _compiled(fn, state, split_rows(work.batch, num_devices))
        args = found.state, found.batch
        args = jax.device_put(args, found.call.input_shardings[0])
        return dataclasses.replace(found, state=args[0], batch=args[1])
    layouts = (Layout.MIRRORED, Layout.PER_TOWER)
    if way == "shard_map":
        step = over_devices(step, placement, layouts, _OUT)
    state = place(work.init(), placement, Layout.MIRRORED)
    batch = place(work.batch, placement, Layout.PER_TOWER)
    return _compiled(_jitted(step, placement, layouts), state, batch)


def _jitted(fn: Any, placement: Placement, layouts: tuple[Layout, ...]) -> Any:
    ins, outs = jax.tree.map(placement.sharding, (layouts, _OUT))
    return jax.jit(fn, in_shardings=ins, out_shardings=outs, donate_argnums=0)


def _compiled(fn: Any, state: Any, batch: Any) -> Contender:
    start = time.perf_counter()
    call = fn.lower(shapes_of(state), shapes_of(batch)).compile()
    return Contender(call, state, batch, time.perf_counter() - start)


def by_towerjax(work: Work, strategy: Strategy) -> Contender:
    """The step, built by towerjax."""

    def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
        return Weighted.mean(work.model.losses(params, batch), tower.weight)

    step = build_train_step(
        loss_fn, work.optimizer, strategy, micro_batches=work.micro_batches
    )
    state = step.init(work.params)
    batch = step.place_batch(work.batch)
    start = time.perf_counter()
    program = step.program(state, batch)
    seconds = time.perf_counter() - start

    def run(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        # As `run` calls it: verdicts are read later, once they are there.
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return Contender(run, state, batch, seconds, program=program.call.as_text())


def strategy_of(trial: Trial) -> Strategy:
    """The strategy that a trial names, on the first devices of this process."""
    platform = jax.default_backend()
    names = tuple(f"{platform}:{i}" for i in range(trial.devices))
    if trial.strategy == "one_device":
        return OneDevice(names[0])
    return Mirrored(
        devices=names,
        towers=trial.towers,
        tower_loop="scan" if trial.strategy == "mirrored_scan" else "vmap",
        executor="pmap" if trial.strategy == "mirrored_pmap" else "shard_map",
        cross_tower_ops=getattr(collectives, trial.cross_tower_ops)(),
    )


def work_of(trial: Trial) -> Work:
    """The `Work` of a trial's step."""
    model = MODELS[trial.model](jnp.dtype(trial.dtype))
    params = jax.tree.map(np.asarray, model.init(0))  # contenders donate theirs
    batch = model.make_batch(1, trial.batch)
    return Work(model, params, batch, trial.micro_batches)
