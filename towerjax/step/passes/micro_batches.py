"""Run the micro-batches of towers one after another, and merge their results."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from towerjax.collectives.sparse_rows import split_micro_batches
from towerjax.jaxprs import tags
from towerjax.lowering.in_turn import scan_in_turn
from towerjax.prover.replication.analysis import depends
from towerjax.prover.replication.findings import Analysis, refuse_varying
from towerjax.step.passes.accumulators import CARRIED, SAME, Returned, values_of
from towerjax.towers.executors import vmap_members
from towerjax.types import PyTree
from towerjax.types.boundary import warn
from towerjax.types.refusals import listed
from towerjax.types.trees import names_by_key, parts_of, put_parts
from towerjax.types.version import page

MicroBatchFn: TypeAlias = Callable[[Any, PyTree, PyTree], PyTree]
"""``(index, rows, local) -> tree`` of `Returned`; the index of a lone one is None."""


def scan_micro_batches(
    of_micro_batch: MicroBatchFn,
    numbered: tuple[jax.Array, PyTree],
    local: PyTree,
    *,
    of_several: bool,
) -> PyTree:
    """Run ``A`` micro-batches in turn by a ``scan``, and merge their results.

    Args:
      of_micro_batch: ``(index, rows, local) -> tree`` of `Returned`.
      numbered: The numbers of the micro-batches, ``[A]``, and their rows, with leaves
        ``[A, ...]``.
      local: The towers' variables before the first micro-batch.
      of_several: Whether ``of_micro_batch`` computes all towers of a device. Then its
        sums are already added over them, and each other value has a row for each tower.

    Returns:
      A tree of `Returned`, like that of one micro-batch.
    """
    first = jax.tree.map(lambda x: x[0], numbered)
    program, shapes = jax.make_jaxpr(of_micro_batch, return_shape=True)(*first, local)
    treedef = jax.tree.structure(shapes)
    run = jaxpr_as_fun(program)
    parts = parts_of(Returned, shapes)

    def local_after(totals: list[PyTree]) -> PyTree:
        """Take the towers' variables after the micro-batches so far from totals."""
        pairs = zip(totals, parts, strict=True)
        carried = [total for total, part in pairs if part.rule is CARRIED]
        if not carried:
            return local
        return jax.tree.unflatten(jax.tree.structure(local), jax.tree.leaves(carried))

    def body(
        totals: list[PyTree], numbered: PyTree
    ) -> tuple[list[PyTree], list[PyTree]]:
        out = run(*jax.tree.leaves((*numbered, local_after(totals))))
        new = parts_of(Returned, jax.tree.unflatten(treedef, out))
        pairs = [x.rule.add(t, x.value) for t, x in zip(totals, new, strict=True)]
        return [total for total, _ in pairs], [each_value for _, each_value in pairs]

    def finish(part: Returned, total: PyTree, stacked: PyTree) -> Returned:
        join = part.rule.finish
        if of_several and jax.tree.leaves(stacked):
            stacked = jax.tree.map(
                lambda x: jnp.swapaxes(x, 0, 1), stacked
            )  # [k, A, ...]
            join = vmap_members(functools.partial(join, total))
            return Returned(join(stacked), part.rule)
        return Returned(join(total, stacked), part.rule)

    totals, stacked_parts = scan_in_turn(body, _starts(parts, local), numbered)
    done = [finish(*x) for x in zip(parts, totals, stacked_parts, strict=True)]
    return put_parts(Returned, shapes, done)


def _starts(parts: Sequence[Returned], local: PyTree) -> list[PyTree]:
    """Start the total of each leaf, before the first micro-batch.

    Tower-local variables start as ``local``.
    """
    carried = [x.value for x in parts if x.rule is CARRIED]
    if carried:
        structure = jax.tree.structure(carried)
        carried = structure.unflatten(jax.tree.leaves(local))
    before = iter(carried)
    return [x.rule.start(next(before) if x.rule is CARRIED else x.value) for x in parts]


def numbered_rows(
    rows: PyTree, count: int, *, of_several: bool
) -> tuple[jax.Array, PyTree]:
    """Split rows into ``count`` micro-batches, and return these with their indices.

    The result is ``(indices [A], rows [A, ...])``. With ``of_several`` the rows are
    those of several towers, stacked.
    """
    split = functools.partial(split_micro_batches, parts=count)
    if of_several:  # rows of k towers, [k, b, ...]
        of_one = jax.eval_shape(split, jax.tree.map(lambda x: x[0], rows))
        leaves, treedef = jax.tree.flatten(rows)

        # ``vmap`` takes sparse arrays apart in another way, so it gets plain leaves.
        def of_tower(leaves: list[jax.Array]) -> list[jax.Array]:
            return jax.tree.leaves(split(treedef.unflatten(leaves)))

        of_towers = vmap_members(of_tower)(leaves)
        parts = jax.tree.unflatten(
            jax.tree.structure(of_one), [jnp.swapaxes(x, 0, 1) for x in of_towers]
        )
    else:
        parts = split(rows)
    return jnp.arange(count, dtype=jnp.int32), parts


def check_micro_batch(
    closed: ClosedJaxpr, tree: PyTree, args: tuple[PyTree, ...], count: int
) -> None:
    """Raise if a bare value differs between micro-batches, and warn of some calls.

    A call such as ``tower.mean`` reduces over the rows of one micro-batch only, which
    the warning tells.

    ``closed`` is one tower's program of one micro-batch, and ``tree`` its results: each
    is a `Returned` with the result's index. ``args`` are the shapes of the program's
    arguments: the tower's id, its `PerTowerArgs`, the micro-batch's index, and those
    that are replicated.
    """
    analysis, names = _differences(closed, tree, _kinds_of_inputs(args))
    refuse_varying(analysis, names)
    calls = [x for x in analysis.tower_calls if x.source and x.name in tags.TOWER_CALLS]
    if calls:
        calls_with_lines = dict.fromkeys(f"{x.name} at {x.line}" for x in calls)
        warn(
            f"Each of {count} micro-batches calls {listed(calls_with_lines)} with its"
            " own rows, so that the results depend on micro_batches=. Compute what"
            " depends on all rows in an earlier pass of tj.build_step, as in"
            f" {page('how_to/several_losses', 'A function of a mean')}"
        )


def _kinds_of_inputs(args: tuple[PyTree, ...]) -> list[str]:
    """Label each input: "rows", "local" for a tower's variable, or ""."""
    tower_id, per_tower, index, *replicated = args
    kinds = [
        ("", tower_id),
        ("rows", per_tower.rows),
        ("", per_tower.num_valid),
        ("local", per_tower.local),
        ("rows", index),
        ("", replicated),
    ]
    return [kind for kind, arg in kinds for _ in jax.tree.leaves(arg)]


def _differences(
    closed: ClosedJaxpr, tree: PyTree, kinds: Sequence[str]
) -> tuple[Analysis, Sequence[str | None]]:
    """Find what differs between micro-batches, and name the outputs that must not.

    An output that may differ has None in place of a name.
    """
    parts = parts_of(Returned, tree)
    outs = closed.jaxpr.outvars
    carried = [x for x in parts if x.rule is CARRIED]
    # These are the variables' new values, in the order of the variables' inputs.
    after = iter([outs[i] for i in jax.tree.leaves(carried)])

    def label(var: Any, kind: str) -> str | None:
        if kind == "local":  # an unchanged variable is the same in all micro-batches
            return None if next(after, var) is var else "its rows"
        return "its rows" if kind == "rows" else None

    labels = [*map(label, closed.jaxpr.invars, kinds)]
    bare = {*jax.tree.leaves([x for x in parts if x.rule is SAME])}
    numbers = jax.tree.leaves(tree)
    pairs = zip(numbers, names_by_key(values_of(tree)), strict=True)
    name_of = {number: name for number, name in pairs if number in bare}
    return depends(closed, labels), [name_of.get(i) for i in range(len(outs))]
