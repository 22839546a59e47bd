"""The proof reads the programs that run: a branch on the number of rows is seen."""

import jax.numpy as jnp
import numpy as np
import optax
import proved_models
import pytest

import towerjax as tj

PARAMS = {"w": np.float32([1, 2, 3])}
WEIGHTS = np.arange(1.0, 17, dtype=np.float32)


def batch_of(rows, width=3):
    draw = np.random.default_rng(rows)
    x = draw.normal(size=(rows, width)).astype(np.float32)
    return {"x": x, "y": draw.normal(size=rows).astype(np.float32)}


def errors_of(params, batch):
    return (batch["x"][:, :3] @ params["w"] - batch["y"]) ** 2


def ranked(values):
    """The values in order, times their ranks: no function of each row alone."""
    return jnp.sort(values) * jnp.arange(len(values), dtype=values.dtype)


def loss_of(change):
    """A mean of errors that a function of the tower's own errors changes."""

    def loss_fn(params, batch, tower):
        errors = change(errors_of(params, batch))
        return tj.Weighted.mean(errors, tower.weight)

    return loss_fn


def deviation_of_groups(errors):
    """StyleGAN's deviation within a mini-batch, in groups of 8 where 8 divides it."""
    groups = 8 if len(errors) % 8 == 0 else 1
    deviation = jnp.sqrt(jnp.var(errors.reshape(groups, -1), axis=0) + 1e-8)
    return errors + deviation.mean()


def pairs_of_columns(errors):
    """Each two values of a table with two columns, read column by column."""
    table = jnp.stack([errors, 2 * errors + 1], axis=1)
    return table.reshape(-1, order="F").reshape(-1, 2)


def of_pairs(params, batch, tower):
    """The differences of neighbours, without the last row of an odd number."""
    errors = errors_of(params, batch)
    end = len(errors) // 2 * 2
    both = tower.weight[:end:2] * tower.weight[1:end:2]
    total = jnp.abs(errors[:end:2] - errors[1:end:2]) @ both
    return tj.Weighted(total, tower.weight.sum())


BRANCHES = {
    "a number": lambda e: ranked(e) if e.shape[0] == 16 else e,
    "a multiple": lambda e: ranked(e) if len(e) % 8 == 0 else e,
    "a shape": lambda e: e * WEIGHTS if WEIGHTS.shape == e.shape else e,
    "a table": lambda e: e * {16: 2.0}.get(len(e), 1.0),
    "a tuple": lambda e: ranked(e) if len(e) in (4,) else e,
    "groups of 8": deviation_of_groups,
    "one row": lambda e: 2 * e if len(e) == 1 else e,
    "more than 5": lambda e: 2 * e if len(e) > 5 else e,
    "at least 60": lambda e: 2 * e if len(e) >= 60 else e,
    "columns first": lambda e: pairs_of_columns(e).prod(1),
}
ONE_ROW = {
    "a factor": lambda e: e * {1: 2.0}.get(len(e), 1.0),
    "a factor of two rows": lambda e: e * {1: 3.0, 2: 2.0}.get(len(e), 1.0),
    "operands": lambda e: (e - 1) ** 3 if len(e) > 1 else (1 - e) ** 3,
    "a line": lambda e: jnp.sin(e) if len(e) == 1 else jnp.cos(e),
    "an argument": lambda e: jnp.clip(e, 0.0, 1.0 if len(e) == 1 else 2.0),
    "an axis": lambda e: e * jnp.ones((2, 3)).sum(0 if len(e) == 1 else 1)[0],
    "an index": lambda e: e * jnp.arange(1.0, 4)[int(len(e) == 1)],
    "a power": lambda e: jnp.power(e, 1 if len(e) == 1 else 2),
    "the rows": lambda e: e * len(e),
    "a table": lambda e: (
        e * jnp.take_along_axis(e[:, None], jnp.zeros((len(e), 1), int), 1)[:, 0]
        if len(e) > 1
        else e
    ),
}
CASES = [
    # what the branch asks for, rows of the batch, towers, remainder
    *[(name, 16, 4, "error") for name in [*BRANCHES][:6]],
    *[(name, 16, 4, "pad") for name in [*BRANCHES][:6]],
    ("one row", 4, 4, "error"),
    ("one row", 4, 4, "pad"),
    ("more than 5", 15, 3, "error"),
    ("at least 60", 61, 8, "pad"),
    ("columns first", 12, 4, "error"),
]


def step_of(loss_fn, towers, remainder, **options):
    strategy = tj.Mirrored(("cpu:0",), towers=towers)
    how = {"remainder": remainder, **options}
    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **how)


def run(loss_fn, towers, batch, remainder):
    """The loss when it runs, whatever the proof says."""
    step = step_of(loss_fn, towers, remainder, audit=False)
    return float(step(step.init(PARAMS), batch)[1]["loss"])


def is_proved(step, batch):
    try:
        return step.check(step.init(PARAMS), batch).unproved == {}
    except tj.ReplicationError:
        return False


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name, rows, towers, remainder", CASES)
def test_a_branch_on_the_number_of_rows_is_not_proved(name, rows, towers, remainder):
    loss_fn = loss_of(BRANCHES[name])
    batch = batch_of(rows)
    alone = run(loss_fn, 1, batch, remainder)
    assert abs(run(loss_fn, towers, batch, remainder) - alone) > 0.05 * abs(alone)
    assert not is_proved(step_of(loss_fn, towers, remainder), batch)


@pytest.mark.slow
def test_pairs_of_a_padded_batch_are_not_proved():
    batch = batch_of(13)
    assert not is_proved(step_of(of_pairs, 4, "pad"), batch)
    full = step_of(of_pairs, 4, "error")
    assert not is_proved(full, batch_of(16))  # pairs are not known as such


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_ROW)
@pytest.mark.parametrize("remainder", ["error", "pad"])
def test_a_branch_on_one_row_is_not_proved(name, remainder):
    loss_fn = loss_of(ONE_ROW[name])
    batch = batch_of(4)
    alone = run(loss_fn, 1, batch, remainder)
    assert abs(run(loss_fn, 4, batch, remainder) - alone) > 1e-3 * abs(alone)
    assert not is_proved(step_of(loss_fn, 4, remainder), batch)


@pytest.mark.slow
@pytest.mark.parametrize("remainder", ["error", "pad"])
def test_towers_of_one_row_are_proved_where_jax_alone_takes_another_way(remainder):
    def loss_fn(params, batch, tower):
        scores = batch["x"] * params["w"][None]
        label = jnp.abs(batch["y"]).astype(jnp.int32) % 3
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, label)
        return tj.Weighted.mean(losses, tower.weight)

    assert is_proved(step_of(loss_fn, 4, remainder), batch_of(4))


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("rows", [16, 15, 13, 8, 5, 4, 3, 2])
@pytest.mark.parametrize("remainder", ["error", "pad"])
def test_a_mean_is_proved_for_any_number_of_examples(rows, remainder):
    if remainder == "error" and rows % 4:
        return
    loss_fn = loss_of(jnp.sqrt)
    step = step_of(loss_fn, 4, remainder)
    assert is_proved(step, batch_of(rows))


@pytest.mark.slow
def test_a_second_shape_of_batches_is_proved_by_itself():
    def loss_fn(params, batch, tower):
        errors = errors_of(params, batch)
        is_wide = batch["x"].shape[-1] == 5
        return tj.Weighted.mean(ranked(errors) if is_wide else errors, tower.weight)

    step = step_of(loss_fn, 4, "error", max_programs=3)
    state, _ = step(step.init(PARAMS), batch_of(16))
    assert step.unproved == {}
    with pytest.raises(
        tj.testing.SplitError,
        match="The proof stopped: no rule for the tower.s rows in another order",
    ):
        step(state, batch_of(16, width=5))
    state, _ = step(state, batch_of(16, width=4))  # it was not lost
    assert step.unproved == {}


@pytest.mark.slow
def test_another_number_of_examples_in_a_padded_batch_is_proved_by_itself():
    def loss_fn(params, batch, tower):
        errors = errors_of(params, batch)
        is_odd = len(errors) == 13  # of one tower that has all examples
        return tj.Weighted.mean(2 * errors if is_odd else errors, tower.weight)

    step = step_of(loss_fn, 4, "pad")
    state, _ = step(step.init(PARAMS), batch_of(16))
    state, _ = step(state, batch_of(15))
    assert step.unproved == {} and step.checked.examples == (16, 15)
    text = "not proved equal to one tower: loss .the program differs between numbers"
    with pytest.warns(UserWarning, match=text):
        state, _ = step(state, batch_of(13))
    state, _ = step(state, batch_of(13))  # it is said once


@pytest.mark.slow
def test_many_numbers_of_examples_are_proved_and_it_is_said_when_no_more_are():
    step = step_of(loss_of(jnp.sqrt), 4, "pad")
    state = step.init(PARAMS)
    for rows in (16, 15, 14, 13, 12, 11, 10, 9):
        state, _ = step(state, batch_of(rows))
    text = "proved for batches of 9, 10, .* 16 examples; batches of 7 and of other"
    with pytest.warns(UserWarning, match=text):
        state, _ = step(state, batch_of(7))
    state, _ = step(state, batch_of(6))  # it is said once


@pytest.mark.slow
def test_a_first_call_traces_the_function_once_more():
    calls = []

    def loss_fn(params, batch, tower):
        calls.append(len(batch["y"]))
        return tj.Weighted.mean(errors_of(params, batch), tower.weight)

    step = step_of(loss_fn, 4, "error")
    state, _ = step(step.init(PARAMS), batch_of(16))
    assert calls == [4, 16]
    step(state, batch_of(16))
    assert calls == [4, 16]


@pytest.mark.slow
def test_a_micro_batch_of_one_row_takes_the_path_of_one_with_two():
    """A micro-batch is traced by the proof for both, whatever the step has traced."""
    model = proved_models.RIGHT["bert"]()
    step = step_of(model.loss_fn, 2, "error", micro_batches=2)
    assert step.check(step.init(model.params), model.batch).unproved == {}
