"""Prove that the mirrored values of a traced step are the same on every tower."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.core
from jax.extend.core import ClosedJaxpr

from towerjax.lowering.tower_axis import TowerPrograms
from towerjax.mesh.private_jax import inputs_read
from towerjax.prover.replication import findings
from towerjax.prover.replication.meshes import prove_update, refuse_mapped
from towerjax.step.passes.accumulators import as_one_tree, values_of
from towerjax.step.passes.one_pass import Pass, TracedPass
from towerjax.step.run.masks import unmasked_of
from towerjax.types import Layout, PyTree
from towerjax.types.refusals import listed
from towerjax.types.trees import (
    has_tracers,
    names_from,
)


@dataclasses.dataclass(frozen=True)
class Proof:
    """What the analysis of a traced step found."""

    analysis: findings.Analysis  # every output's dependence, and the collectives
    # Returns the names of sums that depend on the batch's rows but not on which rows
    # are padding. It is called when a batch is padded for the first time.
    unmasked: Callable[[], list[str]]
    # The reason for each merged leaf that is not proved equal to one tower. It is None
    # if equality was not asked for.
    unproved: Mapping[str, str] | None = None

    def __repr__(self) -> str:
        calls = [f"{x.primitive} of {x.bytes} bytes" for x in self.analysis.collectives]
        text = f"collectives: {', '.join(calls) or 'none'}"
        if self.unproved is not None:
            text += (
                f"; not proved: {listed(self.unproved)}" if self.unproved else _EQUAL
            )
        return f"Proof({text})"


_EQUAL = "; equal to one tower"


@dataclasses.dataclass(frozen=True)
class Checked:
    """The results of proof and audit for a step so far."""

    unproved: Mapping[str, str] | None = None  # leaf -> why it is not proved
    is_alone: bool = False  # whether one tower has all rows, so that all is proved
    # The numbers of examples, in batches that may be padded, for which the step was
    # proved.
    examples: tuple[int, ...] = ()
    report: Any = None  # an `AuditReport`, of this step or of the same program
    note: str = ""  # a message to print that the user has not seen yet
    is_told: bool = False  # whether a message was shown to the user
    seconds: float = 0.0  # the time of the proofs of equality and the audits
    is_done: bool = False  # whether the checks of the step's first call are complete
    # An `Asked`: the options that a caller of `Step.prepare` gave for this check. They
    # apply in place of the step's own options.
    asked: Any = None


def prove(
    passes: Sequence[TracedPass], finish: ClosedJaxpr, *, update_on_devices: bool
) -> Proof:
    """Prove, without a device, that the mirrored values of a step are replicated.

    ``finish`` is the step's update. ``update_on_devices`` tells whether each device
    runs the update by itself.
    """
    proofs = [_prove_pass(x) for x in passes]
    if passes:
        place = passes[0].pass_.strategy.placement
        prove_update(finish, place.axis_name, place.num_towers, len(place.devices))
    if update_on_devices:
        refuse_mapped(finish)
    return join_proofs(proofs)


def join_proofs(proofs: Sequence[Proof]) -> Proof:
    """Join the proofs of several passes or steps to one."""
    if len(proofs) == 1:
        return proofs[0]
    analysis = findings.Analysis.concat([proof.analysis for proof in proofs])
    return Proof(analysis, lambda: [x for one in proofs for x in one.unmasked()])


def _prove_pass(traced: TracedPass) -> Proof:
    """Prove that a pass's mirrored values are the same on all towers."""
    pass_ = traced.pass_
    args = traced.args
    towers = traced.towers
    placement = pass_.strategy.placement
    inputs = _names_where([*pass_.ins], pass_.ins.values(), args, mirrored=False)
    inputs = ["tower.weight" if name == "num_valid" else name for name in inputs]
    is_free = placement.num_towers == 1 and pass_.of_state
    analysis = towers.analyse(inputs, is_free=is_free)
    body = towers.jaxpr
    # Errors name a result's leaf by its own path, without a root such as "merged".
    parts = ("", "finite")
    outputs = _names_where(parts, traced.layouts, towers.out, mirrored=True)
    # If no result is replicated, each tower has means of its own. Nothing has to be
    # refused then.
    if {*outputs} - {None, "finite"}:
        findings.refuse_factors(analysis)
    findings.prove_mirrored(analysis, outputs, advice=pass_.advice)
    if _reads_no_row(pass_, towers.programs):
        raise ValueError(
            "The loss reads no leaf of its batch, so every step would train on the same"
            " numbers. Read the rows from the batch that the loss function is given,"
            " not from arrays that it closes over. If the loss is meant to read no"
            " rows, add 0 * a leaf of the batch, such as 0 * batch['x'].sum()."
        )
    unmasked = functools.cache(lambda: unmasked_of(pass_, args, towers))
    proof = Proof(analysis, unmasked)
    if has_tracers(body.consts):
        proof.unmasked()  # now, because the tracers do not outlive this trace
    return proof


def _reads_no_row(pass_: Pass, programs: TowerPrograms) -> bool:
    """Decide whether a differentiated loss reads nothing that varies between steps.

    Such a loss is probably a mistake. A loss that reads no leaf of the batch can still
    be right if it draws random numbers, or reads a tower's variable or the result of an
    earlier pass.
    """
    is_differentiated = pass_.trained is not None
    name = "micro-batch" if is_differentiated else "tower"
    key = next((key for key in programs if key[0] == name), None)
    if key is None:  # its program closes over traced values, so it was not stored
        return False
    program, returned = programs[key]
    of_loss = _results_of_loss(returned, with_gradient=not is_differentiated)
    if not of_loss:
        return False
    is_of_loss = [number in of_loss for number in range(returned.num_leaves)]
    _name, _num_towers, arguments, *_types = key
    is_read = arguments.unflatten(inputs_read(program, is_of_loss))
    _tower_id, per_tower, _index, *replicated = is_read
    # As `ReplicatedArgs`.
    _trained, state, _read, of_batch, merged = replicated
    may_be_read = per_tower.rows, per_tower.local, state.rng, of_batch, merged
    return not any(jax.tree.leaves(may_be_read))


def _results_of_loss(returned: Any, *, with_gradient: bool) -> set[int]:
    """Find which of a tower's results belong to its loss, by index.

    The set is empty if the tower returns no loss. With ``with_gradient`` it is also
    empty if the tower does not return the gradient.
    """
    numbers = range(returned.num_leaves)
    out = values_of(as_one_tree(returned, numbers))
    expected = {"loss", "grads"} if with_gradient else {"loss"}
    if not (isinstance(out, dict) and expected <= out.keys()):
        return set()
    return {*jax.tree.leaves(out["loss"])}


def _names_where(
    roots: Sequence[str], layouts: PyTree, values: PyTree, *, mirrored: bool
) -> list[str | None]:
    """Name the leaves whose layout is mirrored, or is not; None for others.

    Names are in tree order. ``mirrored`` chooses which leaves are named.
    """
    of_leaves = jax.tree.leaves(jax.tree.broadcast(tuple(layouts), tuple(values)))
    pairs = zip(names_from(roots, values), of_leaves, strict=True)
    return [x if (at is Layout.MIRRORED) is mirrored else None for x, at in pairs]
