"""Audits of each kind of step, and of each command: who is audited and what is told."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from audited_losses import BATCH as ROWS
from audited_losses import PARAMS as MODEL
from audited_losses import (
    RIGHT,
    WRONG,
    errors,
    scores,
)
from audits import BATCH, FIRST, MEAN, PARAMS, SUM, mean_loss, refused, train_step

import towerjax as tj
from towerjax.check.audit.run_towers import _local_of
from towerjax.check.equality.told import NotProved
from towerjax.prover.comparison import (
    Finding,
)
from towerjax.testing import SplitError, assert_replicates
from towerjax.towers.row_free_keys import ALL_TOWERS, row_free_key


@pytest.mark.slow
def test_bad_arguments_are_refused():
    for wrong, options in {
        "whole number >= 1": {"towers": (0,)},
        "padding='no' must be": {"padding": "no"},
        "permuted=2 must be": {"permuted": 2},
        "must be a number >= 0": {"rtol": -1.0},
        "towers=3 must be a list of one or more whole numbers": {"towers": 3},
        "one of None, Reduction.SUM": {"loss_reduction": FIRST},
        "must have a floating|floating": {"params": {"w": np.arange(3), "b": 1}},
    }.items():
        args = {"params": PARAMS, "batch": BATCH, "towers": (3,), **options}
        with pytest.raises(ValueError, match=wrong):
            assert_replicates(mean_loss, **args)


def mean_of_means(params, batch, tower):
    own = tj.Weighted.mean(errors(params, batch), tower.weight)
    return tj.Weighted(own.value, 1.0)


def mean_of_finite_means(params, batch, tower):
    own = mean_of_means(params, batch, tower).value
    return tj.Weighted(jnp.nan_to_num(own), 1.0)


@pytest.mark.slow
def test_uneven_towers_are_compared_where_batches_are_padded():
    even = train_step(mean_of_finite_means)
    even.audit(even.init(MODEL), ROWS)
    uneven = train_step(mean_of_finite_means, remainder="pad")
    text = "agree if they have equally many rows"
    _, found = refused(uneven.audit, uneven.init(MODEL), ROWS, text=text)
    own = np.asarray(errors(MODEL, ROWS), float)
    loss = found["loss"]
    # Six rows and three of the nine first ones, and all nine.
    np.testing.assert_allclose(loss.value, (own[:6].mean() + own[6:9].mean()) / 2, 1e-5)
    np.testing.assert_allclose(loss.one_tower, own[:9].mean(), 1e-5)


@pytest.mark.slow
def test_micro_batches_are_audited_as_towers_are():
    step = train_step(WRONG["sum_with_weight_1"], tj.OneDevice(), micro_batches=3)
    _, found = refused(step.audit, step.init(MODEL), ROWS, text="on 2 towers")
    own = np.asarray(errors(MODEL, ROWS), float)
    np.testing.assert_allclose(found["loss"].one_tower, own[:12].sum(), 1e-5)


@pytest.mark.slow
def test_one_tower_needs_no_audit_unless_it_is_asked_for():
    step = train_step(mean_of_means, tj.OneDevice())
    state, _ = step(step.init(MODEL), ROWS)
    assert not step.is_audited
    step.audit(state, ROWS)
    first = jax.tree.map(lambda x: x[:1], ROWS)
    with pytest.raises(ValueError, match="but the batch has 1. Give at least 2"):
        step.audit(state, first)


@pytest.mark.slow
@pytest.mark.parametrize("tower_loop", ["vmap", "scan"])
def test_evaluations_predictions_and_towers_in_turn_are_audited(tower_loop):
    def metric_fn(params, batch, tower):
        own = errors(params, batch)
        return {
            "right": tj.Weighted.mean(own, tower.weight),
            "wrong": tj.Weighted((own * tower.weight).sum(), 1.0),
        }

    def predict_fn(params, batch, tower):
        own = scores(params, batch)
        return {"right": own, "wrong": jnp.cumsum(own)}

    strategy = tj.Mirrored(towers=4, tower_loop=tower_loop)
    evaluate = tj.build_eval_step(metric_fn, strategy, audit=True)
    assert [*refused(evaluate, MODEL, ROWS)[1]] == ["metrics['wrong']"]
    predict = tj.build_predict_step(predict_fn, strategy)
    assert [*refused(predict.audit, MODEL, ROWS)[1]] == ["predictions['wrong']"]


@pytest.mark.slow
def test_predictions_by_the_number_of_a_tower_are_not_called_a_sum():
    def predict_fn(params, batch, tower):
        return scores(params, batch) * (1 + tower.id)  # twice as much on the second

    predict = tj.build_predict_step(predict_fn, tj.Mirrored(towers=4))
    text = "no rule for a replicated value added to tower.id, at tests/"
    error, found = refused(predict, MODEL, ROWS, text=text)
    assert [*found] == ["predictions"] and "wice" not in str(error)


def model_of(loss_fn, optimizer, **options):
    def model_fn(variables, features, labels, mode, tower):
        def loss_of(params):
            return loss_fn(params, features, tower)

        loss, train_op = optimizer.minimize(loss_of, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    devices = tj.Mirrored(towers=4)
    return tj.estimator.replicate_model_fn(model_fn, devices=devices, **options)


@pytest.mark.slow
def test_a_model_function_is_audited():
    optimizer = tj.estimator.TowerOptimizer(optax.adam(0.1))
    features = ROWS
    mode = tj.estimator.Mode.TRAIN
    state = tj.TrainState.create(MODEL, optimizer)
    model = model_of(WRONG["cumsum_along_rows"], optimizer, audit=True)
    _, found = refused(model, model.init(state), features, None, mode, text="gradient")
    assert "loss" in found
    model = model_of(RIGHT["plain_mean"], optimizer)
    step = model.train_step(audit=True)
    state, _ = step(model.init(state), {"features": features})
    assert step.unproved == {} and int(state.step) == 1
    model = model_of(RIGHT["plain_mean"], optimizer, audit=True, compat="tf1")
    with pytest.raises(NotProved, match="compat='tf1' divides by the number of"):
        model(state, features, None, mode)
    model = model_of(RIGHT["plain_mean"], optimizer, compat="tf1")
    with pytest.warns(UserWarning, match="not proved .* compat='tf1' divides"):
        model(state, features, None, mode)


@pytest.mark.slow
def test_a_placed_batch_and_its_shared_values_are_audited():
    def loss_fn(params, batch, tower):
        scale = batch["scale"]["all"]
        return tj.Weighted.mean(scale * errors(params, batch), tower.weight)

    batch = {**ROWS, "scale": {"all": tj.Whole(np.float32(2))}}
    step = train_step(loss_fn, audit=False, remainder="pad")
    state = step.init(MODEL)
    short = jax.tree.map(lambda x: x[:22] if np.ndim(x) else x, batch)
    for given in (batch, step.place_batch(short)):
        report = step.audit(state, given)
        assert report.examples == 12 and report.largest < 1e-5


@pytest.mark.slow
def test_what_depends_on_the_towers_by_design_is_left_out():
    class Towers(tj.metrics.Additive):
        counts_towers = True
        number: jax.Array

        def compute(self):
            return self.number

    def loss_fn(params, batch, tower):
        loss = tj.Weighted.mean(errors(params, batch), tower.weight)
        return tj.TowerOutput(loss, {"towers": Towers(jnp.float32(1))})

    step = train_step(loss_fn, audit=False)
    state = step.init(MODEL)
    assert step.audit(state, ROWS).largest < 1e-5
    assert float(step(state, ROWS)[1]["towers"]) == step.strategy.num_towers


@pytest.mark.slow
def test_local_and_extra_state_of_towers_that_have_gone_on_are_audited():
    def loss_fn(params, batch, tower):
        count = tower.local["count"] + tower.weight.sum()
        mean = tj.Weighted.mean(batch["x"][:, 0], tower.weight).value
        local = {"count": count, "mean": 0.5 * (tower.local["mean"] + mean)}
        local["own"] = tower.local["own"] + 1
        extra = tj.Weighted.mean(batch["x"][:, 1] + tower.extra, tower.weight)
        loss = RIGHT["plain_mean"](params, batch, tower)
        return tj.TowerOutput(loss, {}, local, extra)

    local = {
        "count": tj.TowerLocal(np.float32(0), SUM),
        "mean": tj.TowerLocal(np.float32(1), MEAN),
        "own": tj.TowerLocal(np.float32(1), tj.Reduction.NONE),
    }
    step = train_step(loss_fn, audit=False)
    state = step.init(MODEL, local=local, extra=np.float32(1))
    state, _ = step(state, ROWS)
    report = step.audit(state, ROWS)
    assert {"extra", "local['count']", "local['mean']"} <= {*report.compared}
    assert report.not_compared == ("local['own']",)


def test_each_of_two_towers_has_its_own_variables_and_one_has_both():
    own = [tj.TowerLocal(np.float32([1, 2]), x) for x in (SUM, tj.Reduction.NONE)]
    state = tj.TrainState.create(PARAMS, optax.sgd(0.1), local=own)
    for number, expected in (2, [[1, 2], [1, 2]]), (1, [[3], [1]]):
        local = _local_of(state.local, number)
        assert [x.value.tolist() for x in local] == expected


@pytest.mark.slow
def test_a_run_goes_on_without_an_audit_where_it_is_told_to():
    data = tj.batches(ROWS, 8, epochs=2)
    wrong = train_step(WRONG["cumsum_along_rows"], audit=None)
    error, _ = refused(tj.run, wrong, wrong.init(MODEL), data)
    state, history = tj.run(wrong, error.state, error.batches, audit=False)
    assert history.metrics["loss"].shape == (6,)
    again = tj.batches(ROWS, 8)
    refused(tj.run, wrong, wrong.init(MODEL), again, audit=True)


def test_audit_is_one_of_three():
    step = train_step(mean_of_means, audit=None)
    with pytest.raises(ValueError, match="audit=2 must be"):
        tj.run(step, step.init(MODEL), tj.batches(ROWS, 8), audit=2)
    with pytest.raises(ValueError, match="audit=1 must be"):
        train_step(mean_of_means, audit=1)


@pytest.mark.slow
def test_keys_draw_the_same_for_all_rows_but_not_twice():
    @jax.jit
    def draw():
        key = row_free_key(0x45A319E6)
        first, second = jax.random.split(key)
        folded = jax.vmap(lambda i: jax.random.normal(jax.random.fold_in(key, i)))
        shared = jax.random.fold_in(jax.random.fold_in(key, 7), ALL_TOWERS)
        alike = jax.random.fold_in(row_free_key(2, shared=False), ALL_TOWERS)
        normal = jax.random.normal
        same = [normal(key, (2, 3)), normal(alike, (9,))]
        apart = [normal(shared, (9,)), normal(jax.random.split(shared)[1], (9,))]
        bits = [jax.random.bits(key, (3,), f"uint{n}") for n in (8, 16, 32)]
        once = [jax.random.uniform(x) for x in (first, second, key)]
        return same, apart, bits, once, folded(jnp.arange(3))

    same, apart, bits, (first, second, whole), folded = jax.tree.map(np.asarray, draw())
    assert [np.unique(x).size for x in [*same, *apart, *bits]] == [1, 1, 9, 9, 1, 1, 1]
    assert first == second != whole and all(x[0] >> 4 > 0 for x in bits)
    assert np.array_equal(folded, same[0].ravel()[:3])


# The command.

PROGRAM = """
import numpy as np
import optax
import towerjax as tj

def good(params, batch, tower):
    return tj.Weighted.mean(params["w"] * batch["x"], tower.weight)

def bad(params, batch, tower):
    return tj.Weighted((params["w"] * batch["x"] * tower.weight).sum(), 1.0)

def made(loss_fn):
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=4))
    batch = {"x": np.arange(12, dtype=np.float32)}
    return step, step.init({"w": np.float32(2)}), batch

def make_good():
    return made(good)

def make_bad():
    return made(bad)
"""


@pytest.mark.slow
def test_the_command_says_what_is_wrong(shell):
    code, out, _ = shell("audit", "of_user:make_good", "--json")
    assert code == 0 and json.loads(out)["same"] and json.loads(out)["towers"] == [2]
    assert json.loads(out)["unproved"] == {}
    code, out, _ = shell("audit", "of_user:make_bad", "--json")
    found = json.loads(out)
    assert code == 1 and not found["same"]
    assert {"loss"} == {x["leaf"] for x in found["findings"]}
    code, out, _ = shell("audit", "of_user:make_bad")
    assert code == 1 and "tj.Weighted.mean(" in out


def test_how_many_leaves_depend_is_said():
    one = Finding("loss", 2, "evenly", 1.0, 2.0, 1.0, 0.5)
    assert str(SplitError([one])).startswith("1 leaf depends on how the batch is split")
    assert str(SplitError([one, one])).startswith("2 leaves depend on how the batch is")


def test_the_command_refuses_wrong_arguments(shell):
    for wrong, name in {
        "of the form module:name": "of_user.good",
        "'.of_user:good' is not of the form": ".of_user:good",
        "has no attribute 'better'": "of_user:better",
        "No module named 'of_nobody'": "of_nobody:good",
        "cannot be called as good()": "of_user:good",
    }.items():
        code, _, error = shell("audit", name)
        assert code == 2 and wrong in error, error
