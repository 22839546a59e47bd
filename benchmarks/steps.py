"""The train step that benchmarks time, built by towerjax and written by hand."""

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

from benchmarks.models import Model
from towerjax.data.batch_rows import split_rows
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.make.train import build_train_step
from towerjax.mesh.placement import Placement
from towerjax.mesh.transfer import place
from towerjax.metrics.weighted import Weighted
from towerjax.towers.executors import over_devices
from towerjax.towers.strategies import Strategy
from towerjax.types import Layout, PyTree
from towerjax.types.trees import shapes_of

LEARNING_RATE = 0.01
MOMENTUM = 0.9
WAYS = ("shard_map", "jit", "pmap", "guarded")
_OUT = (Layout.MIRRORED, Layout.MIRRORED)


@dataclasses.dataclass
class Contender:
    """A compiled step and its state."""

    call: Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (state, loss)
    state: Any
    batch: Any  # its arrays lie on the devices
    compile_seconds: float  # to trace, prove (only towerjax) and compile
    loss: Any = None  # the loss of the last call
    program: str = ""  # the compiled HLO, for a step built by towerjax

    def run(self) -> Any:
        """Dispatch one call, and return its results."""
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
    micro_batches: int = 1
    optimizer: optax.GradientTransformation = dataclasses.field(
        default_factory=lambda: optax.sgd(LEARNING_RATE, MOMENTUM)
    )
    is_guarded: bool = False  # `train` keeps the state if a value is not finite

    def train(
        self, state: Any, batch: PyTree, mean: Callable[[PyTree], PyTree]
    ) -> tuple[Any, jax.Array]:
        """Do one step as users write it with JAX and optax alone."""
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
        new = optax.apply_updates(params, updates), opt_state
        if self.is_guarded:
            new = keep_if_not_finite((loss, grads), new, state)
        return new, loss

    def init(self) -> Any:
        """Return the first state of `train`."""
        return self.params, self.optimizer.init(self.params)


def keep_if_not_finite(looked_at: PyTree, new: PyTree, old: PyTree) -> PyTree:
    """Return ``new``, or ``old`` if a value of ``looked_at`` is not finite."""
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(looked_at)]
    is_good = jnp.stack(finite).all()
    return jax.tree.map(lambda x, y: jnp.where(is_good, x, y), new, old)


def by_hand(work: Work, placement: Placement, way: str = "shard_map") -> Contender:
    """Return a step of ``shard_map`` with ``pmean(gradients)``, as users write it.

    Other ways are ``"jit"``, a plain jit of the global step with sharded inputs;
    ``"pmap"``, with a copy of the state on each device; and ``"guarded"``, a
    ``shard_map`` that changes nothing if the loss or a gradient is not finite, as
    towerjax does.
    """
    if way not in WAYS:
        raise ValueError(f"A step by hand is one of {', '.join(WAYS)}, not {way!r}.")
    if way == "guarded":
        return by_hand(dataclasses.replace(work, is_guarded=True), placement)
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


def by_towerjax(work: Work, strategy: Strategy, **options: Any) -> Contender:
    """Return the step that towerjax builds with these options of `build_train_step`."""

    def loss_fn(params: PyTree, batch: PyTree, tower: Any) -> Weighted:
        return Weighted.mean(work.model.losses(params, batch), tower.weight)

    step = build_train_step(
        loss_fn,
        work.optimizer,
        strategy,
        micro_batches=work.micro_batches,
        **options,
    )
    state = step.init(work.params)
    batch = step.place_batch(work.batch)
    start = time.perf_counter()
    program = step.program(state, batch)
    seconds = time.perf_counter() - start

    def run(state: Any, batch: Any) -> tuple[Any, jax.Array]:
        # The step is called as `run` calls it: step flags are read later, once they are
        # there.
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return Contender(run, state, batch, seconds, program=program.call.as_text())
