"""Time steps of sharded parameters against two that people write by hand.

A network of scanned, recomputed layers trains with Adam on 8 CPU devices in three ways:
with `state="sharded"`; with FSDP by hand, a `shard_map` that gathers each layer in the
scan; and with `jit` and a `NamedSharding` for each parameter, where the compiler
decides what to send.

Run: ``python -m benchmarks.sharded_speed [--width 256] [--layers 6] [--rows 8 512]
[--rounds 9]``; rows are those of a device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import towerjax as tj
from benchmarks.harness import awaited_calls, begin, options_of, parser_of

DEVICES = 8
OPTIMIZER = optax.adam(1e-3)
SPECS = {"up": P(None, None, "d"), "down": P(None, "d")}
COLUMNS = {
    "rows a device": "",
    "towerjax ms": ".1f",
    "over shard_map by hand": "",
    "over jit": "",
    "peak MB, in turn": ".0f",
}


def layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    """Return the output of a residual layer with one hidden layer."""
    return x + jnp.tanh(x @ p["up"]) @ p["down"], None


def losses(params: Any, x: jax.Array) -> jax.Array:
    """Return the squared outputs of each row."""
    return (lax.scan(jax.checkpoint(layer), x, params)[0] ** 2).mean(-1)


class Stepping:
    """A step with its state, which is called again and again."""

    def __init__(self, call: Callable[..., Any], state: Any, batch: Any) -> None:
        self.call = call
        self.state = state
        self.batch = batch
        self.memory = 0

    def run(self) -> Any:
        """Do one step, and return its loss."""
        self.state, loss = self.call(self.state, self.batch)
        return loss


def _peak(compiled: Any) -> int:
    plan = compiled.memory_analysis()
    return plan.argument_size_in_bytes + plan.temp_size_in_bytes


def by_towerjax(params: Any, batch: Any) -> Stepping:
    """Return towerjax's step."""

    def loss_fn(params: Any, x: jax.Array, tower: Any) -> tj.Weighted:
        return tj.Weighted.mean(losses(params, x), tower.weight)

    step = tj.build_train_step(loss_fn, OPTIMIZER, tj.Mirrored(state="sharded"))
    state = step.init(params)
    placed = step.place_batch(batch)
    made = Stepping(lambda s, b: step(s, b), state, placed)
    made.memory = _peak(step.program(state, placed).call)
    return made


def _of(update: Callable[..., Any], params: Any, batch: Any, mesh: Any) -> Stepping:
    """Return a jitted step of sharded ``(params, opt_state)``."""
    where = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.device_put(params, where)
    state = (params, jax.jit(OPTIMIZER.init)(params))
    adam, *rest = state[1]
    adam = adam._replace(mu=jax.device_put(adam.mu, where))
    adam = adam._replace(nu=jax.device_put(adam.nu, where))
    state = (params, (adam, *rest))
    rows = jax.device_put(batch, NamedSharding(mesh, P("d")))
    jitted = jax.jit(update, donate_argnums=0)
    compiled = jitted.lower(state, rows).compile()
    made = Stepping(compiled, state, rows)
    made.memory = _peak(compiled)
    return made


def _apply(state: Any, grads: Any) -> Any:
    updates, opt_state = OPTIMIZER.update(grads, state[1], state[0])
    return optax.apply_updates(state[0], updates), opt_state


def by_shard_map(params: Any, batch: Any, mesh: Any) -> Stepping:
    """Return a step of FSDP, written by hand with ``shard_map``."""

    def device_fn(state: Any, x: jax.Array) -> Any:
        def gathered(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            whole = {
                "up": lax.all_gather(p["up"], "d", axis=1, tiled=True),
                "down": lax.all_gather(p["down"], "d", axis=0, tiled=True),
            }
            return layer(x, whole)

        def total(params: Any) -> jax.Array:
            out = lax.scan(jax.checkpoint(gathered), x, params)[0]
            return (out**2).mean(-1).sum()

        loss, grads = jax.value_and_grad(total)(state[0])
        count = DEVICES * len(x)
        grads = jax.tree.map(lambda g: g / count, grads)
        return _apply(state, grads), lax.psum(loss, "d") / count

    made: Any = optax.ScaleByAdamState
    adam = made(P(), SPECS, SPECS)
    of_state = (SPECS, (adam, optax.EmptyState()))
    update = jax.shard_map(
        device_fn,
        mesh=mesh,
        in_specs=(of_state, P("d")),
        out_specs=(of_state, P()),
        check_vma=False,
    )
    return _of(update, params, batch, mesh)


def by_jit(params: Any, batch: Any, mesh: Any) -> Stepping:
    """Return a step of ``jit`` with shardings."""

    def update(state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(lambda p: losses(p, x).mean())(state[0])
        return _apply(state, grads), loss

    return _of(update, params, batch, mesh)


def main() -> None:
    """Print a row for each number of rows."""
    parser = parser_of(__doc__)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 512])
    parser.add_argument("--rounds", type=int, default=9)
    options = options_of(parser, width=32, layers=2, rows=[8], rounds=1)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    mesh = jax.make_mesh((DEVICES,), ("d",), axis_types=(AxisType.Auto,))
    rng = np.random.default_rng(0)
    shape = options.layers, options.width, 4 * options.width
    draw = functools.partial(rng.normal, scale=0.02)
    params = {"up": draw(size=shape), "down": draw(size=(shape[0], *shape[:0:-1]))}
    params = jax.tree.map(np.float32, params)
    about = f"{options.layers} layers of {options.width}, {options.rounds} rounds"
    table = begin(about, COLUMNS, options)
    for rows in options.rows:
        batch = np.float32(rng.normal(size=(rows * DEVICES, options.width)))
        made = [by_towerjax(params, batch)]
        made += [fn(params, batch, mesh) for fn in (by_shard_map, by_jit)]
        runs = [x.run for x in made]
        awaited, _ = awaited_calls(runs, rounds=options.rounds, calls=3)
        intervals = [awaited.interval(0, other) for other in (1, 2)]
        peaks = tuple(x.memory / 1e6 for x in made)
        table.row(rows, 1e3 * awaited.medians()[0], *intervals, peaks)
        values = [float(jnp.asarray(jax.tree.leaves(x.run())[0])) for x in made]
        if not np.allclose(values, values[0], rtol=1e-4):
            raise RuntimeError(f"The losses differ: {values}.")


if __name__ == "__main__":
    main()
