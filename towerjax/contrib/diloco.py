"""Local SGD and DiLoCo: towers train alone, and are merged after several steps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import towerjax as tj

_MINE = "own"
Tree: TypeAlias = Any  # a pytree


class Fns(Protocol):
    """The functions of a train step that ``extend=`` gets and may replace."""

    strategy: tj.Mirrored
    options: Any  # a step's options, such as on_nonfinite and guard
    tower: Callable[..., dict[str, Tree]]
    update: Callable[[tj.TrainState, Tree], tuple[Tree, ...]]
    init: Callable[[Tree], dict[str, Tree]]
    trained: Callable[[Tree], Tree]
    accept_or_keep: Callable[..., tuple[Tree, Tree]]


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Each tower trains ``every`` steps alone; then all take the mean parameters.

    Pass it to ``build_train_step(..., extend=)``. It sends ``1 / every`` of the bytes.
    It is `DiLoCo` with ``outer=optax.sgd(1.0)``.

    Attributes:
      every: ``H``, the number of steps after which the towers' parameters are averaged.

    Raises:
      ValueError: ``every`` is not a whole number >= 1.

    Source:
      Stich (2019), "Local SGD Converges Fast and Communicates Little",
      https://arxiv.org/abs/1805.09767; Lin et al. (2020), "Don't Use Large
      Mini-Batches, Use Local SGD", https://arxiv.org/abs/1808.07217. Means by weight:
      McMahan et al. (2017), https://arxiv.org/abs/1602.05629.

    Example:
      >>> LocalSGD(every=8)
      LocalSGD(every=8)
    """

    every: int

    def __post_init__(self) -> None:
        _take_whole(self, "every")

    def __call__(self, fns: Any) -> Any:
        """Change a train step's functions so that each tower trains alone.

        `tj.build_train_step` calls this with its own functions. Between merges, a tower
        then updates its own copy of the parameters.
        """
        return DiLoCo(self.every, optax.sgd(1.0))(fns)


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    """Each tower trains ``every`` steps alone; an outer optimizer applies their mean.

    Pass it to ``build_train_step(..., extend=)``. The outer parameters are ``theta``,
    and those of a tower are ``theta_t``. ``w_t`` is the weight of the tower's losses
    since its parameters were last sent. The outer gradient is ``sum_t w_t (theta -
    theta_t) / sum_t w_t``. See
    <https://github.com/towerjax/towerjax/blob/main/docs/how_to/synchronise_less.md>.

    Attributes:
      every: ``H``, the number of steps after which a parameter is sent again.
      outer: Any optax transformation. It has a mirrored state for each fragment.
      fragments: ``P``, the number of fragments of similar size into which the leaves
        are split. One fragment is sent every ``H / P`` steps, in turn.
      overlap: ``tau``, the number of steps from sending a fragment to taking the result
        of its outer update. The tower trains alone in between.
      keep: ``alpha``, the share of its own parameters that a tower keeps. It takes
        ``alpha theta_t + (1 - alpha) theta``. The paper does this if steps overlap.

    Raises:
      ValueError: A number is out of its range, ``fragments`` does not divide ``every``,
        or ``outer`` is not an optax transformation.

    Source:
      Douillard et al. (2023), "DiLoCo: Distributed Low-Communication Training of
      Language Models", https://arxiv.org/abs/2311.08105; fragments and overlap:
      Douillard et al. (2025), "Streaming DiLoCo with Overlapping Communication",
      https://arxiv.org/abs/2501.18512.

    Example:
      >>> DiLoCo(every=8, outer=optax.sgd(0.7), fragments=2).fragments
      2
    """

    every: int
    outer: optax.GradientTransformation = dataclasses.field(
        default=optax.sgd(0.7, momentum=0.9, nesterov=True), repr=False
    )
    fragments: int = 1
    overlap: int = 0
    keep: float = 0.0

    def __post_init__(self) -> None:
        _take_whole(self, "every")
        _take_whole(self, "fragments")
        if self.every % self.fragments:
            raise ValueError(
                f"DiLoCo.fragments={self.fragments} parts are sent in turn, each every"
                f" {self.every} steps, so fragments must divide every. Write"
                f" every={self.fragments * -(-self.every // self.fragments)}."
            )
        _take_whole(self, "overlap", 0, self.every - 1)
        is_number = isinstance(self.keep, int | float)
        if not is_number or not 0 <= self.keep < 1:
            raise ValueError(f"DiLoCo.keep={self.keep!r} must be a number in [0, 1).")
        if not (hasattr(self.outer, "init") and hasattr(self.outer, "update")):
            raise ValueError(
                f"DiLoCo.outer={self.outer!r:.200} must be an optax transformation,"
                " such as optax.sgd(0.7)."
            )

    def __call__(self, fns: Any) -> Any:
        """Change a train step's functions so that each tower trains alone.

        `tj.build_train_step` calls this with its own functions. Between merges, a tower
        then updates its own copy of the parameters.
        """
        if (state := fns.strategy.state) != "mirrored":
            raise ValueError(
                f"state={state!r} needs all towers at every step, and {self!r} lets"
                " them train alone. Write state='mirrored'."
            )
        rounds = Rounds(self, fns)
        fields = {"tower": rounds.tower, "update": rounds.update, "init": rounds.init}
        return fns._replace(**fields, refuses_by_tower=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Own:
    """The values of each tower: ``state.local["own"].value``, ``[T, ...]``."""

    params: Tree  # only the trained ones
    opt_state: Tree
    weight: jax.Array  # [P]: the weight of losses since a fragment was sent
    loss: tj.Weighted  # the mean loss since the last merge
    faults: jax.Array  # [H / P]: per step since then, how many were not finite


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outer:
    """The ``state.opt_state`` of a step whose towers train alone."""

    fragments: tuple[Tree, ...]  # the outer optimizer's state of each fragment
    # The loss of all towers in the last round; its weight is 0 before the first.
    loss: tj.Weighted


@dataclasses.dataclass(frozen=True, eq=False)
class Rounds:
    """A train step's functions, changed so that towers train alone between meetings.

    At a meeting towers send one fragment of the parameters.
    """

    sync: DiLoCo
    fns: Fns  # the train step's functions

    @property
    def _period(self) -> int:
        """The number of steps after which towers meet again, for the next fragment."""
        return self.sync.every // self.sync.fragments

    def init(self, params: Tree) -> dict[str, Tree]:
        """Make the first state of the outer optimizer and of each tower."""
        first = self.fns.init(params)
        part = self.fns.trained(params)
        part = jax.tree.map(jnp.asarray, part)
        fragments = [_chosen(part, flags) for flags in self._fragments(part)]
        zero = jnp.zeros(())
        none = tj.Weighted(zero, zero)
        weight = jnp.zeros(len(fragments))
        faults = jnp.zeros(self._period, jnp.int32)
        first_own = Own(part, first["opt_state"], weight, none, faults)
        variable = tj.TowerLocal(first_own, tj.Reduction.NONE, name=_MINE)
        outer = Outer(tuple(map(self.sync.outer.init, fragments)), none)
        local = {**first.get("local", {}), _MINE: variable}
        return {"opt_state": outer, "local": local}

    def tower(
        self, state: tj.TrainState, rows: Tree, tower: tj.Tower
    ) -> dict[str, Tree]:
        """Run one tower with its own parameters."""
        of_tower = state.local[_MINE]
        if tower.local:
            tower = dataclasses.replace(tower, local=_others(tower.local))
        state_of_tower = _of_one(
            state, of_tower.value.params, of_tower.value.opt_state, _others(state.local)
        )
        out = self.fns.tower(state_of_tower, rows, tower)
        loss = out["loss"]
        grads = out["grads"]
        local = out["local"]
        if out["metrics"] or "extra" in out:
            raise ValueError(
                "The loss function returned TowerOutput(metrics=...) or extra=, but"
                f" with {self.sync!r} towers train alone and do not merge such values."
                " Return the loss and local=, and measure the rest with tj.evaluate."
            )
        if not isinstance(grads, tj.Weighted):
            raise ValueError(
                f"{self.sync!r} needs a loss that is one mean, because towers train"
                " alone, but this loss is a sum of several means, or has"
                " loss_reduction=SUM. Return one tj.Weighted, to which tj.penalty(...)"
                " may be added."
            )
        dense = jax.tree.map(_as_dense, grads.sum, is_leaf=_is_rows)
        grads = tj.Weighted(dense, grads.weight)
        # All variables are returned, because the next micro-batch gets only these.
        local = local and {**local, _MINE: of_tower}
        return {"loss": tj.PerTower(loss), "grads": tj.PerTower(grads), "local": local}

    def update(self, state: tj.TrainState, merged: dict[str, Tree]) -> tuple[Tree, ...]:
        """Train each tower alone, and merge the fragment whose turn it is.

        The loss among the metrics is that of the last round. The step flag is the
        number of the first step that a tower refused, or -1.
        """
        replicated = dataclasses.replace(state, opt_state=(), local={})
        on_each = tj.tf1.with_verbs(self.fns.strategy).call_for_each_tower
        local = on_each(
            self._between,
            state.local,
            merged["loss"],
            merged["grads"],
            _others(merged["local"]),
            replicated,
        )
        of_tower = local[_MINE].value
        faults = jnp.zeros(self._period, jnp.int32)
        for p in range(self.sync.fragments):
            state, of_tower, fault = self._meet(state, of_tower, p)
            faults += fault
        loss = state.opt_state.loss
        # Before the first meeting there is no loss of all towers, so it is NaN.
        metrics = {"loss": jnp.where(loss.weight > 0, loss.value, jnp.nan)}
        local = {**local, _MINE: dataclasses.replace(local[_MINE], value=of_tower)}
        # This is the last step of a period, number ``state.step + 1``, and ``faults``
        # begins with the first step of the period.
        first = state.step + 2 - self._period + jnp.argmax(faults > 0)
        refused = jnp.where(faults.any(), first.astype(jnp.int32), -1)
        return dataclasses.replace(state, local=local), metrics, refused

    def _between(
        self,
        tower: tj.Tower,
        variables: dict[str, Tree],
        loss: tj.Weighted,
        grads: tj.Weighted,
        after: Tree,
        replicated: tj.TrainState,
    ) -> dict[str, tj.TowerLocal]:
        """Update a tower's variables in a step in which it trains alone."""
        of_tower = variables[_MINE].value
        options = self.fns.options
        looked_at = (loss, grads.sum) if options.guard == "gradients" else loss
        fine = _are_finite(looked_at)
        counts = fine | (options.on_nonfinite == "ignore")
        accepts = counts & ((grads.weight != 0) | (options.on_nonfinite == "ignore"))
        merged = {"loss": loss, "grads": grads, "metrics": {}, "local": after}

        def attempt(of_tower: Tree) -> tuple[jax.Array, Tree, None]:
            before = _of_one(replicated, *of_tower)
            after, _ = self.fns.update(before, merged)
            if after.extra is not before.extra:
                raise ValueError(
                    "update_extra=... needs all towers at every step, and"
                    f" {self.sync!r} lets them train alone. Leave it out."
                )
            part = self.fns.trained(after.params)
            return accepts, (part, after.opt_state, after.local), None

        state_of_tower = of_tower.params, of_tower.opt_state, _others(variables)
        keep = functools.partial(self.fns.accept_or_keep, attempt)
        part, opt_state, local = _with_leading_dim(
            lambda of_tower: keep(of_tower)[0], state_of_tower
        )
        weight = jnp.where(counts, grads.weight, 0).astype(of_tower.weight.dtype)
        total = jnp.where(weight > 0, loss.value * weight, 0)
        mean = of_tower.loss.merge(tj.Weighted(total.astype(weight.dtype), weight))
        faults = of_tower.faults.at[replicated.step % self._period].add(~fine)
        of_tower = Own(part, opt_state, of_tower.weight + weight, mean, faults)
        return {**local, _MINE: dataclasses.replace(variables[_MINE], value=of_tower)}

    def _meet(
        self, state: tj.TrainState, of_tower: Own, p: int
    ) -> tuple[tj.TrainState, Own, jax.Array]:
        """Merge fragment ``p`` of all towers, if this step is due for it.

        Returns the state, the towers' values, and for each step of the period how many
        results were not finite.
        """
        sync = self.sync
        outer = state.opt_state
        done = state.step + 1
        part = self.fns.trained(state.params)
        flags = self._fragments(part)[p]
        mine = _chosen(part, flags)
        before = outer.fragments[p]
        offset = (p + 1) * sync.every // sync.fragments
        is_due = (done - offset) % sync.every == 0
        # XLA copies the operands of a branch, so only what it needs is passed.
        rows = (
            _chosen(of_tower.params, flags),
            of_tower.weight[:, p],
            of_tower.loss,
            of_tower.faults,
        )

        def meet() -> tuple[Tree, ...]:
            sent = jax.vmap(_sent, in_axes=(0, None))(rows, mine)
            sums = self.fns.strategy.reduce(tj.Reduction.SUM, tj.PerTower(sent))
            move = sums["move"]
            loss = sums["loss"]
            faults = sums["faults"]
            old = dataclasses.replace(state, params=mine, opt_state=before)
            new = tj.apply_gradients(
                sync.outer, old, move, loss=loss.value, trainable=lambda *_: True
            )
            new = jax.tree.map(
                lambda x, y: jnp.where(move.weight > 0, x, y),
                (new.params, new.opt_state),
                (mine, before),
            )
            return *new, loss, faults.astype(jnp.int32)

        def go_on() -> tuple[Tree, ...]:
            return mine, before, outer.loss, jnp.zeros(self._period, jnp.int32)

        mine, after, loss, faults = lax.cond(is_due, meet, go_on)
        fragments = (*outer.fragments[:p], after, *outer.fragments[p + 1 :])
        state = dataclasses.replace(
            state,
            params=_put_into(mine, state.params),
            opt_state=Outer(fragments, loss),
        )
        of_tower = _reset_counters(of_tower, is_due, p)
        return state, self._adopt(of_tower, mine, flags, done - offset), faults

    def _adopt(self, of_tower: Own, mine: Tree, flags: Tree, since: jax.Array) -> Own:
        """Let towers take a fragment of the outer parameters, if that is due.

        Returns the towers' values.
        """
        since = since - self.sync.overlap
        keep = self.sync.keep
        is_due = (since >= 0) & (since % self.sync.every == 0)

        def taken(x: jax.Array, outer: jax.Array) -> jax.Array:
            new = keep * x + (1 - keep) * outer[None] if keep else outer[None]
            return jnp.where(is_due, new.astype(x.dtype), x)

        params = jax.tree.map(taken, _chosen(of_tower.params, flags), mine)
        return dataclasses.replace(of_tower, params=_put_into(params, of_tower.params))

    def _fragments(self, part: Tree) -> list[Tree]:
        """Deal the leaves of ``part`` to fragments: flags for each fragment.

        The fragments' sizes are as equal as possible.
        """
        leaves, treedef = jax.tree.flatten(part)
        sizes = [0] * self.sync.fragments
        chosen = [0] * len(leaves)
        if len(leaves) < len(sizes):
            raise ValueError(
                f"DiLoCo.fragments={len(sizes)} is more than the number of parameters"
                f" that are trained, {len(leaves)}. Use at most that many fragments."
            )
        for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
            chosen[i] = sizes.index(min(sizes))
            sizes[chosen[i]] += max(leaves[i].size, 1)
        return [treedef.unflatten([x == p for x in chosen]) for p in range(len(sizes))]


def _sent(row: tuple[Tree, ...], outer: Tree) -> dict[str, Tree]:
    """Compute what a tower sends of one fragment when towers meet.

    ``row`` is the tower's own part, and ``outer`` has the same parameters as they were
    after the last merge. Their difference is multiplied by the weight of the losses
    since the tower last sent this fragment.
    """
    params, weight, loss, faults = row

    def moved(outer: jax.Array, x: jax.Array) -> jax.Array:
        dtype = jnp.promote_types(x.dtype, jnp.float32)
        move = jnp.where(weight > 0, outer.astype(dtype) - x.astype(dtype), 0)
        return move * weight.astype(dtype)

    move = tj.Weighted(jax.tree.map(moved, outer, params), weight)
    return {"move": move, "loss": loss, "faults": faults}


def _reset_counters(of_tower: Own, is_due: jax.Array, p: int) -> Own:
    """Set the weights and faults of a fragment to 0 if it was sent.

    Returns the towers' values.
    """

    def reset(x: Any) -> Any:
        return jnp.where(is_due, jnp.zeros_like(x), x)

    weight = of_tower.weight.at[:, p].set(reset(of_tower.weight[:, p]))
    loss, faults = jax.tree.map(reset, (of_tower.loss, of_tower.faults))
    return dataclasses.replace(of_tower, weight=weight, loss=loss, faults=faults)


def _with_leading_dim(fn: Callable[[Tree], Tree], value: Tree) -> Tree:
    """Compute ``fn(value)`` with a leading dim of size 1.

    A state's tower-local rows have this dim. XLA:CPU copies a value at every step if
    its update has another shape than the state's value. Scalars stay ``()``, because
    with a divisor ``[1]`` bits would depend on the number of devices.
    """
    axes = jax.tree.map(lambda x: 0 if jnp.ndim(x) else None, value)
    wide = jax.tree.map(lambda x: x[None] if jnp.ndim(x) else x, value)
    out = jax.vmap(fn, in_axes=(axes,), axis_size=1)(wide)
    return jax.tree.map(lambda x: x[0], out)


def _of_one(
    state: tj.TrainState, part: Tree, opt_state: Tree, local: Tree
) -> tj.TrainState:
    """Make a `TrainState` of a tower's own state, as if it were the only tower."""
    params = _put_into(part, state.params)
    return state.replace(params=params, opt_state=opt_state, local=local)


def _others(local: dict[str, Tree]) -> dict[str, Tree]:
    """Leave the variables of `DiLoCo` out of the tower-local variables."""
    return {name: x for name, x in local.items() if name != _MINE}


def _chosen(tree: Tree, flags: Tree) -> Tree:
    """Keep the leaves whose flag is set, with None for the others."""
    return jax.tree.map(lambda yes, x: x if yes else None, flags, tree)


def _put_into(part: Tree, tree: Tree) -> Tree:
    """Put the leaves of ``part`` in ``tree``, except where ``part`` has None."""

    def choose(new: Any, old: Any) -> Any:
        return old if new is None else new

    return jax.tree.map(choose, part, tree, is_leaf=lambda x: x is None)


def _are_finite(tree: Tree) -> jax.Array:
    finite = [jnp.isfinite(x).all() for x in jax.tree.leaves(tree)]
    return functools.reduce(jnp.logical_and, finite)


def _is_rows(x: Any) -> bool:
    return isinstance(x, tj.sparse.IndexedRows)


def _as_dense(x: Any) -> Any:
    return x.to_dense() if _is_rows(x) else x


def _take_whole(
    sync: LocalSGD | DiLoCo, name: str, lowest: int = 1, highest: float = np.inf
) -> None:
    """Convert a field to a Python integer; raise unless it is whole and in range."""
    number = getattr(sync, name)
    is_whole = isinstance(number, int | np.integer) and not isinstance(number, bool)
    if not is_whole or not lowest <= number <= highest:
        limit = f">= {lowest}" if not is_whole or number < lowest else f"<= {highest}"
        raise ValueError(
            f"{type(sync).__name__}.{name}={number!r:.200} must be a whole number"
            f" {limit}."
        )
    object.__setattr__(sync, name, int(number))
