"""Build the steps of a trial, and measure them in turns, in a worker's process."""

import dataclasses
import functools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from towerjax.collectives.choose import parse_ops
from towerjax.data.shard import split_rows
from towerjax.mesh.placement import DEVICE_AXIS, Placement, place
from towerjax.metrics.weighted import Weighted
from towerjax.step.checking import Check
from towerjax.step.train import build_train_step
from towerjax.tools.bench import protocol
from towerjax.tools.bench.models import Model, find_model
from towerjax.tools.bench.protocol import TimingProtocol, Trial
from towerjax.tools.shell import resolve
from towerjax.towers.executors import over_devices, shapes_of
from towerjax.towers.strategies import Mirrored, OneDevice, Strategy
from towerjax.types import Layout, PyTree

LEARNING_RATE, MOMENTUM = 0.01, 0.9
_OUT = (Layout.MIRRORED, Layout.MIRRORED)


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
    steps_per_call: int = 1  # K, each of the same batch
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
    host_batch, layout = work.batch, Layout.PER_TOWER
    if work.steps_per_call > 1:
        layout, copies = Layout.PER_TOWER_STEPS, [work.batch] * work.steps_per_call
        host_batch = jax.tree.map(lambda *leaves: np.stack(leaves), *copies)
        step = functools.partial(lax.scan, step)
    layouts = (Layout.MIRRORED, layout)
    if way == "shard_map":
        step = over_devices(step, placement, layouts, _OUT)
    state = place(work.init(), placement, Layout.MIRRORED)
    batch = place(host_batch, placement, layout)
    return _compiled(_jitted(step, placement, layouts), state, batch)


def _jitted(fn: Any, placement: Placement, layouts: tuple[Layout, ...]) -> Any:
    ins, outs = jax.tree.map(placement.sharding, (layouts, _OUT))
    return jax.jit(fn, in_shardings=ins, out_shardings=outs, donate_argnums=0)


def _compiled(fn: Any, state: Any, batch: Any) -> Contender:
    start = time.perf_counter()
    call = fn.lower(shapes_of(state), shapes_of(batch)).compile()
    return Contender(call, state, batch, time.perf_counter() - start)


def by_towerjax(
    work: Work, strategy: Strategy, *, check: Check | None = None
) -> Contender:
    """The step, built by towerjax."""

    def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
        return Weighted.mean(work.model.losses(params, batch), tower.weight)

    step = build_train_step(
        loss_fn, work.optimizer, strategy, micro_batches=work.micro_batches, check=check
    )
    state, steps, call = step.init(work.params), work.steps_per_call, step
    if steps > 1:
        batch, call = step.place_batches([work.batch] * steps, steps), step.dispatch
    else:
        batch = step.place_batch(work.batch)
    start = time.perf_counter()
    program = step.program(state, batch)
    seconds = time.perf_counter() - start

    def run(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        # As `run` calls it: verdicts are read later, once they are there.
        state, metrics, *_ = call(state, batch)
        return state, metrics["loss"]

    return Contender(run, state, batch, seconds, program=program.call.as_text())


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
        for _ in range(CHAIN):
            tree = jax.tree.map(lambda x: x * factors[0].astype(x.dtype), tree)
            sent = jax.tree.map(each_tower, tree) if ops.needs_every_tower else tree
            tree = lax.optimization_barrier(ops.sum_over_towers(sent, axes).tree())
        return tree, jax.tree.leaves(tree)[0].ravel()[0]

    tree = place((work.params, np.float32(0)), placement, Layout.MIRRORED)
    factors = np.full(placement.num_towers, 1 / placement.num_towers, np.float32)
    factors = place(factors, placement, Layout.PER_TOWER)
    fn = over_devices(device_fn, placement, layouts, _OUT)
    return _compiled(_jitted(fn, placement, layouts), tree, factors)


NUM_LOSSES = 3
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def run_trial(trial: Trial, timing: TimingProtocol) -> dict[str, Any]:
    """Measure one trial of towerjax, of plain ``jit`` or of ``pmap``."""
    strategy, work, events = strategy_of(trial), work_of(trial), []
    jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
    placement, is_ours = strategy.placement, trial.by == "towerjax"
    own = by_towerjax(work, strategy) if is_ours else by_hand(work, placement, trial.by)
    from_cache = _CACHE_HIT in events
    contenders = {"own": own, "hand": by_hand(work, placement)}
    if is_ours and trial.devices > 1:
        contenders["communication"] = bare_reduction(work, strategy)
    losses = first_losses(own)
    check_losses(losses, first_losses(contenders["hand"]), trial)
    timed = list(contenders.values())
    calls = protocol.calls_in(timing.seconds_per_round, timed)
    table = protocol.in_turns(timed, rounds=timing.rounds, calls=calls, trim=0.1)
    return {
        "device": jax.devices()[0].device_kind,
        "compile_s": own.compile_seconds,
        "from_cache": from_cache,
        "calls": calls,
        "losses": losses,
        **figures(table, list(contenders), trial.steps_per_call),
    }


def figures(table: np.ndarray, names: Sequence[str], steps: int) -> dict[str, Any]:
    """The figures of a trial, from the seconds ``[rounds, contenders, 2]``."""
    seconds = dict(zip(names, table[..., 0].T / steps, strict=True))
    own = seconds["own"]
    values = {"step_s": own, "return_s": table[:, 0, 1] / steps}
    if (hand := seconds.get("hand")) is not None:
        values |= {"hand_s": hand, "over_hand": own / hand}
    if (bare := seconds.get("communication")) is not None:
        values["communication"] = bare * steps / CHAIN / own
    found: dict[str, Any] = {"rounds_s": values["step_s"].tolist()}
    for name, x in values.items():
        found[name] = dataclasses.asdict(protocol.interval_of_median(x))
    return found


def strategy_of(trial: Trial) -> Strategy:
    """The strategy that a trial names, on the first devices of this process."""
    platform = jax.default_backend()
    names = tuple(f"{platform}:{i}" for i in range(trial.devices))
    if trial.strategy == "one_device":
        return OneDevice(names[0])
    return Mirrored(
        devices=names,
        towers=trial.towers,
        local="scan" if trial.strategy == "mirrored_scan" else "vmap",
        executor="pmap" if trial.strategy == "mirrored_pmap" else "shard_map",
        cross_tower_ops=parse_ops(trial.cross_tower_ops),
    )


def work_of(trial: Trial) -> Work:
    """The `Work` of a trial's step."""
    model = find_model(trial.model, trial.dtype)
    params = jax.tree.map(np.asarray, model.init(0))  # contenders donate theirs
    batch = model.make_batch(1, trial.batch)
    return Work(model, params, batch, trial.micro_batches, trial.steps_per_call)


def first_losses(contender: Contender) -> list[float]:
    """The losses of the first steps from the initial parameters."""
    losses: list[float] = []
    while len(losses) < NUM_LOSSES:
        jax.block_until_ready(contender.run())
        loss = np.asarray(contender.loss, np.float64).ravel()
        # Several steps a call have one loss each; pmap has one, the same, a device.
        is_of_steps = contender.loss.sharding.is_fully_replicated
        losses += loss.tolist() if is_of_steps else [float(loss[0])]
    return losses


_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}


def check_losses(
    losses: Sequence[float], expected: Sequence[float], trial: Trial
) -> None:
    """Raise unless both have the same losses, and so the same computation."""
    rtol = _TOLERANCE[trial.dtype]
    got, want = list(losses)[:NUM_LOSSES], list(expected)[:NUM_LOSSES]
    if not np.allclose(got, want, rtol=rtol, atol=0):
        raise ValueError(
            f"{trial.by} has the first losses {got}, and the hand-written step {want}:"
            f" not the same computation within {rtol}. Their times are not compared."
        )


def main() -> None:
    """Run the job on the standard input; write its record to a file."""
    job = json.load(sys.stdin)
    record = run_recorded(Trial(**job["trial"]), TimingProtocol(**job["timing"]))
    pathlib.Path(sys.argv[1]).write_text(json.dumps(record))


def run_recorded(trial: Trial, timing: TimingProtocol) -> dict[str, Any]:
    """Run a trial; return its record, also if it failed."""
    start, load = time.perf_counter(), round(os.getloadavg()[0], 2)
    try:
        run = resolve(trial.by) if ":" in trial.by else run_trial
        found = {"status": "ok", **run(trial, timing)}
    except Exception as error:  # any error is recorded, and the sweep continues
        is_there = not isinstance(error, ModuleNotFoundError | NotImplementedError)
        status = "failed" if is_there else "not available"
        found = {"status": status, "error": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": round(time.perf_counter() - start, 3), "load": load}


if __name__ == "__main__":
    main()
