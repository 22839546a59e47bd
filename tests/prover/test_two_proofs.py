"""The two proofs beside each other: what is a copy for one is replicated for the other.

One proof says of a variable that it is the same on all towers; the other says how it
relates to that of one tower. A copy that is not replicated would be a hole in either.
An error that one of them raises itself refuses no step: the step is unknown.
"""

import collections
import itertools

import jax
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec
from proved_programs import programs_of
from walked_values import walk_of

import towerjax as tj
from towerjax.check import first_call
from towerjax.check.equality import of_step
from towerjax.jaxprs.params import open_jaxpr
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.prover.equality.kinds.kinds import (
    Copy,
    Size,
    Unknown,
    Zero,
    copy,
)
from towerjax.prover.equality.one_tower import Given
from towerjax.prover.equality.rules.rules import RULES
from towerjax.prover.replication import analysis
from towerjax.prover.replication.marks import ALL, Context, Mark

COPIES = Copy | Zero | Size


def not_replicated(programs, inputs, axes, padded):
    """The primitives of copies that are not replicated, and how many copies are."""
    walk = walk_of(programs, inputs, axes, padded)
    if walk is None:
        return [], 0
    body = open_jaxpr(programs[0].jaxpr)
    same = {Given.REPLICATED, Given.MICRO_BATCH}
    same |= set() if padded else {Given.VALID}
    marks = [Mark() if x in same else Mark(ALL, str(x)) for x in inputs]
    context = Context(DEVICE_AXIS, programs[0].towers, [])
    _, marked = analysis._propagate(body, marks, context)
    kinds = walk.kinds[id(body)]
    odd = []
    count = 0
    for eqn in body.eqns:
        for v in eqn.outvars:
            if v not in kinds or v not in marked or not isinstance(kinds[v], COPIES):
                continue
            count += 1
            if marked[v].along:
                odd.append(eqn.primitive.name)
    return odd, count


def judged(decks, most=None):
    """All programs of some decks: copies that are not replicated, and the number."""
    odd = collections.Counter()
    total = 0
    for deck, padded in itertools.product(decks, (False, True)):
        for program in itertools.islice(programs_of(*deck, padded), most):
            found, count = not_replicated(*program[1:])
            odd.update(found)
            total += count
    return odd, total


SOME = [("right", "audited_losses"), ("wrong", "audited_losses")]
ALL_DECKS = [
    *[("right", x) for x in ("known_wrong", "audited_losses", "grid", "models")],
    *[("wrong", x) for x in ("known_wrong", "audited_losses", "models")],
]


@pytest.mark.slow
def test_a_copy_is_replicated():
    odd, total = judged(SOME, most=3)
    assert total > 50 and not odd


@pytest.mark.slow
@pytest.mark.parametrize("deck", ALL_DECKS, ids="-".join)
def test_a_copy_is_replicated_in_all_decks(deck):
    odd, total = judged([deck])
    assert total > 20 and not odd


def as_copy(rule):
    """A planted fault: the rule calls what it finds a copy."""

    def wrong(pair, *ins):
        found = rule(pair, *ins)
        each = found if isinstance(found, list) else [found]
        each = [x if isinstance(x, Unknown) else copy(x.power) for x in each]
        return each if isinstance(found, list) else each[0]

    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reduce_sum", "dot_general", "mul", "axis_index"])
def test_a_rule_that_calls_all_a_copy_is_seen(name, monkeypatch):
    """Also of the number of a tower, and of sums over rows."""
    faulty = [x._replace(rule=as_copy(x.rule)) for x in RULES[name]]
    monkeypatch.setitem(RULES, name, faulty)
    odd, _ = judged([("right", "known_wrong")], most=12)
    assert odd[name]


# An error of a proof's own code.

FOUR = tj.Mirrored(("cpu:0",), towers=4)
X = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
PARAMS = {"w": np.float32([0.5, -1.0, 2.0])}


def broken(*_, **__):
    raise KeyError("planted")


def in_a_loop(params, batch, tower):
    _, predicted = lax.scan(lambda c, x: (c, x @ params["w"]), 0.0, batch)
    return tj.Weighted.mean(predicted**2, tower.weight)


def unproved():
    step = tj.build_train_step(in_a_loop, optax.sgd(0.1), FOUR)
    return step.check(PARAMS, jax.ShapeDtypeStruct(X.shape, X.dtype)).unproved


@pytest.mark.parametrize("where", [of_step, first_call])
def test_an_error_of_the_second_proof_leaves_the_step_unknown(monkeypatch, where):
    names = {of_step: "_why_not_traced", first_call: "per_tower_values_read"}
    monkeypatch.setattr(where, names[where], broken)
    [why] = unproved().values()
    assert why == "the proof failed with KeyError: 'planted'; please report this"


@pytest.mark.slow
def test_an_error_of_the_first_proof_leaves_the_step_unknown(monkeypatch):
    assert unproved() == {}
    monkeypatch.setitem(analysis._RULES, "scan", broken)
    [why] = unproved().values()
    assert "equal values failed with KeyError: 'planted', at" in why
    assert "test_two_proofs.py" in why and "please report this" in why


def test_nothing_is_said_of_a_program_whose_proof_raises_an_error(monkeypatch):
    def make(devices):
        mesh = jax.sharding.Mesh(np.array(devices), ("i",))
        rows = PartitionSpec("i")

        def total(x):
            return lax.psum(lax.scan(lambda c, x: (c + x, None), x[0], x)[0], "i")

        fn = jax.shard_map(
            total, mesh=mesh, in_specs=rows, out_specs=PartitionSpec(), check_vma=False
        )
        return jax.jit(fn), (X[:8],)

    said = "1 results are the same"
    assert said in str(tj.testing.prove(make, devices=(1, 2)))
    monkeypatch.setitem(analysis._RULES, "scan", broken)
    report = str(tj.testing.prove(make, devices=(1, 2)))
    assert said not in report and "failed with KeyError" in report
