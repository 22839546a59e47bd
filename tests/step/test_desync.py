"""The devices' copies compared, bit by bit; what is not finite, found and named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import names as devices

import towerjax as tj

ADAM = optax.adam(0.1)
SGD = optax.sgd(0.1)


def loss_fn(params, batch, tower):
    x = jnp.tanh(batch["x"] @ params["Dense_0"]["kernel"])
    out = x @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"][None]
    return tj.TowerOutput(
        loss=tj.Weighted.mean(((out - 1) ** 2).sum(-1), tower.weight),
        metrics={"mean": tj.Weighted.mean(batch["m"], tower.weight)},
    )


def params():
    rng = np.random.default_rng(0)
    bias = np.zeros(2, np.float32)
    first, last = (rng.normal(size=x).astype(np.float32) for x in ((3, 4), (4, 2)))
    return {"Dense_0": {"kernel": first}, "Dense_1": {"kernel": last, "bias": bias}}


def batch(rows=16):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "m": np.ones(rows, np.float32)}


def build(strategy, fn=loss_fn, optimizer=SGD, **options):
    return tj.build_train_step(fn, optimizer, strategy, **options)


def flipped(leaf, at, bit=20):
    """The array with one bit of its first element changed on some devices."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    data = jax.random.key_data(leaf) if is_key else leaf
    shards = []
    for shard in data.addressable_shards:
        copy = np.array(shard.data)
        if shard.device.id in at:
            copy.reshape(-1).view(np.uint8)[bit // 8] ^= 1 << bit % 8
        shards.append(jax.device_put(copy, shard.device))
    out = jax.make_array_from_single_device_arrays(data.shape, data.sharding, shards)
    return jax.random.wrap_key_data(out) if is_key else out


def corrupted(state, changes):
    """The state with leaves, by name, changed on devices: ``{name: [device, ...]}``."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(state)
    keystr = jax.tree_util.keystr
    names = [keystr(path, simple=True, separator="/") for path, _ in leaves]
    assert set(changes) <= set(names), names
    changed = [changes.get(name, ()) for name in names]
    new = [flipped(x, at) for (_, x), at in zip(leaves, changed, strict=True)]
    return jax.tree.unflatten(treedef, new)


@pytest.fixture(scope="module")
def plain():
    return build(STRATEGIES["shard_map"](), optimizer=ADAM)


@pytest.fixture(scope="module")
def in_turn():
    """Two towers in turn on each device."""
    return build(STRATEGIES["pmap scan"]())


def differing(state):
    with pytest.raises(tj.DesyncError) as caught:
        tj.check_mirrored(state)
    return caught.value


IN_TURN = {"towers": 8, "tower_loop": "scan", "executor": "pmap"}
STRATEGIES = {
    "shard_map": lambda: tj.Mirrored(devices(4)),
    "pmap scan": lambda: tj.Mirrored(devices(4), **IN_TURN),
}
LEAVES = ["params/Dense_1/kernel", "opt_state/0/nu/Dense_0/kernel", "rng"]
LEAVES.append("opt_state/0/count")  # int32


@pytest.mark.slow
@pytest.mark.parametrize("executor", STRATEGIES)
def test_one_bit_on_one_device_is_named(executor, plain, in_turn):
    step = plain if executor == "shard_map" else in_turn
    for leaf in LEAVES if executor == "shard_map" else LEAVES[:1]:
        error = differing(corrupted(step.init(params()), {leaf: [2]}))
        [one] = error.differing
        assert (error.step, one.device, one.leaf) == (0, "cpu:2", leaf)
        assert f"differed after step 0: cpu:2, {leaf}. " in str(error)
    state = step.init(params())
    tj.check_mirrored(state)
    state, _ = step(state, batch())
    tj.check_mirrored(state)
    step(state, batch())  # which may take the buffers of what was looked at
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))


@pytest.mark.slow
def test_most_devices_are_right_and_of_halves_the_first(plain):
    changes = {"params/Dense_1/bias": [0], "params/Dense_0/kernel": [1, 3]}
    error = differing(corrupted(plain.init(params()), changes))
    assert sorted((one.device, one.leaf) for one in error.differing) == [
        ("cpu:0", "params/Dense_1/bias"),
        ("cpu:1", "params/Dense_0/kernel"),
        ("cpu:3", "params/Dense_0/kernel"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("state", ["sharded_optimizer", "sharded"])
def test_what_is_sharded_has_no_copies_to_compare(state):
    step = build(tj.Mirrored(devices(4), state=state), optimizer=ADAM)
    whole = step.init(params())
    tj.check_mirrored(whole)
    [one] = differing(corrupted(whole, {"rng": [3]})).differing
    assert (one.device, one.leaf) == ("cpu:3", "rng")


@pytest.mark.slow
def test_a_checkpoint_of_copies_that_differ_is_not_written(
    plain, tmp_path, monkeypatch
):
    """The run ends with the error, and the newest checkpoint is one of before."""
    dispatch = plain.dispatch

    def disturbed(state, batch):
        state, *rest = dispatch(state, batch)
        wrong = {"params/Dense_1/bias": [2]} if int(state.step) == 3 else {}
        return corrupted(state, wrong), *rest

    monkeypatch.setattr(plain, "dispatch", disturbed)
    saving = tj.Checkpointer(tmp_path, every=2, batches="count")
    with pytest.raises(tj.DesyncError, match="after step 4: cpu:2, params") as caught:
        state = plain.init(params())
        data = [batch()] * 6
        tj.run(plain, state, data, checkpointer=saving, progress=False)
    assert saving.steps == (2,) and len(caught.value.history.steps) == 4
    plain.place(saving.restore(plain, plain.init(params())))


# What is not finite.


def bad_gradient(params, batch, tower):
    """Finite losses; where ``r`` is 0 and rows are 0, a gradient of NaN or infinity."""
    root = jnp.sqrt(jnp.abs(params["a"]["r"] * batch["zero"])).sum()  # d = 0 * inf
    inverse = jnp.sqrt(jnp.abs(params["b"] + batch["one"])).sum()
    total = root + inverse + (params["c"] * batch["one"]).sum()
    return tj.Weighted(total, tower.weight.sum())


BAD_PARAMS = {"a": {"r": np.float32(1)}, "b": np.float32(0), "c": np.float32(1)}


def bad_batch(zero=(), infinite=(), rows=16):
    """Rows of which some make the gradient of a/r NaN, or that of b infinite."""
    data = {"zero": np.ones(rows, np.float32), "one": np.ones(rows, np.float32)}
    data["zero"][list(zero)] = 0
    data["one"][list(infinite)] = 0
    return data


@pytest.mark.slow
def test_the_tower_and_the_leaf_are_named():
    strategy = tj.Mirrored(devices(2), towers=8, tower_loop="scan")
    step = build(strategy, fn=bad_gradient, micro_batches=2, guard="gradients")
    data = [bad_batch(infinite=[3])]
    with pytest.raises(tj.NonFiniteError) as caught:
        tj.run(step, step.init(BAD_PARAMS), data, progress=False)
    [at] = caught.value.locations
    assert (at.tower, at.leaf) == (1, "params/b")
    assert (at.part, at.kind, at.step) == ("gradient", "infinity", 1)
    assert "tower 1, params/b, step 1: infinity in the gradient" in str(caught.value)

    locations = step.locate(step.init(BAD_PARAMS), bad_batch(zero=[10], infinite=[14]))
    assert [(p.tower, p.leaf, p.kind) for p in locations] == [
        (5, "params/a/r", "NaN"),
        (7, "params/b", "infinity"),
    ]
    assert step.locate(step.init(BAD_PARAMS), bad_batch()) == ()


@pytest.mark.slow
def test_a_metric_and_a_parameter_are_named_and_a_refusal_has_the_place(in_turn):
    step = in_turn
    poisoned = batch() | {"m": np.where(np.arange(16) == 7, np.nan, 1.0)}
    poisoned["m"] = poisoned["m"].astype(np.float32)
    [at] = step.locate(step.init(params()), poisoned)
    assert (at.tower, at.leaf, at.part) == (3, "metrics/mean/sum", "metric")

    bad = params()
    bad["Dense_1"]["bias"][1] = -np.inf
    with pytest.raises(tj.NonFiniteError) as caught:
        tj.run(step, step.init(bad), [batch()], progress=False)
    assert len(caught.value.locations) > 8
    told = "Found: towers 0-7, params/Dense_1/bias, step 1: infinity in the parameter"
    told += ", which came with an earlier step"
    assert f"{told}; towers 0-7, loss/sum, step 1: " in str(caught.value)
    assert "came with an earlier step: go on from a state before" in str(caught.value)


@pytest.mark.slow
def test_run_looks_for_the_place_of_a_refused_step():
    step = build(STRATEGIES["shard_map"](), fn=bad_loss)
    data = [bad_batch() for _ in range(6)]
    data[2]["one"][13] = -np.inf
    with pytest.raises(tj.NonFiniteError, match="of step 3 was not finite") as caught:
        tj.run(step, step.init(BAD_PARAMS), data, progress=False)
    error = caught.value
    assert [(p.tower, p.step, p.leaf, p.part) for p in error.locations] == [
        (3, 3, "loss/sum", "loss"),
        (3, 3, "params/c", "gradient"),
    ]
    assert f"after step {int(error.state.step)}." in error.__notes__[0]
    assert len(error.history.steps) == int(error.state.step)


@pytest.mark.slow
def test_labels_are_shown_where_the_loss_is_nan():
    def of_classes(w, batch, tower):
        losses = optax.softmax_cross_entropy_with_integer_labels
        return tj.Weighted.mean(losses(batch["x"] @ w, batch["y"]), tower.weight)

    step = build(STRATEGIES["shard_map"](), fn=of_classes, audit=False)
    w = np.ones((3, 4), np.float32)
    labels = np.arange(16, dtype=np.int32) % 5
    with pytest.raises(tj.NonFiniteError, match="label that is not a class") as caught:
        tj.run(step, step.init(w), [batch() | {"y": labels}], progress=False)
    text = "Its integers: batch['y'] is from 0 to 4; a label that is not a class"
    assert text in caught.value.__notes__[0]


def bad_loss(params, batch, tower):
    return tj.Weighted.mean(params["c"] * batch["one"], tower.weight)


@pytest.mark.slow
def test_the_place_is_looked_for_with_the_steps_own_random_numbers():
    def fn(params, batch, tower):
        odd = jax.random.key_data(tower.rng)[0] % 2 == 1  # a bit is random enough
        bad = jnp.where(odd, jnp.nan, 0.0) + tower.step
        return tj.Weighted.mean(params["c"] * batch["one"] + bad, tower.weight)

    step = build(STRATEGIES["shard_map"](), fn=fn)
    state = step.init(BAD_PARAMS)
    seen = []
    of_step = jax.jit(lambda n: jax.random.fold_in(state.rng, n))
    words = jax.jit(jax.vmap(lambda key, t: jax.random.key_data(
        jax.random.fold_in(key, t)), (None, 0)))  # fmt: skip
    for number in (1, 2, 2**31 + 1):  # the int32 of a state wraps round
        locations = step.locate(state, bad_batch(), number=number)
        odd = np.asarray(words(of_step(np.uint32(number - 1)), np.arange(4)))[:, 0] % 2
        assert {at.step for at in locations} <= {number}
        seen.append(sorted({at.tower for at in locations}))
        assert seen[-1] == np.flatnonzero(odd).tolist()
    assert seen[0] != seen[1]


@pytest.mark.slow
def test_a_place_that_cannot_be_looked_for_keeps_the_error(plain, monkeypatch):
    def locate(*args, **options):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(plain, "locate", locate)
    poisoned = batch() | {"x": np.full((16, 3), np.nan, np.float32)}
    with pytest.raises(tj.NonFiniteError, match="of step 1 was not") as caught:
        tj.run(plain, plain.init(params()), [poisoned], progress=False)
    assert caught.value.__notes__[0].endswith("failed: out of memory")
