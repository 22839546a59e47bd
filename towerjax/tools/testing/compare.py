"""Compare two trees leaf by leaf, and rebuild a step on one tower to compare with."""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.data.placer import Placer
from towerjax.estimator.replicate import ReplicatedModel
from towerjax.loop.history import History
from towerjax.step.build.step import Step
from towerjax.step.look.comparison import gaps
from towerjax.towers.strategies import OneDevice, Strategy, on_one_group
from towerjax.towers.variables import read_local
from towerjax.types import PyTree, named_leaves
from towerjax.types.leaves import a_type, few, key_data
from towerjax.types.options import check_flag, check_number


def assert_same(
    a: PyTree, b: PyTree, rtol: float = 1e-5, *, bits: bool = False
) -> None:
    """Raise unless two trees are the same, leaf by leaf.

    A leaf differs where ``|a - b| > rtol * max |b|``, over the leaf's elements: an
    element near 0 is as exact as the terms of its sum. Integers and bools differ unless
    they are equal. NaN equals NaN. Tower-local and
    mirrored variables are compared by the one value that they are read as, so that
    states of different numbers of towers can be compared.

    Args:
      a: A ``TrainState``, a ``History`` (steps and metrics), or any tree of arrays.
      b: The expected tree, of the same structure, shapes and dtypes.
      rtol: The largest difference over ``b``'s largest element in the leaf.
      bits: Whether every bit must be equal; then ``rtol`` is not used.

    Raises:
      AssertionError: A leaf differs or is missing; the first 8 are named, each with
        its largest difference, the index of that and its number of ulps.
      ValueError: ``rtol`` is no number >= 0; a tower-local variable has no one value.

    Example:
      >>> assert_same({"w": np.ones(3)}, {"w": np.ones(3)}, bits=True)
      >>> assert_same({"w": np.float32(1.0)}, {"w": np.float32(1.25)})
      Traceback (most recent call last):
      ...
      AssertionError: 1 of 1 leaves differ (rtol=1e-05):
        * a['w'] is 1.0 and should be 1.25 at (): they differ by 0.25 = 2.1e+06 ulps
    """
    check_number("rtol", rtol, "a number >= 0")
    a, b = _read_tree(a), _read_tree(b)
    left, right = dict(named_leaves("a", a)), dict(named_leaves("a", b))
    lines = [f"{name} is missing" for name in right if name not in left]
    lines += [f"{name} should not be there" for name in left if name not in right]
    check_flag("bits", bits)
    trees = jax.tree.structure(a), jax.tree.structure(b)
    if not lines and trees[0] != trees[1]:
        lines.append(f"the containers are {trees[0]} and should be {trees[1]}")
    for name in left:
        if name in right:
            lines += _difference(name, left[name], right[name], rtol, bits)
    if lines:
        how = "bit by bit" if bits else f"rtol={rtol:g}"
        shown = "".join(f"\n  * {line}" for line in few(lines))
        count = len(left.keys() | right.keys())
        raise AssertionError(f"{len(lines)} of {count} leaves differ ({how}):{shown}")


def _read_tree(tree: PyTree) -> PyTree:
    if isinstance(tree, History):
        tree = {"steps": tree.steps, "metrics": dict(tree.metrics)}
    return read_local(tree)


def _difference(name: str, a: Any, b: Any, rtol: float, bits: bool) -> list[str]:
    """A list of one sentence if the leaf differs, else an empty list."""
    a, b = np.asarray(key_data(a)), np.asarray(key_data(b))
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        kinds = [f"{x.dtype}{list(x.shape)}" for x in (a, b)]
        return [f"{name} is {kinds[0]} and should be {kinds[1]}"]
    if a.size == 0:
        return []
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    gap = gaps(a.astype(wide), b.astype(wide))
    if bits:
        rows = [np.ascontiguousarray(x).reshape(-1, 1).view(np.uint8) for x in (a, b)]
        wrong = (rows[0] != rows[1]).any(axis=-1).reshape(a.shape)
    elif a.dtype.kind in "biu":
        wrong = a != b
    else:
        largest = np.abs(b[np.isfinite(b)].astype(wide)).max(initial=0.0)
        wrong = gap > rtol * largest
    if not wrong.any():
        return []
    at = np.unravel_index(np.argmax(np.where(wrong, gap, -1.0)), a.shape)
    place = tuple(int(i) for i in at)
    text = f"{name} is {a[at]} and should be {b[at]} at {place}: they differ"
    if np.isfinite(gap[at]):
        text += f" by {gap[at]:.3g}"
        if jnp.issubdtype(b.dtype, jnp.floating):
            info = jnp.finfo(b.dtype)
            size = max(abs(float(a[at])), abs(float(b[at])), float(info.tiny))
            # Of neighbouring floats of this size; np.spacing lacks bfloat16.
            spacing = 2.0 ** np.floor(np.log2(size)) * float(info.eps)
            text += f" = {gap[at] / spacing:.2g} ulps"
    if a.ndim:
        text += f", and {int(wrong.sum())} of {a.size} elements do"
    return [text]


StepOrModel = TypeVar("StepOrModel", Step, ReplicatedModel)


def one_tower(step: StepOrModel) -> StepOrModel:
    """The same step, or the same model, on one tower of the first device.

    It has the step's functions, optimizer and options, except that micro-batches are
    one pass, states are not donated, and ``extend=`` is left out. Batches are padded
    and cut as the step's are, so that both see the same examples.

    Args:
      step: What `build_train_step`, `build_step` or `replicate_model_fn` returned.

    Returns:
      A new step with its own ``init``; compare with `assert_same`. Its ``tower.rng``
      is tower 0's, so that losses with random draws differ.

    Raises:
      ValueError: ``step`` is none of these, such as a model's ``train_step()``; a model
        with ``remainder="drop"`` on several towers, whose number decides what is
        dropped.

    Example:
      >>> import numpy as np, optax, towerjax as tj
      >>> def loss_fn(w, batch, tower):
      ...     return tj.Weighted.mean((w - batch) ** 2, tower.weight)
      >>> strategy = tj.Mirrored(towers=4)
      >>> step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, micro_batches=2)
      >>> batch, ends = np.arange(8, dtype=np.float32), []
      >>> for s in (step, tj.testing.one_tower(step)):
      ...     state, metrics = s(s.init(np.float32(0)), batch)
      ...     ends.append((state, metrics))
      >>> tj.testing.assert_same(*ends)
    """
    if isinstance(step, ReplicatedModel):
        calls = dataclasses.replace(step.options.step, donate=False)
        if calls.remainder == "drop" and step.strategy.num_towers > 1:
            raise ValueError(
                "one_tower of a model with remainder='drop': what is dropped depends on"
                f" its {step.strategy.num_towers} towers. Build it with 'pad'."
            )
        options = dataclasses.replace(step.options, step=calls)
        return ReplicatedModel(step.model_fn, _one_tower(step.strategy), options)
    if not isinstance(step, Step) or step.remake is None:
        raise ValueError(
            f"one_tower got {a_type(step)}. Pass what tj.build_train_step,"
            " tj.build_step or tj.estimator.replicate_model_fn returned."
        )
    strategy = _one_tower(step.strategy)
    options = dataclasses.replace(step.options, micro_batches=1, donate=False)
    # It takes the batches of a step of several towers.
    how: Any = {"calls": step.num_parts, "remainder": options.remainder}
    return step.remake(strategy, options, placer=Placer(strategy.placement, **how))


def _one_tower(strategy: Strategy) -> Strategy:
    """One tower on the first device, or on the first group of devices."""
    if strategy.placement.within:
        return on_one_group(strategy, 1)
    return OneDevice(strategy.placement.devices[0])
