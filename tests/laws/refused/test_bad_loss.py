"""Losses that read no row, count padding, or draw anew by device are refused."""

import functools

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mistaken import FOUR, SUM, TWO, S, build, check, good, loss_fn, on_one, start
from refusals import refused

import towerjax as tj

# Padding, and rows that stand where they are not looked for.


@pytest.mark.slow
def test_padding_that_nothing_masks_is_refused(compiled):
    def careless(params, batch, tower):
        return tj.Weighted.mean((batch["x"] @ params["w"]) ** 2)

    step = build(careless, remainder="pad")
    text = "does not depend on tower.weight"
    state = step.init(start())
    refused(compiled, lambda: step(state, good(5)), text)
    state, _ = step(state, good(6))
    refused(compiled, lambda: step(state, good(5)), text)
    measure = tj.build_eval_step(lambda p, b, t: {"m": tj.Weighted.mean(b["x"])}, S)
    with pytest.raises(ValueError, match=text):
        measure(state, good(5))


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_padding_that_the_other_part_of_a_loss_masks_is_refused(count):
    def careless(params, batch, tower):
        masked = tower.weight * (batch["x"] @ params["w"]) ** 2
        unmasked = batch["x"] ** 2 * params["aux"]
        return tj.Weighted(masked.sum() + unmasked.sum(), tower.weight.sum())

    step = build(careless, tj.Mirrored(TWO[:count], towers=2), remainder="pad")
    params = start(aux=np.float32(1))
    assert step.check(params, good(5)).unmasked() == ["grads.sum['aux']"]


@pytest.mark.parametrize("parts", [1, 2])
def test_padding_that_a_later_micro_batch_is_given_is_refused(parts):
    def careless(params, batch, tower):
        loss = tj.Weighted(params["aux"] * tower.local["seen"], tower.weight.sum())
        return tj.TowerOutput(loss, local={"seen": batch["x"].mean()})

    how = {"micro_batches": parts, "remainder": "pad"}
    step = build(careless, tj.Mirrored(TWO[:1], towers=2), **how)
    local = {"seen": tj.TowerLocal(np.float32(0.5), tj.Reduction.MEAN)}
    proof = step.check(start(aux=np.float32(1)), good(5), local=local)
    expected = ["grads.sum['aux']", "loss.sum"] if parts == 2 else []
    assert proof.unmasked() == expected


@pytest.mark.parametrize("weighted", [True, False])
def test_a_reduction_hides_neither_the_rows_nor_the_mask(weighted):
    def fn(params, batch, tower):
        losses = (batch["x"] @ params["w"]) ** 2
        own = tj.Weighted.mean(losses, tower.weight if weighted else None)
        return tj.Weighted(*tower.reduce(SUM, (own.sum, own.weight)))

    found = check(fn, batch=good(5), remainder="pad")().unmasked()
    assert ("loss.sum" in found) != weighted


@pytest.mark.slow
def test_numbers_of_columns_and_masks_are_not_taken_for_padding():
    class Mean(tj.metrics.Additive):
        total: jax.Array
        count: jax.Array

        def compute(self):
            return self.total / self.count

    def right(params, batch, tower):  # of three columns and of three rows a tower
        columns = tower.weight @ batch["x"]
        metrics = {
            "share": tj.Weighted.mean(tower.weight),
            "columns": tj.Weighted.mean(columns**2),
            "tower": tj.Weighted(columns.sum(), 1.0),
            "none": Mean(columns.sum(), jnp.zeros(0)),  # no element counts a row
        }
        return tj.TowerOutput(loss_fn(params, batch, tower), metrics)

    how = {"remainder": "pad", "audit": False}  # "tower" is a mean over towers
    assert check(right, batch=good(5), **how)().unmasked() == []

    def means(params, batch, tower):
        weight = batch["x"][:, 0] ** 2 * tower.weight
        second = tj.Weighted.mean(batch["x"] @ params["w"], weight)
        return loss_fn(params, batch, tower) + second

    step = build(means, remainder="pad")  # the gradient of z is a complex 0
    assert step.check(start(z=np.complex64(1j)), good(5)).unmasked() == []


def gaps_of(params, batch):  # as where predictions [b] meet labels [b, 1]
    return (batch["x"] @ params["w"])[None] - batch["x"][:, :1]


def column(params, batch, tower):
    return tj.Weighted.mean(gaps_of(params, batch) ** 2, tower.weight)


def unweighted(params, batch, tower):
    return tj.Weighted.mean(jax.checkpoint(gaps_of)(params, batch) ** 2)


def of_a_metric(params, batch, tower):
    gap = tj.metrics.mean(abs(gaps_of(params, batch)), tower.weight)
    return tj.TowerOutput(loss_fn(params, batch, tower), {"gap": gap})


@pytest.mark.slow
@pytest.mark.parametrize("fn, towers, rows, options", [
    (column, 2, 6, {}), (column, 4, 8, {"remainder": "pad"}),
    (column, 2, 8, {"micro_batches": 2}), (unweighted, 4, 8, {"remainder": "pad"}),
    (of_a_metric, 2, 8, {"micro_batches": 2}),
])  # fmt: skip
def test_labels_as_a_column_are_refused(fn, towers, rows, options):
    """Predictions [b] less labels [b, 1] are [b, b], of each tower's rows alone."""
    step = build(fn, on_one(towers), audit=True, **options)
    with pytest.raises(ValueError, match="gap|loss"):
        step(step.init(start()), good(rows))


def features(params, batch, tower):
    return tj.Weighted.mean((batch["x"] * params["w"][None]) ** 2, tower.weight)


def pairs(params, batch, tower):
    x, weight = tower.all_gather((batch["x"], tower.weight), axis=0)
    gaps = (batch["x"] @ params["w"])[:, None] - (x[:, 0] * weight)[None]
    return tj.Weighted.mean(gaps**2, tower.weight)


def of_three_rows(params, batch, tower):
    return features(params, {"x": batch["x"].reshape(3, 3)}, tower)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [features, pairs, of_three_rows])
@pytest.mark.parametrize("towers", [1, 3])
def test_as_many_features_as_rows_are_no_pairs_of_rows(fn, towers):
    check(fn, on_one(towers), good(3 * towers))()


def of_six(params, batch, tower):
    return tj.Weighted(((batch["x"] @ params["w"]) ** 2).sum(), 6)


def of_all_numbers(params, batch, tower):
    squares = (batch["x"] * params["w"][None]) ** 2
    return tj.Weighted(squares.sum(), squares.size)


def of_parameters(params, batch, tower):
    return tj.Weighted.mean(params["w"] ** 2 * batch["x"].mean(0))


def of_means(params, batch, tower):
    return tj.Weighted(((batch["x"] @ params["w"]) ** 2).mean(), 1)


OWN = [(of_six, 1, 6), (of_all_numbers, 3, 6), (of_parameters, 3, 3), (of_means, 6, 6)]


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(("fn", "towers", "rows"), OWN)
def test_weights_that_are_numbers_of_a_towers_own_pass(fn, towers, rows):
    """Also where they are by chance as many as the whole batch has rows."""
    check(fn, on_one(towers), good(rows))()


@pytest.mark.parametrize("rows", [12, 11, 16])
def test_rows_in_another_dim_than_the_first_are_refused(rows):
    """Also where there are as many as of what is first, so that weights would fit."""

    def by_time(params, batch, tower):
        losses = (batch["x"] * params["w"][None]).T ** 2  # [3, b]
        return tj.Weighted.mean(losses, tower.weight)

    text = r"values of shape \(3, \d+\) .*: give jnp.moveaxis\(values, 1, 0\)"
    step = build(by_time, on_one(4), audit=True, remainder="pad")
    with pytest.raises(ValueError, match=text):
        step(step.init(start()), good(rows))


def of_reduced(params, batch, tower):
    rows = tj.Weighted.mean(batch["x"][:, 0], tower.weight)
    mean = tower.reduce(SUM, rows).value
    return tj.Weighted.mean(batch["x"] @ params["w"] * mean, tower.weight)


def of_gathered(params, batch, tower):
    x, weight = tower.all_gather((batch["x"], tower.weight), axis=0)
    return tj.Weighted.mean(batch["x"] @ params["w"] * (weight @ x[:, 0]), tower.weight)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("fn", [of_reduced, of_gathered])
def test_what_micro_batches_tell_each_other_alone_is_warned_of(fn, towers):
    """Such a loss is another one for each number of micro-batches."""
    text = rf"Each of 2 micro-batches calls tower\.\w+ at \S+ \({fn.__name__}\) with"
    with pytest.warns(UserWarning, match=text):
        check(fn, on_one(towers), micro_batches=2)()
    check(fn, on_one(towers))()


@pytest.mark.slow
def test_batch_statistics_are_no_parameters():
    """Floats are trained; a step of SGD would move a mean by its gradient."""
    variables = nn.BatchNorm(False).init(jax.random.key(0), np.ones((2, 3)))
    module = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    for params in (variables, module, nnx.state(module)):
        with pytest.raises(ValueError, match=r"batch statistics, which .*trainable="):
            build().init(params)
    build().init(variables["params"])
    build().init(nnx.state(module, nnx.Param))
    build(trainable={"params": True, "batch_stats": False}).init(variables)


LOST = [
    lambda p, w: w,
    lambda p, w: jax.lax.stop_gradient(p),
    lambda p, w: jnp.float32(p > 0),
    lambda p, w: jax.jit(jnp.round)(p).astype(int),
]


@pytest.mark.slow
@pytest.mark.parametrize("loss_of", LOST)
def test_a_loss_without_a_gradient_is_refused(loss_of):
    """As of a model that a loss function closes over, or of a count of hits."""
    closed_over = np.float32(1)

    def mean(params, batch, tower):
        values = loss_of(params["w"].sum(), closed_over) * batch["x"][:, 0]
        return tj.Weighted.mean(values, tower.weight)

    text = "The loss depends on no parameter, so that every gradient is 0"
    for loss in (mean, lambda *args: mean(*args) + tj.penalty(1.0)):
        with pytest.raises(ValueError, match=text):
            check(loss)()

    def penalised(params, batch, tower):
        return mean(params, batch, tower) + tj.penalty(params["w"].sum())

    check(penalised)()


def of_outside(params, batch, tower):
    """A mean over rows of a notebook, and not of the batch."""
    return tj.Weighted.mean((OUTSIDE @ params["w"]) ** 2)


READS_NO_ROW = {
    "a mean": of_outside,
    "in jit": jax.jit(of_outside),
    "means": lambda *args: of_outside(*args) + 0.1 * of_outside(*args),
    "a penalty": lambda p, b, t: tj.Weighted.mean(0 * t.weight) + tj.penalty(p["w"][0]),
    "only a metric reads": lambda p, b, t: tj.TowerOutput(
        of_outside(p, b, t), {"x": tj.Weighted.mean(b["x"], t.weight[:, None])}
    ),
}
OUTSIDE = np.float32([[1, 2, 3], [4, 5, 6]])
READS = {
    "noise": lambda p, b, t: tj.Weighted.mean(
        jax.random.normal(t.rng, t.weight.shape) * p["w"][0], t.weight
    ),
    "0 * a leaf": lambda *args: 0 * tj.Weighted.mean(args[1]["x"]) + of_outside(*args),
    "a value of all rows": lambda p, b, t: tj.Weighted.mean(
        b["all"] * p["w"][0] * t.weight, t.weight
    ),
}


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", [*READS_NO_ROW, *READS])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=str)
def test_a_loss_that_reads_no_leaf_of_its_batch_is_refused(name, options):
    step = tj.build_train_step(
        (READS_NO_ROW | READS)[name],
        optax.sgd(0.1),
        tj.Mirrored(towers=2),
        **options,
    )
    given = {"w": np.ones(3, np.float32)}
    batch = {"x": np.ones((8, 3), np.float32), "all": tj.Whole(np.float32(2))}
    if name in READS:
        step.check(given, batch)
        return
    with pytest.raises(ValueError, match="The loss reads no leaf of its batch"):
        step.check(given, batch)


@pytest.mark.slow
def test_a_pass_of_an_own_step_that_reads_no_leaf_of_its_batch_is_refused():
    def tower_fn(state, batch, tower):
        loss, grads = tj.value_and_grad(of_outside)(state.params, batch, tower)
        return {"loss": loss, "grads": grads}

    def update_fn(state, merged):
        return state, {"loss": merged["loss"]}

    step = tj.build_step(tower_fn, update_fn, tj.OneDevice())
    with pytest.raises(ValueError, match="The loss reads no leaf of its batch"):
        step(step.init({"w": np.ones(3, np.float32)}), np.ones((4, 3), np.float32))


OWN_ROWS = np.arange(4, dtype=np.float32)


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}, {"remainder": "pad"}])
@pytest.mark.parametrize("of", [np.asarray, jnp.asarray, np.atleast_2d])
def test_a_loss_that_closes_over_an_array_of_one_towers_rows_is_refused(of, options):
    towers = tj.Mirrored(("cpu:0",), towers=4 // options.get("micro_batches", 1))
    labels = of(OWN_ROWS)

    def loss_fn(params, batch, tower):
        predicted = (batch @ params["w"]).reshape(*labels.shape[:-1], -1)
        errors = predicted - labels  # [4] or [1, 4]
        return tj.Weighted.mean(errors.ravel() ** 2, tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), towers, **options)
    text = "works only for batches of 4 rows; does it close over an array of 4 rows"
    with pytest.raises(tj.testing.SplitError, match=text) as error:
        step.check({"w": np.ones(3, np.float32)}, np.ones((16, 3), np.float32))
    assert "a leaf of the batch" in str(error.value)


def _draws(kind):
    """Losses with keys of a kind, and whether the draws depend on the devices."""
    key = functools.partial(jax.random.key, 3, impl=kind)
    own = lambda tower: jax.random.fold_in(key(), tower.id)  # noqa: E731
    return {
        "own": (lambda t, n: jax.random.normal(own(t), n), True),
        "of the step": (lambda t, n: jax.random.uniform(t.rng, n), True),
        "shared": (lambda t, n: jax.random.normal(key(), n), False),
    }


KINDS = [*(("rbg", name) for name in _draws("rbg")), ("unsafe_rbg", "own")]


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", KINDS)
def test_draws_that_depend_on_the_devices_are_refused(kind, name):
    draw, depends = _draws(kind)[name]

    def loss_fn(params, batch, tower):
        noise = draw(tower, batch["x"].shape[:1])
        return tj.Weighted.mean(batch["x"] @ params["w"] * noise)

    key = jax.random.key(0, impl=kind)
    one_each = tj.Mirrored([f"cpu:{i}" for i in range(4)])
    in_turn = tj.Mirrored(TWO, towers=4, tower_loop="scan")
    for strategy in (one_each, in_turn, FOUR):
        step = build(loss_fn, strategy=strategy)
        state = step.init(start(), rng=key)
        if depends and strategy is FOUR:
            with pytest.raises(tj.ReplicationError, match="rbg key .*bad_loss.py"):
                step.check(state, good(8))
        else:
            step.check(state, good(8))
    words = np.arange(16, dtype=np.uint32).reshape(4, 4)
    keys = tj.PerTower(jax.random.wrap_key_data(words, impl="rbg"))
    with pytest.raises(
        tj.ReplicationError, match="tower_loop='scan', or one tower a dev"
    ):
        with_verbs = tj.tf1.with_verbs(FOUR)
        with_verbs.call_for_each_tower(lambda t, k: jax.random.normal(k), keys)
