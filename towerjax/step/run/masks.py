"""Find the results of a pass in which padded rows would count, and refuse them."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from towerjax.collectives.sparse_rows import is_rows
from towerjax.jaxprs import tags
from towerjax.lowering.tower_axis import TowerPrograms
from towerjax.mesh.placement import TowerAxes
from towerjax.prover.replication import findings
from towerjax.prover.replication.analysis import depends
from towerjax.step.passes.accumulators import (
    ADDED,
    CARRIED,
    PER_TOWER,
    ROWS,
    SAME,
    Returned,
    put_sums,
)
from towerjax.step.passes.derivative import gradients_of_terms
from towerjax.step.passes.on_device import (
    each_micro_batch,
    on_local_towers,
    over_towers,
)
from towerjax.step.passes.one_pass import Pass
from towerjax.step.passes.traced_tower import Arguments, PerTowerArgs, TracedTower
from towerjax.towers.executors import trace_one_tower
from towerjax.towers.on_towers import OnTowers
from towerjax.types import PerTower, PyTree
from towerjax.types.trees import (
    key_data,
    map_parts,
    names_by_key,
    names_from,
    parts_of,
)


def unmasked_of(pass_: Pass, args: PyTree, towers: OnTowers) -> list[str]:
    """Name results that depend on rows, but not on which rows are padding.

    In such a result padding counts like an example.
    """
    fn = _values_to_mask(pass_, towers.axes, towers.programs)
    jaxpr, out = trace_one_tower(fn, towers.axes, (*pass_.ins.values(),), args)
    names = names_from([*pass_.ins], args)
    rows = [name if name.startswith("batch") else None for name in names]
    count = [name if name == "num_valid" else None for name in names]
    by_rows = depends(jaxpr.jaxpr, rows)
    by_count = depends(jaxpr.jaxpr, count)
    outputs = zip(names_by_key(out), by_rows.outputs, by_count.outputs, strict=True)
    unmasked = [name for name, rows, count in outputs if rows and not count]
    calls = zip(by_rows.tower_calls, by_count.tower_calls, strict=True)
    return list(dict.fromkeys(unmasked + _unmasked_calls([*calls])))


def _unmasked_calls(
    calls: Sequence[tuple[findings.TowerCall, findings.TowerCall]],
) -> list[str]:
    """Name the values that towers communicate without masking padded rows.

    ``calls`` has pairs of the same call: first as it depends on the rows, then as it
    depends on which rows are padding.
    """
    # These calls tell all towers the weights of rows. A weight that is sent in the same
    # call masks the values sent with it. A weight that is added up in a call of its own
    # masks values that are gathered.
    known = [
        call
        for call, weight in calls
        if weight.source and not (call.is_sum and call.source)
    ]
    sent = {call.name for call in known if not call.is_sum}
    unmasked = []
    for call, weight in calls:
        is_masked = weight.source or _is_masked(call, known, sent)
        if call.source and not is_masked:
            text = f"what {call.name} is given of {call.source} at {call.line}"
            unmasked.append(text)
    return unmasked


def _values_to_mask(
    pass_: Pass, axes: TowerAxes, programs: TowerPrograms
) -> Callable[..., PyTree]:
    """Build a function that computes the values that padding must not change."""

    def run(*args: PyTree) -> PyTree:
        tower = TracedTower.of(pass_, axes, programs, Arguments.of(pass_, axes, *args))
        tree = _with_each_gradient(tower)
        rows = [x.value for x in parts_of(Returned, tree) if x.rule is ROWS]
        # If one leaf of `Rows` is a weight, all other leaves count as masked.
        weighs = sum(jnp.sum(key_data(x) != 0) for x in jax.tree.leaves(rows))

        def kept(x: Returned) -> PyTree:
            if x.rule is ROWS:
                return weighs if pass_.rows_used_later else None
            if x.rule in (SAME, CARRIED):
                return x.value if pass_.of_state else None
            if x.rule is PER_TOWER:
                return None
            # Which rows of a table are looked up never depends on a weight, so only the
            # values of the rows are returned.
            return x.value.values if is_rows(x.value) else x.value

        values = map_parts(Returned, kept, tree)
        return map_parts(PerTower, lambda x: x.values, values)

    return run


def _is_masked(
    call: findings.TowerCall, known: Sequence[findings.TowerCall], sent: set[str]
) -> bool:
    """Decide whether all towers know the weights of the rows that a call sends.

    ``known`` are the calls that tell weights of rows to all towers, and ``sent`` has
    the names of those among them that send the weights themselves.
    """
    if call.is_sum:
        return False
    if call.name in tags.TOWER_CALLS:
        return call.name in sent
    return bool(known if "gather" in call.name else sent)


def _with_each_gradient(tower: TracedTower) -> PyTree:
    """Run the towers, with the undivided gradient of each sum of their loss.

    A denominator depends on which rows are padding, so a gradient that is divided by it
    would always seem to be masked.
    """
    pass_ = tower.pass_
    if not pass_.takes_gradient:
        sums, (tree, _) = over_towers(tower)
        return put_sums(tree, sums)
    trained, *others = tower.args.replicated
    per_tower = tower.args.per_tower

    def of_micro_batch(index: Any, rows: PyTree, local: PyTree) -> PyTree:
        args = PerTowerArgs(rows, per_tower.num_valid, local)

        def of_trained(trained: PyTree) -> PyTree:
            tree, _ = on_local_towers(tower, args, index, trained, *others)
            return tree

        tree, grads = gradients_of_terms(of_trained, trained, pass_.loss)
        return {**tree, "grads": jax.tree.map(lambda x: Returned(x, ADDED), grads)}

    return each_micro_batch(
        of_micro_batch,
        per_tower.rows,
        per_tower.local,
        pass_.micro_batches,
        of_several=True,
    )


def refuse_unmasked(examples: int, unmasked: Sequence[str]) -> None:
    """Raise if ``unmasked`` names values in which a batch's padding would count.

    ``examples`` is the number of examples in the padded batch.
    """
    if not unmasked:
        return
    unmasked = sorted(unmasked, key=len)  # so that losses come before gradients
    shown = ", ".join(unmasked[:8]) + " ..." * (len(unmasked) > 8)
    raise ValueError(
        f"A batch of {examples} examples was padded, but {shown} does not"
        " depend on tower.weight, so padding would count. Write tj.Weighted.mean("
        "losses, tower.weight), tj.Sum(tower.weight @ values), tj.Rows({'x': x,"
        " 'weight': tower.weight}) or tower.all_gather((x, tower.weight)), and send the"
        " weights in every other collective, too. Use TowerBatchNorm in place of"
        " another batch norm. Or build the step with remainder='drop' or 'error'."
    )
