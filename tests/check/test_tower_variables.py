"""No tower-local variable switches a refusal off, or hides what a later step shows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from audits import BATCH, PARAMS, losses, predictions, refused

import towerjax as tj

# A call that is not refused is no error of the call, but of the test.
pytestmark = pytest.mark.filterwarnings("ignore:(?s)not proved")

FOUR = tj.Mirrored(("cpu:0",), towers=4)
OWN = "If each tower's own statistics are meant, write audit=False."
ROWS = {name: x[:12] for name, x in BATCH.items()} | {"id": np.arange(12)}
CODES = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)


def first_call(loss_fn, local=None, towers=FOUR, **options):
    """The state and metrics of a first call, as a user makes it."""
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), towers, **options)
    given = {} if local is None else {"local": local}
    return step(step.init(PARAMS, rng=jax.random.key(0), **given), ROWS)


def refusal_of(*args, **options):
    with pytest.raises(tj.testing.SplitError) as caught:
        first_call(*args, **options)
    return caught.value


def centred(params, batch, tower):
    own = losses(params, batch)
    return tj.Weighted.mean(own * (own - own.mean()), tower.weight)


def log_of_a_mean(params, batch, tower):
    own = losses(params, batch)
    return tj.Weighted.mean(jnp.log(own.mean()) * own, tower.weight)


def one_key_for_all(params, batch, tower):
    noise = jax.random.normal(jax.random.key(1), batch["y"].shape)
    return tj.Weighted.mean(losses(params, batch) * noise, tower.weight)


def sorted_rows(params, batch, tower):
    own = predictions(params, batch) - jnp.sort(batch["y"])
    return tj.Weighted.mean(own**2, tower.weight)


def counted(loss_fn):
    """A loss with a counter that nobody reads."""

    def of_tower(params, batch, tower):
        count = {"n": tower.local["n"] + tower.weight.sum()}
        return tj.TowerOutput(loss_fn(params, batch, tower), local=count)

    return of_tower


WRONG = centred, log_of_a_mean, one_key_for_all, sorted_rows
CASES = [*zip(WRONG, tj.Reduction, strict=True)]


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("loss_fn, reduction", CASES)
def test_a_counter_of_each_tower_leaves_a_refusal_an_error(loss_fn, reduction):
    local = {"n": tj.TowerLocal(np.float32(0), reduction)}
    error = refusal_of(counted(loss_fn), local)
    assert str(error).splitlines()[-1] == OWN


@pytest.mark.slow
def test_own_statistics_train_where_no_audit_is_wanted():
    local = {"n": tj.TowerLocal(np.float32(0), tj.Reduction.SUM)}
    state, _ = first_call(counted(centred), local, audit=False)
    assert state.local["n"].value.tolist() == [3, 3, 3, 3]


@pytest.mark.slow
def test_an_own_batch_norm_is_told_of_the_synchronised_one():
    def loss_fn(params, batch, tower):
        x = batch["x"]
        seen = jax.tree.map(lambda v: 0.9 * v + 0.1 * x.mean(0), tower.local)
        x = (x - x.mean(0)[None]) / jnp.sqrt(x.var(0)[None] + 1e-3)
        loss = tj.Weighted.mean((x @ params["w"] - batch["y"]) ** 2, tower.weight)
        return tj.TowerOutput(loss, local=seen)

    zeros = np.zeros(3, np.float32)
    error = refusal_of(loss_fn, {"mean": tj.TowerLocal(zeros, tj.Reduction.MEAN)})
    told = "TowerBatchNorm", "a mean over the tower's own rows"
    assert all(x in str(error) for x in told)


def quantised(params, batch, tower, codes):
    """The loss by the nearest codes, and the codes moved to the tower's rows."""
    x = batch["x"] * params["w"][None]
    gaps = ((x[:, None] - codes[None]) ** 2).sum(-1)
    nearest = jax.nn.one_hot(gaps.argmin(1), len(codes)) * tower.weight[:, None]
    loss = tj.Weighted.mean(gaps.min(1), tower.weight)
    return loss, nearest.T @ x, nearest.sum(0)[:, None]


def own_codes(params, batch, tower):
    codes = tower.local["codes"]
    loss, sums, counts = quantised(params, batch, tower, codes)
    moved = jnp.where(counts > 0, 0.5 * codes + 0.5 * sums / (counts + 1e-6), codes)
    return tj.TowerOutput(loss, local={"codes": moved})


@pytest.mark.slow
@pytest.mark.parametrize("reduction", [tj.Reduction.MEAN, tj.Reduction.NONE])
def test_a_codebook_of_each_tower_is_refused_after_a_step(reduction):
    error = refusal_of(own_codes, {"codes": tj.TowerLocal(CODES, reduction)})
    assert [x.split for x in error.findings] == ["after a step"]
    assert "tower-local variable" in str(error) and "extra=" in str(error)


@pytest.mark.slow
def test_a_codebook_of_all_rows_trains_the_same_on_any_number_of_towers():
    def loss_fn(params, batch, tower):
        codes = tower.extra["codes"]
        loss, sums, counts = quantised(params, batch, tower, codes)
        sums, counts = tower.reduce(tj.Reduction.SUM, (sums, counts))
        moved = jnp.where(counts > 0, 0.5 * codes + 0.5 * sums / (counts + 1e-6), codes)
        return tj.TowerOutput(loss, extra={"codes": moved})

    found = []
    for towers in (1, 4):
        strategy = tj.Mirrored(("cpu:0",), towers=towers)
        step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
        state = step.init(PARAMS, extra={"codes": CODES})
        for _ in range(10):
            state, _ = step(state, ROWS)
        found.append(np.asarray(state.extra["codes"]))
    np.testing.assert_allclose(*found, rtol=2e-6, atol=1e-6)


@pytest.mark.slow
def test_a_variable_that_a_loss_reads_and_no_row_changes_may_stay():
    def loss_fn(params, batch, tower):
        trips = tower.local["trips"]
        loss = tj.Weighted.mean(losses(params, batch) / (1 + trips), tower.weight)
        return tj.TowerOutput(loss, local={"trips": trips + 1})

    start = tj.TowerLocal(np.float32(0), tj.Reduction.MEAN)
    state, _ = first_call(loss_fn, {"trips": start}, audit=True)
    assert state.local["trips"].value.tolist() == [1, 1, 1, 1]


def masked_for_all_rows(params, batch, tower):
    kept = jax.random.bernoulli(tower.rng, 0.5, (3,))
    own = (batch["x"] @ (params["w"] * kept) - batch["y"]) ** 2
    return tj.Weighted.mean(own, tower.weight)


@pytest.mark.slow
def test_a_sample_of_a_loss_whose_draws_depend_on_the_towers_did_not_agree():
    with pytest.warns(UserWarning, match="not proved") as caught:
        first_call(masked_for_all_rows)
    [text] = [str(x.message) for x in caught]
    assert "A sample agreed" not in text
    assert "Another number of towers draws other numbers" in text


@pytest.mark.slow
def test_a_key_for_each_row_is_not_blamed_for_a_mean():
    def loss_fn(params, batch, tower):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(1), batch["id"])
        noise = jax.vmap(jax.random.normal)(keys)
        own = losses(params, batch)
        return tj.Weighted.mean(jnp.log(own.mean()) * noise**2, tower.weight)

    error = refusal_of(loss_fn)
    assert "log of a mean over the tower's own rows, at" in str(error)
    assert "tower.mean(x, tower.weight)" in str(error)
    assert "key" not in str(error)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), FOUR)
    error, _ = refused(step, step.init(PARAMS), ROWS)  # without a first call
    assert "log of a mean over the tower's own rows, at" in str(error)
