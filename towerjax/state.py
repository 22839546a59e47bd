"""What does a step carry over? TrainState: made, placed, checked."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from towerjax.example_count import ExampleCount
from towerjax.html_form import leaf_table
from towerjax.placement import Placement, place
from towerjax.processes import require_same
from towerjax.tower_local import checked_local, stacked_local
from towerjax.types import Layout, PyTree, named_leaves


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step needs and changes: a plain pytree.

    Attributes:
      step: ``()`` int32, steps done.
      params: The parameters, mirrored.
      opt_state: The optimizer's state, mirrored.
      local: A pytree of ``TowerLocal``, leaves ``[T, ...]``.
      rng: ``()`` typed key; each step and tower derives its own from it.
      seen: Which examples the steps have learned from, an ``ExampleCount``, mirrored;
        None where the step was built without ``example_ids``.

    Example:
      >>> import towerjax as tj
      >>> loss_fn = lambda params, batch, tower: tj.Weighted.mean(params * batch["x"])
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
      >>> int(step.init(jnp.float32(1.0)).step)
      0
    """

    step: jax.Array
    params: PyTree
    opt_state: PyTree
    local: PyTree
    rng: jax.Array
    seen: ExampleCount | None = None

    def _repr_html_(self) -> str:
        leaves = [
            (*leaf, "per tower" if field.name == "local" else None)
            for field in dataclasses.fields(self)
            for leaf in named_leaves(field.name, getattr(self, field.name))
        ]
        return leaf_table("TrainState", leaves)

    @classmethod
    def create(
        cls,
        params: PyTree,
        optimizer: optax.GradientTransformation,
        *,
        local: PyTree = None,
        rng: jax.Array | None = None,
    ) -> "TrainState":
        """The state before the first step, of one tower, on no particular device.

        Args:
          params: Floating arrays.
          optimizer: Its ``init`` makes the optimizer state.
          local: A pytree of ``TowerLocal``, each of one tower's value, or None.
          rng: One key; None is ``jax.random.key(0)``.

        Returns:
          A ``TrainState``, for a model function; a train step's is made, and placed,
          by its own ``init``.

        Raises:
          ValueError: As ``step.init``.

        Example:
          >>> int(TrainState.create(jnp.float32(1.0), optax.sgd(0.1)).step)
          0
        """
        params = _checked_params(params)
        local = checked_local(local)
        key = _one_key(rng)
        return cls(jnp.int32(0), params, optimizer.init(params), local, key)


CARRY_LAYOUT = {
    "params": Layout.MIRRORED,
    "opt_state": Layout.MIRRORED,
    "local": Layout.PER_TOWER,
    "seen": Layout.MIRRORED,
}
"""What a step takes over and hands on, as a prefix tree of layouts; donated."""

CLOCK_LAYOUT = {"step": Layout.MIRRORED, "rng": Layout.MIRRORED}
"""What a step reads besides; kept, so that old step numbers can still be read."""

_LAYOUTS: Any = {**CARRY_LAYOUT, **CLOCK_LAYOUT}
STATE_LAYOUT = TrainState(**_LAYOUTS)
"""The layout of each part of a state: the state's own type."""


def split_state(state: TrainState) -> tuple[dict[str, Any], dict[str, Any]]:
    """A state as a program takes it: what is donated, and what is not.

    Args:
      state: The state.

    Returns:
      ``(carry, clock)``, of the layouts above.
    """
    carry = {
        "params": state.params,
        "opt_state": state.opt_state,
        "local": state.local,
        "seen": state.seen,
    }
    return carry, {"step": state.step, "rng": state.rng}


def init_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    *,
    local: PyTree,
    rng: jax.Array | None,
    counts: bool = False,
) -> TrainState:
    """The state before the first step, a copy, placed where the steps want it.

    On several processes every one starts with the values of process 0.

    Args:
      params: Floating arrays; copied, so the caller's stay usable.
      optimizer: Its ``init`` makes the optimizer state.
      placement: Where the state shall live.
      local: A pytree of ``TowerLocal``, or None.
      rng: A key, typed or raw; None is ``jax.random.key(0)``.
      counts: Does the state count examples?

    Returns:
      A ``TrainState`` committed to its final shardings and dtypes.

    Raises:
      ValueError: ``params`` has no leaves or leaves that are not floating; a leaf
        of ``local`` is not inside a ``TowerLocal``; ``rng`` is not one key.
    """
    params = _checked_params(params)
    local = stacked_local(local, placement.num_towers)
    key = _checked_key(rng, placement)
    if placement.num_processes > 1:
        _check_processes(placement, (params, local, key))
    state = TrainState(
        step=np.int32(0),  # type: ignore[arg-type]
        params=params,
        opt_state=optimizer.init(params),
        local=local,
        rng=key,
        seen=ExampleCount.none() if counts else None,
    )
    return place(state, placement, STATE_LAYOUT)


def _check_processes(placement: Placement, tree: PyTree) -> None:
    """Raise unless all processes have the same towers and values of one kind."""
    kinds = ", ".join(
        f"{name} {jnp.result_type(x)}{list(jnp.shape(x))}"
        for root, part in zip(("params", "local", "rng"), tree, strict=True)
        for name, x in named_leaves(root, part)
    )
    advice = "Run the same program on every process."
    require_same("The strategy's towers", f"{placement}", advice)
    require_same("What step.init was given", kinds, advice)


def abstract_state(
    params: PyTree,
    optimizer: optax.GradientTransformation,
    num_towers: int,
    local: PyTree,
    counts: bool = False,
) -> TrainState:
    """The shapes of a state, without any device.

    Args:
      params: Floating arrays or shapes.
      optimizer: Its ``init`` makes the optimizer state.
      num_towers: ``T``.
      local: A pytree of ``TowerLocal``, or None.
      counts: Does the state count examples?

    Returns:
      A ``TrainState`` of ``jax.ShapeDtypeStruct``.
    """

    def make(params: PyTree) -> TrainState:
        stacked = jax.tree.map(jnp.asarray, stacked_local(local, num_towers))
        opt_state = optimizer.init(params)
        seen = jax.tree.map(jnp.asarray, ExampleCount.none()) if counts else None
        key = jax.random.key(0)
        return TrainState(jnp.int32(0), params, opt_state, stacked, key, seen)

    return jax.eval_shape(make, params)


def _checked_params(params: PyTree) -> PyTree:
    leaves = named_leaves("params", params)
    if not leaves:
        raise ValueError(f"params holds no arrays: {params!r}.")
    bad = [
        f"{name} is {getattr(leaf, 'dtype', type(leaf).__name__)}"
        for name, leaf in leaves
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    ]
    if bad:
        raise ValueError(
            "Every leaf of params gets a gradient and so is floating, but "
            + "; ".join(bad)
            + ". Put counters into local=... and constants into a closure."
        )
    return jax.tree.map(jnp.asarray, params)


def _one_key(rng: Any) -> jax.Array:
    if rng is None:
        return jax.random.key(0)
    rng = jnp.asarray(rng)
    if not jnp.issubdtype(rng.dtype, jax.dtypes.prng_key):
        if rng.dtype != jnp.uint32 or rng.ndim != 1:
            raise ValueError(
                f"rng is {rng.dtype}{list(rng.shape)}; pass one key, such as"
                " jax.random.key(0)."
            )
        rng = jax.random.wrap_key_data(rng)
    if rng.shape:
        raise ValueError(f"rng holds {rng.shape} keys; pass one, jax.random.key(0).")
    return rng


def _checked_key(rng: Any, placement: Placement) -> jax.Array:
    rng, axes = _one_key(rng), placement.axes
    in_batches = axes.num_local > 1 and not axes.in_turn
    if in_batches and "rbg" in str(jax.random.key_impl(rng)):
        raise ValueError(
            f"rng is a key of {jax.random.key_impl(rng)}, whose draws under vmap depend"
            " on how many towers share a device. Use jax.random.key(seed) (threefry),"
            " local='scan', or one tower a device."
        )
    return rng


def is_usable(state: Any) -> bool:
    """Is it a state on devices whose buffers no step has taken over?

    Looks at one leaf, in a moment: JAX 0.10 does not raise but abort the process
    when several CPU devices are given a donated array.

    Args:
      state: What was passed to the step.

    Returns:
      False also for what is no ``TrainState``.
    """
    if not isinstance(state, TrainState) or not isinstance(state.step, jax.Array):
        return False
    leaf = state.params
    while isinstance(leaf, dict | list | tuple) and leaf:
        leaf = next(iter(leaf.values())) if isinstance(leaf, dict) else leaf[0]
    if not isinstance(leaf, jax.Array):
        leaf = jax.tree.leaves(state.params)[0]
    return isinstance(leaf, jax.Array) and not leaf.is_deleted()


def check_is_state(state: Any) -> None:
    """Raise unless it is a ``TrainState``.

    Args:
      state: What was passed to the step.

    Raises:
      ValueError: It is something else.
    """
    if not isinstance(state, TrainState):
        raise ValueError(
            f"The state is a {type(state).__name__}, not a TrainState. Make it with"
            " step.init(params)."
        )


def check_state(
    state: Any, placement: Placement, *, counts: bool | None = None
) -> None:
    """Raise unless the state was made for these towers and devices.

    Args:
      state: What was passed to the step.
      placement: The step's.
      counts: Does the step count examples? None does not say.

    Raises:
      ValueError: It is not a ``TrainState``, lies elsewhere, or its tower-local
        variables have another number of towers; or it counts examples and the step
        does not, or the other way round.
    """
    check_is_state(state)
    if counts is not None and counts != (state.seen is not None):
        raise ValueError(
            "The step counts examples, but state.seen is None. Begin a count with"
            " step.place(dataclasses.replace(state, seen=tj.ExampleCount.none()))."
            if counts
            else "state.seen counts examples, but the step was built without"
            " example_ids and would leave its own out. Pass example_ids=..., or end the"
            " count with dataclasses.replace(state, seen=None)."
        )
    wrong_towers = [
        f"{name} has {np.shape(x)[:1]} copies"
        for name, x in named_leaves("state.local", state.local)
        if np.shape(x)[:1] != (placement.num_towers,)
    ]
    if wrong_towers:
        raise ValueError(
            f"The state was made for another number of towers than"
            f" {placement.num_towers}: {'; '.join(wrong_towers)}. Read its tower-local"
            " variables with tj.read_local and start them anew with"
            " step.init(state.params, local=...)."
        )
    if any(x.is_deleted() for x in jax.tree.leaves(state) if isinstance(x, jax.Array)):
        raise ValueError(
            "The state was donated to an earlier step. Go on with the state which that"
            " step returned, or build the step with donate=False to keep both."
        )
    expected = set(placement.jax_devices)
    elsewhere = [
        f"{name} is on {_where(x)}"
        for name, x in named_leaves("state", state)
        if not isinstance(x, jax.Array) or x.devices() != expected
    ]
    if elsewhere:
        shown = "; ".join(elsewhere[:4]) + (" ..." if len(elsewhere) > 4 else "")
        raise ValueError(
            f"The state lies elsewhere than the strategy's devices"
            f" {list(placement.devices)}: {shown}. Move it with step.place(state)."
        )


def _where(x: Any) -> str:
    if not isinstance(x, jax.Array):
        return f"the host ({type(x).__name__})"
    return ", ".join(sorted(str(device) for device in x.devices()))
