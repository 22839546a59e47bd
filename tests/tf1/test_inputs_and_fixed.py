"""What of a step is no rows, does not train, or is the same for all towers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import data
from layouts import with_verbs as mirrored

import towerjax as tj
from towerjax.tf1.estimator.train import as_batch

RATE = 0.1


rows = functools.partial(data, features=3)


def start():
    return {"w": np.array([0.5, -1, 2], np.float32)}


def losses_of(w, batch, scale):
    return (batch["x"] @ w * scale - batch["y"]) ** 2


def loss_fn(params, batch, tower):
    losses = losses_of(params["w"], batch, batch["scale"]["by"])
    return tj.Weighted.mean(losses, batch["weight"] * tower.weight)


# tj.Whole: the same on all towers, not split, traced.


@pytest.mark.slow
def test_what_lies_on_the_devices_is_shared_without_a_copy():
    strategy = mirrored(2, 2)
    step = tj.build_train_step(loss_fn, optax.sgd(RATE), strategy)
    scale = step.init({"w": np.float32(2)}).params["w"]
    placed = step.place_batch({**rows(), "scale": tj.Whole({"by": scale})})
    assert placed.args[2][0]["by"] is scale
    donated = step.init(start())

    def teacher(params, batch, tower):
        errors = params["w"].sum() - batch["teacher"]["w"].sum() + batch["x"][:, 0]
        return tj.Weighted.mean(errors**2, tower.weight)

    step = tj.build_train_step(teacher, optax.sgd(RATE), strategy)
    with pytest.raises(ValueError, match="donated.*jnp.copy"):
        step(donated, {**rows(), "teacher": tj.Whole(donated.params)})
    with pytest.raises(ValueError, match=r"but batch\['scale'\]\['by'\] is a str"):
        step(step.init(start()), {**rows(), "scale": tj.Whole({"by": "half"})})


@pytest.mark.slow
def test_a_function_of_a_placed_batch_is_given_what_its_towers_share():
    strategy = mirrored(2)
    step = tj.build_train_step(loss_fn, optax.sgd(RATE), strategy)
    placed = step.place_batch({"x": np.arange(4.0), "by": tj.Whole(np.float32(3))})

    def tower_fn(tower, batch):
        return batch["x"].sum() * batch["by"]

    out = strategy.call_for_each_tower(tower_fn, placed)
    assert out.values.tolist() == [3, 15]


@pytest.mark.slow
def test_an_evaluation_takes_shared_leaves_and_batches_keep_them():
    strategy = mirrored(2, 2)
    batch = rows(7)
    shared = {"scale": tj.Whole({"by": 2.0}), **batch}  # before the rows

    def metric_fn(params, batch, tower):
        return {"m": loss_fn(params, batch, tower)}

    losses = losses_of(start()["w"].astype(float), batch, 2.0)
    expected = np.average(losses, weights=batch["weight"])
    found = tj.build_eval_step(metric_fn, strategy)(start(), shared)["m"].value
    np.testing.assert_allclose(found, expected, rtol=1e-6)

    cut = list(tj.batches(shared, 4))
    assert [len(b["x"]) for b in cut] == [4, 3]
    assert all(b["scale"] == tj.Whole({"by": 2.0}) for b in cut)


@pytest.mark.slow
def test_rows_may_be_keys_of_several_steps_too():
    bits = np.arange(16, dtype=np.uint32).reshape(8, 2)
    keys = jax.random.wrap_key_data(bits)
    strategy = mirrored(2, 2)

    def add(ctx, total, batch):
        return total + jax.random.key_data(batch["key"].values).reshape(4, 2)

    parts = strategy.distribute_dataset([{"key": keys[:4]}, {"key": keys[4:]}])
    start = jnp.zeros((4, 2), jnp.uint32)
    found = strategy.run_steps_on_dataset(add, iter(parts), 3, start).final
    np.testing.assert_array_equal(found, bits[:4] + bits[4:])


# state.extra: one value for all towers, which does not train.


def averaging(params, batch, tower):
    """The batch's mean, kept with what was; a count; a value all towers know."""
    weight = batch["weight"] * tower.weight
    loss = tj.Weighted.mean((batch["x"] @ params["w"] - batch["y"]) ** 2, weight)
    old = tower.extra
    mean = 0.9 * old["mean"][None] + 0.1 * batch["x"]
    extra = {
        "mean": tj.Weighted(weight @ mean, weight.sum()),
        "rows": tj.Sum(jnp.sum(batch["weight"] > 0.5)),
        "last": old["last"] + params["w"][0],
        "table": old["table"],
    }
    return tj.TowerOutput(loss, extra=extra)


def first_extra():
    return {
        "mean": np.zeros(3, np.float32),
        "rows": np.int32(0),
        "last": np.float32(1),
        "table": np.arange(5, dtype=np.int8),
    }


@pytest.mark.slow
def test_an_extra_value_of_a_towers_own_is_refused_and_so_is_another_type():
    def check(**returned):
        def loss_fn(params, batch, tower):
            out = averaging(params, batch, tower)
            new = {name: of(batch, tower) for name, of in returned.items()}
            extra = {**out.extra, **new} if new else {"mean": out.extra["mean"]}
            return tj.TowerOutput(out.loss, extra=extra)

        step = tj.build_train_step(loss_fn, optax.sgd(RATE), mirrored(2, 2))
        step.check(start(), rows(), extra=first_extra())

    with pytest.raises(tj.ReplicationError, match="extra.*last"):
        check(last=lambda b, t: b["x"].sum())
    for returned, text in (
        ({}, "is absent"),
        (
            {"rows": lambda b, t: tj.Weighted.mean(b["y"])},
            "is float32.*, expected int32",
        ),
        ({"last": lambda b, t: tj.Sum(1j * b["y"][0])}, "is complex64.* float32"),
        ({"table": lambda b, t: tj.Sum(t.extra["table"] + t.id)}, "int32.*int8"),
        (
            {"rows": lambda b, t: tj.Rows(b["x"])},
            r"Look at TowerOutput\(extra=.*else.* update_extra=",
        ),
    ):
        with pytest.raises(ValueError, match=rf"state.extra.*{text}"):
            check(**returned)


@pytest.mark.slow
def test_an_evaluation_sees_the_extra_state_and_a_refused_step_keeps_it():
    def metric_fn(params, batch, tower):
        return {"m": tj.Weighted.mean(batch["x"][:, 0] * tower.extra["last"])}

    strategy = mirrored(2, 2)
    step = tj.build_train_step(averaging, optax.sgd(RATE), strategy)
    state = step.init(start(), extra=first_extra())
    found = tj.build_eval_step(metric_fn, strategy)(state, rows())["m"].value
    np.testing.assert_allclose(found, rows()["x"][:, 0].mean(), rtol=1e-5)
    bad = rows()
    bad["y"][3] = np.nan
    state, _ = step(state, bad)
    with pytest.raises(tj.NonFiniteError):
        step.settle()
    jax.tree.map(np.testing.assert_array_equal, state.extra, first_extra())


@pytest.mark.slow
def test_all_towers_share_a_key_that_is_no_towers_own():
    def loss_fn(params, batch, tower):
        noise = jax.random.key_data(tower.shared_rng)
        own = jax.random.key_data(tower.rng)
        metrics = {"noise": noise, "own": tj.Weighted(own[0] * 1.0, 1.0)}
        return tj.TowerOutput(tj.Weighted.mean(batch["x"] @ params["w"]), metrics)

    key = jax.random.key(7)
    strategy = mirrored(4, 2)
    how = {"micro_batches": 3, "audit": False}  # a metric is of a tower's own key
    step = tj.build_train_step(loss_fn, optax.sgd(0.0), strategy, **how)
    state = step.init(start(), rng=key)
    seen = []
    for number in range(2):
        state, metrics = step(state, rows())
        shared = jax.random.fold_in(jax.random.fold_in(key, number), 2**32 - 1)
        np.testing.assert_array_equal(metrics["noise"], jax.random.key_data(shared))
        seen.append(np.asarray(metrics["noise"]))
    assert (seen[0] != seen[1]).all()


def lora():
    rng = np.random.default_rng(3)
    base = rng.integers(-100, 100, (3, 4), np.int8)
    return {
        "base": base,
        "scale": np.float32(0.02),
        "a": rng.normal(size=(3, 2)).astype(np.float32),
        "b": rng.normal(size=(2, 4)).astype(np.float32),
        "key": jax.random.key(3),
    }


def lora_loss(params, batch, tower):
    whole = params["base"] * params["scale"] + params["a"] @ params["b"]
    losses = ((batch["x"] @ whole).sum(-1) - batch["y"]) ** 2
    return tj.Weighted.mean(losses, batch["weight"] * tower.weight)


@pytest.mark.slow
def test_what_is_fixed_is_not_sent():
    wide = {**lora(), "base": np.ones((3, 4096), np.int8)}
    wide["b"] = np.ones((2, 4096), np.float32)

    def sent(trainable):
        step = tj.build_train_step(
            lora_loss, optax.sgd(RATE), mirrored(4, 4), trainable=trainable
        )
        (found,) = step.check(wide, rows()).analysis.collectives
        return found.bytes / 4

    assert sent(lambda name, leaf: name == "a") == 3 * 2 + 3  # loss and weights
    assert sent(lambda name, leaf: name == "scale") == 1 + 3
    # By default the floating ones: base and key are not asked for.
    assert sent(None) == 3 * 2 + 2 * 4096 + 1 + 3


def test_trainable_is_given_readable_names():
    given = []
    leaf = np.zeros(2, np.float32)
    step = tj.build_train_step(
        lora_loss,
        optax.sgd(RATE),
        mirrored(2, 2),
        trainable=lambda name, leaf: given.append((name, leaf.shape)) or True,
    )
    step.shapes({"dense": {"kernel": leaf}, "heads": [leaf, leaf[:1]]})
    assert set(given) == {("dense/kernel", (2,)), ("heads/0", (2,)), ("heads/1", (1,))}


@pytest.mark.slow
def test_refusals_name_the_leaf_and_what_to_write():
    def check(params, trainable=None):
        step = tj.build_train_step(
            lora_loss, optax.sgd(RATE), mirrored(2, 2), trainable=trainable
        )
        step.check(params, rows())

    check(lora())
    half = {**lora(), "scale": np.ones((), jnp.float8_e4m3fn)}
    for params, trainable, text in [
        (half, None, r"params\['scale'\] is float8.*trainable="),
        (lora(), lambda name, leaf: name == "base", r"params\['base'\] is int8"),
        (lora(), False, "chooses none .* names are 'a', 'b', 'base'"),
        (lora(), {"A": True}, r"params have no \['A'\]; params\['a'\] is left out; "),
        ([lora()], (True,), r"it is PyTreeDef\(\(\*,\)\), and params are PyTree"),
        (lora(), "a", "must be a function"),
    ]:
        with pytest.raises(ValueError, match=text):
            check(params, trainable)


def test_shared_leaves_are_refused_by_name_where_rows_alone_go():
    strategy = mirrored(2, 2)
    batch = {**rows(), "scale": tj.Whole({"by": np.float32(1)})}
    text = r"batch\['scale'\] is a Whole, .* Pass its value as an argument"
    with pytest.raises(ValueError, match=text):
        next(iter(strategy.distribute_dataset([batch], split="elements")))
    longer = {**batch, "scale": tj.Whole({"by": np.ones(2, np.float32)})}
    text = r"batch\['scale'\]\['by'\] is float32\[2\], expected float32\[\]"
    with pytest.raises(ValueError, match=text):
        parts = iter(strategy.distribute_dataset([batch, longer]))
        strategy.run_steps_on_dataset(lambda ctx, carry, batch: carry, parts, 2, 0.0)


def test_placed_batches_of_a_model_keep_what_their_shared_leaves_are():
    step = tj.build_train_step(loss_fn, optax.sgd(RATE), mirrored(2, 2))
    batches = [
        {"x": rows()["x"], "scale": tj.Whole(x)}
        for x in (np.float32(1), np.float32(2), np.ones(2, np.float32))
    ]
    kinds = [as_batch(step.place_batch(batch)).signature for batch in batches]
    assert kinds[0] == kinds[1] != kinds[2]
    # That of a batch which becomes the model's before it is placed.
    for given in (batches[0], (batches[0], rows()["x"])):
        for how in ({}, {"with_labels": False}):
            placed = as_batch(step.place_batch(given), **how)
            expected = step.place_batch(as_batch(given, **how))
            assert placed.signature == expected.signature
            assert jax.tree.structure(placed.args) == jax.tree.structure(expected.args)
