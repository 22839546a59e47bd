"""An error that a proof itself raises refuses no step: the step is unknown."""

import jax
import numpy as np
import optax
import pytest
from audits import BATCH, PARAMS
from jax import lax
from jax.sharding import PartitionSpec

import towerjax as tj
from towerjax.check import first_call
from towerjax.check.equality import of_step
from towerjax.prover.replication import analysis

FOUR = tj.Mirrored(("cpu:0",), towers=4)
SHAPES = {
    name: jax.ShapeDtypeStruct((12, *x.shape[1:]), x.dtype) for name, x in BATCH.items()
}


def broken(*_, **__):
    raise KeyError("planted")


def in_a_loop(params, batch, tower):
    _, predicted = lax.scan(lambda c, x: (c, x @ params["w"]), 0.0, batch["x"])
    return tj.Weighted.mean((predicted - batch["y"]) ** 2, tower.weight)


def unproved():
    step = tj.build_train_step(in_a_loop, optax.sgd(0.1), FOUR)
    return step.check(PARAMS, SHAPES).unproved


@pytest.mark.parametrize("where", [of_step, first_call])
def test_an_error_of_the_second_proof_leaves_the_step_unknown(monkeypatch, where):
    names = {of_step: "_why_not_traced", first_call: "per_tower_values_read"}
    monkeypatch.setattr(where, names[where], broken)
    [why] = unproved().values()
    assert why == "the proof failed with KeyError: 'planted'; please report this"


def test_an_error_of_the_first_proof_leaves_the_step_unknown(monkeypatch):
    assert unproved() == {}
    monkeypatch.setitem(analysis._RULES, "scan", broken)
    [why] = unproved().values()
    assert "equal values failed with KeyError: 'planted', at" in why
    assert "test_faults.py" in why and "please report this" in why


def test_nothing_is_said_of_a_program_whose_proof_raises_an_error(monkeypatch):
    def make(devices):
        mesh = jax.sharding.Mesh(np.array(devices), ("i",))
        rows = PartitionSpec("i")

        def total(x):
            return lax.psum(lax.scan(lambda c, x: (c + x, None), x[0], x)[0], "i")

        fn = jax.shard_map(
            total, mesh=mesh, in_specs=rows, out_specs=PartitionSpec(), check_vma=False
        )
        return jax.jit(fn), (BATCH["x"][:8],)

    said = "1 results are the same"
    assert said in str(tj.testing.prove(make, devices=(1, 2)))
    monkeypatch.setitem(analysis._RULES, "scan", broken)
    report = str(tj.testing.prove(make, devices=(1, 2)))
    assert said not in report and "failed with KeyError" in report
