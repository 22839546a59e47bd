"""What does towerjax cost over hand-written JAX? Paired runs in one process.

The hand-written step is ``jit(shard_map(...))`` with ``pmean(gradients)``, as people
write it; both steps train the same model from the same batch, in turns.

Run: ``python -m towerjax.bench.overhead [--small]``
"""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from towerjax.checking import Check
from towerjax.executors import jit_on_devices, over_devices, shapes_of
from towerjax.placement import DEVICE_AXIS, Placement, place
from towerjax.state import TrainState
from towerjax.step import build_train_step
from towerjax.strategies import Mirrored
from towerjax.types import Layout, PyTree, Weighted


@dataclasses.dataclass(frozen=True)
class Model:
    """A multi-layer perceptron to measure with.

    Attributes:
      name: For the table.
      layers: How many layers; each has two leaves.
      width: Features of every layer.
      batch: Examples in the global batch.
      bound: The ratio of step times that is promised, on several devices.
    """

    name: str
    layers: int
    width: int
    batch: int
    bound: float

    def params(self) -> PyTree:
        """Random parameters."""
        rng = np.random.default_rng(0)
        shape = (self.width, self.width)
        return [
            {
                "w": rng.normal(size=shape).astype(np.float32) / self.width**0.5,
                "b": np.zeros(self.width, np.float32),
            }
            for _ in range(self.layers)
        ]

    def data(self) -> PyTree:
        """One batch."""
        rng = np.random.default_rng(1)
        shape = (self.batch, self.width)
        return {name: rng.normal(size=shape).astype(np.float32) for name in "xy"}


MODELS = (
    Model("tiny", layers=2, width=32, batch=256, bound=1.03),
    Model("50 leaves", layers=25, width=16, batch=256, bound=0.5),
    Model("medium", layers=4, width=384, batch=512, bound=1.03),
)


def _losses(params: PyTree, batch: PyTree) -> jax.Array:
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"][None])
    return jnp.mean((x - batch["y"]) ** 2, axis=-1)


@dataclasses.dataclass
class Contender:
    """A compiled step and its state.

    Attributes:
      call: ``(state, batch) -> (state, loss)``.
      params: What of a state is awaited.
      state: The present state.
      batch: A placed batch.
      compile_seconds: What tracing, (proving) and compiling took.
      program: The compiler's own text.
    """

    call: Callable[[Any, Any], tuple[Any, Any]]
    params: Callable[[Any], PyTree]
    state: Any
    batch: Any
    compile_seconds: float
    program: str


def handwritten(model: Model, placement: Placement) -> Contender:
    """The step as people write it.

    Args:
      model: What to train.
      placement: On which devices, one tower each.

    Returns:
      A `Contender`.
    """
    optimizer = optax.adam(1e-3)

    def device_step(state: Any, batch: PyTree) -> tuple[Any, jax.Array]:
        params, opt_state = state

        def loss_fn(params: PyTree) -> jax.Array:
            return _losses(params, batch).mean()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        if placement.num_devices > 1:
            grads = lax.pmean(grads, DEVICE_AXIS)
            loss = lax.pmean(loss, DEVICE_AXIS)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    layouts = (Layout.MIRRORED, Layout.PER_TOWER)
    out = (Layout.MIRRORED, Layout.MIRRORED)
    params = model.params()
    state = place((params, optimizer.init(params)), placement, Layout.MIRRORED)
    batch = place(model.data(), placement, Layout.PER_TOWER)
    start = time.perf_counter()
    step = over_devices(device_step, placement, layouts, out)
    jitted = jit_on_devices(step, placement, layouts, out, donate=True)
    call = jitted.lower(shapes_of(state), shapes_of(batch)).compile()
    seconds = time.perf_counter() - start
    text = call.as_text()
    return Contender(call, lambda state: state[0], state, batch, seconds, text)


def with_towerjax(
    model: Model, strategy: Mirrored, check: Check | None = None
) -> Contender:
    """The same step, built by towerjax.

    Args:
      model: What to train.
      strategy: On which devices.
      check: What the step looks at besides.

    Returns:
      A `Contender`.
    """

    def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
        return Weighted.mean(_losses(params, batch), tower.weight)

    step = build_train_step(loss_fn, optax.adam(1e-3), strategy, check=check)
    state = step.init(model.params())
    batch = step.place_batch(model.data())
    start = time.perf_counter()
    program = step.program(state, batch)
    seconds = time.perf_counter() - start

    def call(state: TrainState, batch: Any) -> tuple[TrainState, jax.Array]:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    text = program.call.as_text()
    return Contender(call, lambda state: state.params, state, batch, seconds, text)


def _timed_rounds(contender: Contender, steps: int) -> tuple[float, float]:
    """Seconds of a step that is awaited, and of a call until it returns."""
    step_times, call_times = [], []
    for _ in range(steps):
        start = time.perf_counter()
        contender.state, loss = contender.call(contender.state, contender.batch)
        returned = time.perf_counter()
        jax.block_until_ready((contender.params(contender.state), loss))
        step_times.append(time.perf_counter() - start)
        call_times.append(returned - start)
    return float(np.median(step_times)), float(np.median(call_times))


def timed_in_turns(
    contenders: Sequence[Contender], *, rounds: int, steps: int
) -> np.ndarray:
    """How long steps take, of all contenders in each round, in changing order.

    Args:
      contenders: What to time.
      rounds: How many; one more goes before them, to warm up.
      steps: Steps of a round.

    Returns:
      Seconds ``[rounds, contender, 2]``: medians of a step that is awaited, and of a
      call until it returns.
    """
    table = np.zeros((rounds + 1, len(contenders), 2))
    order = list(range(len(contenders)))
    for turn in range(rounds + 1):
        for index in order if turn % 2 else order[::-1]:
            table[turn, index] = _timed_rounds(contenders[index], steps)
    return table[1:]


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: towerjax over hand-written, medians of paired rounds.

    Attributes:
      model: Its name.
      devices: ``D``.
      step_ms: A hand-written step, and towerjax's, in milliseconds.
      step_ratio: The median of the rounds' ratios of step time.
      dispatch_ratio: The same for the time until the call returns.
      compile_ratio: The same for compile time.
      bound: The promised ``step_ratio``.
    """

    model: str
    devices: int
    step_ms: tuple[float, float]
    step_ratio: float
    dispatch_ratio: float
    compile_ratio: float
    bound: float


def compare(model: Model, num_devices: int, *, rounds: int, steps: int) -> Row:
    """Both steps in turns, in this process.

    Args:
      model: What to train.
      num_devices: ``D``, one tower each.
      rounds: How many pairs of rounds.
      steps: Steps of a round.

    Returns:
      A `Row`.
    """
    platform = jax.default_backend()
    names = tuple(f"{platform}:{i}" for i in range(num_devices))
    strategy = Mirrored(devices=names)
    _compile_both(model, strategy)  # JAX's own caches are warm for neither or both
    pairs = [_compile_both(model, strategy) for _ in range(3)]
    compile_ratio = np.median([b.compile_seconds / a.compile_seconds for a, b in pairs])
    hand, ours = pairs[-1]
    # [rounds, contender, (step, call)]
    table = timed_in_turns((hand, ours), rounds=rounds, steps=steps)
    ratios = np.median(table[:, 1] / table[:, 0], axis=0)
    milliseconds = np.median(table[:, :, 0], axis=0) * 1e3
    return Row(
        model.name,
        num_devices,
        (float(milliseconds[0]), float(milliseconds[1])),
        float(ratios[0]),
        float(ratios[1]),
        float(compile_ratio),
        model.bound if num_devices > 1 else 1.03,
    )


def _compile_both(model: Model, strategy: Mirrored) -> tuple[Contender, Contender]:
    return handwritten(model, strategy.placement), with_towerjax(model, strategy)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--small", action="store_true", help="few rounds, for CI")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8])
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    rounds, steps = (5, 10) if options.small else (21, 40)
    print(f"JAX {jax.__version__}, {jax.default_backend()}, {rounds} paired rounds")
    print(f"{'model':>10} {'D':>2} {'hand ms':>8} {'ours ms':>8}", end=" ")
    print(f"{'step':>6} {'bound':>6} {'dispatch':>8} {'compile':>8}")
    for model in MODELS:
        for num_devices in options.devices:
            row = compare(model, num_devices, rounds=rounds, steps=steps)
            print(f"{row.model:>10} {row.devices:>2}", end=" ")
            print(f"{row.step_ms[0]:8.3f} {row.step_ms[1]:8.3f}", end=" ")
            print(f"{row.step_ratio:6.2f} {row.bound:6.2f}", end=" ")
            print(f"{row.dispatch_ratio:8.2f} {row.compile_ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()
