"""Each example counts once: by a sum of counts in a step, and by each tower's own."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj

N = 37


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params["w"] - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight)


def counts_of(batch, tower):
    is_example = (tower.weight > 0).astype(jnp.float32)
    return jnp.zeros(N).at[batch["id"]].add(is_example)


def tower_fn(state, batch, tower):
    loss, grads = tj.value_and_grad(loss_fn)(state.params, batch, tower)
    counts = tj.Sum(counts_of(batch, tower))
    return {"loss": loss, "grads": grads, "counts": counts}


def update_fn(state, merged):
    grads = merged["grads"].value
    params = {"w": state.params["w"] - 0.1 * grads["w"]}
    extra = state.extra + merged["counts"].value
    state = dataclasses.replace(state, params=params, extra=extra)
    return state, {"loss": merged["loss"]}


def loss_with_counts(params, batch, tower):
    counts = tower.local["counts"] + counts_of(batch, tower)
    return tj.TowerOutput(loss_fn(params, batch, tower), local={"counts": counts})


def make_data(seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(N, 3)), rng.normal(size=N)
    return {"x": np.float32(x), "y": np.float32(y), "id": np.arange(N)}


def devices(count, towers=8, **options):
    return tj.Mirrored([f"cpu:{i}" for i in range(count)], towers=towers, **options)


WAYS = ("summed", "by each tower")


@functools.cache
def step_of(way, strategy, **options):
    """A step, whose programs all tests share."""
    options = {"remainder": "pad", **options}
    if way == "summed":
        return tj.build_step(tower_fn, update_fn, strategy, **options)
    optimizer = optax.sgd(0.1)
    return tj.build_train_step(loss_with_counts, optimizer, strategy, **options)


def build(way="summed", strategy=None, **options):
    step = step_of(way, strategy or devices(1), **options)
    params = {"w": np.array([0.5, -1.0, 2.0], np.float32)}
    none = np.zeros(N, np.float32)
    if way == "summed":
        return step, step.init(params, extra=none)
    local = {"counts": tj.TowerLocal(none, tj.Reduction.SUM)}
    return step, step.init(params, local=local)


def seen_by(state):
    if state.extra is not None:
        return np.asarray(state.extra)
    return np.asarray(tj.towers.read_local(state.local)["counts"])


PACKED = tj.collectives.Packed(num_packs=2)
STRATEGIES = {
    "4 towers on 2": devices(2, 4, cross_tower_ops=PACKED),
    "pmap scan": devices(2, 4, local="scan", executor="pmap"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "way"), [*zip(STRATEGIES, WAYS, strict=True)], ids=lambda x: x
)
def test_each_example_counts_once(name, way):
    micro_batches = 2 if name == "pmap scan" else 1
    step, state = build(way, STRATEGIES[name], micro_batches=micro_batches)
    before = np.asarray(state.params["w"])
    cut = tj.batches(make_data(), 16, epochs=2, seed=1)  # two of 16, one of 5; twice
    state, _ = tj.run(step, state, cut, progress=False)
    np.testing.assert_array_equal(seen_by(state), 2)
    assert (np.asarray(state.params["w"]) != before).all()


@pytest.mark.slow
def test_a_refused_step_has_not_seen_its_examples():
    step, state = build(on_nonfinite="skip")
    data = make_data()
    data["y"][18] = np.nan
    cut = list(tj.batches(data, 8))
    cut += [cut[0], cut[0]]
    state, history = tj.run(step, state, cut, progress=False)
    assert history.skipped == (3,)
    expected = np.ones(N)
    expected[16:24], expected[:8] = 0, 3
    np.testing.assert_array_equal(seen_by(state), expected)


@pytest.mark.slow
def test_a_tower_without_examples_has_no_part_in_the_mean_of_towers():
    step = tj.build_train_step(
        lambda w, batch, tower: 3 * w,
        optax.sgd(0.5),
        tj.Mirrored(towers=2),
        remainder="pad",
        loss_reduction=tj.Reduction.MEAN,
    )
    state, metrics = step(step.init(np.float32(1)), np.ones(1, np.float32))
    assert float(metrics["loss"]) == 3 and float(state.params) == 1 - 0.5 * 3
