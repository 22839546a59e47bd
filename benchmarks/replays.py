"""Replay steps of healthy devices and of a faulty one: who is named, and what it costs.

Each replay has another batch, drawn anew, and the state that training has reached. In
the last replays a device computes wrongly: it changes the last bit of one element of
its tower's gradient. Device and element are drawn for each replay. The faulty device
knows itself by its own copy of a number in the batch, so that the fault does not follow
a tower. The median replay is divided by the median step of the same run, and the first
replay by the first step, both with what they compile.

Run: ``python -m benchmarks.replays [--healthy 500]``
"""

import dataclasses
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import towerjax as tj
from benchmarks.harness import begin, options_of, parser_of
from benchmarks.models import MODELS, Model
from towerjax.check.replay.replay import Replayer
from towerjax.types import PyTree

DEVICES = 8
COLUMNS = {
    "model": "",
    "healthy": ",",
    "differ": ",",
    "faulty": ",",
    "named": ",",
    "others named": ",",
    "step ms": ".1f",
    "replay / step": ".1f",
    "first / first": ".1f",
}


@jax.custom_vjp
def nudges(x: jax.Array, at: jax.Array) -> jax.Array:
    """Return ``x``, whose gradient has another last bit in element ``at``."""
    return x


def _backward(at: jax.Array, g: jax.Array) -> tuple[jax.Array, None]:
    is_there = jnp.arange(g.size).reshape(g.shape) == at
    return jnp.where(is_there, jnp.nextafter(g, jnp.full_like(g, jnp.inf)), g), None


nudges.defvjp(lambda x, at: (x, at), _backward)


def loss_of(model: Model) -> Any:
    """Return a loss whose gradient is wrong in the element that the batch names."""

    def loss_fn(params: PyTree, batch: PyTree, tower: tj.Tower) -> tj.Weighted:
        leaves, treedef = jax.tree.flatten(params)
        starts = np.cumsum([0, *[x.size for x in leaves]])
        at = batch["element"]
        wrong = [nudges(x, at - i) for x, i in zip(leaves, starts, strict=False)]
        losses = model.losses(treedef.unflatten(wrong), batch["rows"])
        return tj.Weighted.mean(losses, tower.weight)

    return loss_fn


def with_fault(placed: Any, device: int, element: int) -> Any:
    """Return a placed batch in which one device's copy names an element."""

    def own(x: jax.Array) -> jax.Array:
        pieces = [
            jax.device_put(
                np.asarray(element if i == device else -1, x.dtype), piece.device
            )
            for i, piece in enumerate(x.addressable_shards)
        ]
        return jax.make_array_from_single_device_arrays(x.shape, x.sharding, pieces)

    args = (*placed.args[:2], jax.tree.map(own, placed.args[2]))
    return dataclasses.replace(placed, args=args)


def measure(model: Model, healthy: int, faulty: int, batch: int) -> tuple[Any, ...]:
    """Replay healthy and then faulty steps; return the values of a row."""
    strategy = tj.Mirrored(towers=DEVICES)
    step = tj.build_train_step(loss_of(model), optax.adam(1e-3), strategy, audit=False)
    state = step.init(model.init(0))
    size = sum(x.size for x in jax.tree.leaves(state.params))
    replay = Replayer(step)
    rng = np.random.default_rng(0)
    step_s = []
    replay_s = []
    differ = named = others = 0
    for number in range(healthy + faulty):
        rows = model.make_batch(number, batch)
        placed = step.place_batch({"rows": rows, "element": tj.Whole(np.int32(-1))})
        start_s = time.perf_counter()
        state, metrics = step(state, placed)
        jax.block_until_ready((state.params, metrics))
        step_s.append(time.perf_counter() - start_s)
        device = int(rng.integers(DEVICES))
        if number >= healthy:
            placed = with_fault(placed, device, int(rng.integers(size)))
        start_s = time.perf_counter()
        report = replay(state, placed)
        replay_s.append(time.perf_counter() - start_s)
        if number >= healthy:
            named += report.named == (f"cpu:{device}",)
            others += not {*report.named} <= {f"cpu:{device}"}
        else:
            differ += not report.agrees
    middle = float(np.median(step_s[1:healthy]))
    ratio = float(np.median(replay_s[1:healthy])) / middle
    counts = (healthy, differ, faulty, named, others)
    return (*counts, 1e3 * middle, ratio, replay_s[0] / step_s[0])


def main() -> None:
    """Print the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--healthy", type=int, default=500, help="replays")
    parser.add_argument("--faulty", type=int, default=100, help="replays")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument(
        "--models", nargs="+", default=["mlp", "cnn"], choices=[*MODELS]
    )
    options = options_of(parser, healthy=3, faulty=1, models=["mlp"])
    jax.config.update("jax_num_cpu_devices", DEVICES)
    table = begin(f"{DEVICES} devices", COLUMNS, options)
    for name in options.models:
        model = functools.partial(MODELS[name], jnp.float32)()
        table.row(name, *measure(model, options.healthy, options.faulty, options.batch))


if __name__ == "__main__":
    main()
