"""Numbers that no step can use: not finite, too wide for a device, in another order."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mistaken import SUM, S, build, good, on_one, start, used

import towerjax as tj


def poisoned():
    batch = good(4)
    batch["x"][3, 0] = np.nan
    return batch


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raise", "ignore"])
def test_nan_on_one_tower_gives_one_step_flag(policy):
    step = build(on_nonfinite=policy)
    state, _ = step(step.init(start()), good())
    before = jax.device_get(state.params)
    state, metrics = step(state, poisoned())
    assert np.isnan(metrics["loss"]) and int(state.step) == 2
    if policy == "ignore":
        assert np.isnan(state.params["w"]).all()
        return
    for shard in state.params["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, before["w"])
    with pytest.raises(tj.NonFiniteError, match="of step 2 was not finite") as e:
        for _ in range(40):
            state, _ = step(state, good())
    assert e.value.step == 2
    assert np.isfinite(jax.device_get(state.params)["w"]).all()


def test_a_refused_step_that_has_run_is_told_by_the_next_call():
    step = build()
    state = step.init(start())
    for batch in (good(), good(), poisoned()):
        state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    kept = np.asarray(state.params["w"])
    with pytest.raises(tj.NonFiniteError, match="of step 3 "):
        step(state, good())
    np.testing.assert_array_equal(state.params["w"], kept)  # and not donated
    state, _ = step(state, good())
    assert int(state.step) == 4


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("bad", "abcd")
def test_each_gradient_is_looked_at_where_leaves_of_a_shape_share_a_look(bad):
    def fn(params, batch, tower):  # on one device, where nothing is packed
        roots = jax.tree.map(lambda x: jnp.sqrt(x).sum(), params)
        return tj.Weighted(sum(roots.values()) + 0 * batch["x"].sum(), 1.0)

    step = build(fn, on_one(1), on_nonfinite="skip")
    sizes = {"a": 3, "b": 3, "c": 2, "d": 4}
    given = {
        name: np.full(size, float(name != bad), np.float32)
        for name, size in sizes.items()
    }
    state, metrics = step(step.init(given), good())
    assert float(metrics["loss"]) == 12 - sizes[bad]
    assert jax.tree.map(list, jax.device_get(state.params)) == jax.tree.map(list, given)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_refused_when_guarded():
    def fn(params, batch, tower):  # the loss is finite, its gradient is not
        root = jnp.sqrt(jnp.abs(params["w"] - 1.0)).sum()
        return tj.Weighted(root + 0 * batch["x"].sum(), 1.0)

    step = build(fn, on_nonfinite="skip")
    state, metrics = step(step.init({"w": np.ones(3, np.float32)}), good())
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(state.params["w"], np.ones(3))


@pytest.mark.slow
@pytest.mark.sampled
def test_no_examples_change_nothing_whatever_the_losses_are():
    def fn(params, batch, tower):
        return tj.Weighted((batch["x"] @ params["w"]).sum(), tower.weight.sum() * 0)

    step = build(fn, optimizer=optax.adamw(0.1))
    state, metrics = step(step.init(start()), good())
    assert float(metrics["loss"]) == 0.0
    np.testing.assert_array_equal(state.params["w"], start()["w"])
    state, metrics = step(state, {"x": good()["x"] * np.float32(np.nan)})
    assert np.isnan(metrics["loss"])
    np.testing.assert_array_equal(state.params["w"], start()["w"])


@pytest.mark.slow
def test_what_jax_debug_nans_finds_says_how_to_find_more():
    def log(w, batch, tower):
        return tj.Weighted.mean(jnp.log(w * batch), tower.weight)

    step = build(log)
    state = step.init(1.0)
    batch = np.float32([1, 2, -1, 2])
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match=r"found nan.*one_tower\(step\)"):
            step(state, batch)


@pytest.mark.slow
def test_what_fails_on_the_device_shows_and_not_that_the_state_was_donated():
    def fails(_):
        raise ArithmeticError("a fish")

    def one(params, batch, tower):
        shape = jax.ShapeDtypeStruct((), np.float32)
        scale = jax.pure_callback(fails, shape, jax.lax.stop_gradient(batch["x"].sum()))
        return tj.Weighted.mean(scale * (batch["x"] @ params["w"]), tower.weight)

    step = build(one, on_one(1))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a fish"):
        float(step(step.init(start()), good())[1]["loss"])


def test_a_call_that_fails_keeps_the_step_flag_of_those_before(monkeypatch):
    step = build()
    state = step.init(start())
    after, _ = step(state, poisoned())
    monkeypatch.setattr(step.step_flags, "check", lambda at, state: None)
    with pytest.raises(ValueError, match="was donated to"):
        step(after.replace(params=state.params), good())
    with pytest.raises(tj.NonFiniteError, match="of step 1 "):
        step.settle()


@pytest.mark.slow
def test_an_evaluation_that_was_called_in_a_trace_keeps_none_of_it():
    def metric_fn(params, batch, tower):
        numbers = tower.step + 0 * batch["x"][:, 0]
        return {"step": tj.Weighted.mean(numbers, tower.weight)}

    evaluate = tj.build_eval_step(metric_fn, S)
    params = start()
    batch = evaluate.place_batch(good())
    with pytest.raises(ValueError, match="A step must be called from Python"):
        jax.jit(lambda params: evaluate(params, batch))(params)
    assert float(evaluate(params, batch)["step"].value) == 0


@pytest.mark.slow
def test_checking_without_devices_looks_at_the_batch_too():
    def loss_fn(params, batch, tower):
        return tj.Weighted.mean(params * batch["x"], tower.weight)

    def check(remainder, **batch):
        step = build(loss_fn, tj.Mirrored(towers=4096), remainder=remainder)
        return step.check(jax.ShapeDtypeStruct((), np.float32), batch)

    rows = jax.ShapeDtypeStruct((5000,), np.float32)
    with pytest.raises(ValueError, match=r"batch\['x'\] has 5000 examples, which 4096"):
        check("error", x=rows)
    for remainder in ("pad", "drop"):
        assert check(remainder, x=rows).analysis.collectives
    with pytest.raises(ValueError, match=r"batch\['x'\]: 5000, batch\['y'\]: 4"):
        check("pad", x=rows, y=np.zeros(4))
    with pytest.raises(ValueError, match="is 3 of type int"):
        check("pad", x=3)
    with pytest.raises(ValueError, match="Every leaf of a batch .*: give each text"):
        check("pad", x=np.array(["a"]))  # in the words of a call


# What NumPy has and devices have not.


@pytest.mark.slow
def test_integers_that_would_wrap_round_are_refused_by_name():
    def predict_fn(params, batch, tower):
        return batch["id"]

    strategy = tj.Mirrored(towers=2)
    predict = tj.build_predict_step(predict_fn, strategy)
    for value in (2**31, -(2**31) - 1, 2**40):
        ids = np.array([1, value, 3, 4])
        text = rf"batch\['id'\] is an array of int64 that holds {value}, which would"
        with pytest.raises(ValueError, match=text):
            predict(np.float32(0), {"id": ids})
        for split in ("batch", "elements"):
            data = [{"id": x} for x in (ids, ids)]
            with pytest.raises(ValueError, match=text):
                list(strategy.distribute_dataset(data, split=split))
    inside = np.array([1, 2**31 - 1, -(2**31), 4])
    assert predict(np.float32(0), {"id": inside}).tolist() == inside.tolist()
    with jax.enable_x64(True):
        predict = tj.build_predict_step(predict_fn, strategy)
        assert predict(np.float32(0), {"id": ids}).tolist() == ids.tolist()


def deleted(x):
    x = jnp.asarray(x)
    x.delete()
    return x


# How to make it of ones, and what is said.
UNHELD = {
    "timedelta": (lambda x: x.astype("m8[s]"), "dtype timedelta64.*np.timedelta64"),
    "datetime": (lambda x: x.astype("M8[D]"), "dtype datetime64.*a first date"),
    "records": (lambda x: x.view([("a", "f4")]), "take it apart, {name: x"),
    "void": (lambda x: x.view("V4"), r"dtype \|V4: view it as numbers"),
    "text": (lambda x: x.astype("U3"), "dtype <U3: give each text a number"),
    "bytes": (lambda x: x.astype("S3"), r"dtype \|S3: give each text a number"),
    "objects": (lambda x: x.astype(object), r"dtype object.*np\.stack"),
    "longdouble": (lambda x: x.astype("g"), r"x\.astype\(np\.float32\)"),
    "clongdouble": (lambda x: x.astype("G"), r"x\.astype\(np\.complex64\)"),
    "int4": (lambda x: x.astype(jnp.int4), r"int4: cast it, x\.astype\(np\.int8\)"),
    "uint2": (lambda x: x.astype(jnp.uint2), r"x\.astype\(np\.uint8\)"),
    "int4 of JAX": (lambda x: jnp.asarray(x, jnp.int4), r"x\.astype\(np\.int8\)"),
    "float4": (lambda x: x.astype(jnp.float4_e2m1fn), r"astype\(jnp\.bfloat16\)"),
    "masked": (np.ma.masked_array, r"masked array: pass x\.filled\(0\)"),
    "deleted": (deleted, r"donated and deleted.*jnp\.copy\(x\)"),
}


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", UNHELD)
def test_what_no_device_holds_is_refused_by_name(name, compiled):
    made, text = UNHELD[name]
    bad = {"x": good()["x"], "k": made(np.ones(4, np.float32))}
    bad_params = start(k=made(np.ones(3, np.float32)))
    step, state = used()
    predict = tj.build_predict_step(lambda p, b, tower: b["x"], S)
    local = {"k": tj.TowerLocal(bad["k"], SUM)}
    calls = {
        r"batch\['k'\] is .*": [lambda: step(state, bad),
            lambda: step.check(start(), bad), lambda: predict(start(), bad),
            lambda: tj.batches(bad, 2),
            lambda: list(S.distribute_dataset([bad, bad])),
            lambda: list(S.distribute_dataset([bad, bad], split="elements"))],
        r"params\['k'\] is .*": [lambda: step.init(bad_params),
            lambda: step.check(bad_params, good()),
            lambda: predict(bad_params, good())],
        r"local\['k'\] is .*": [lambda: step.init(start(), local=local)],
    }  # fmt: skip
    for what, several in calls.items():
        for call in several:
            compiled.clear()
            with pytest.raises(ValueError, match=f"(?s){what}{text}"):
                call()
            assert not any("step" in x or "on_device" in x for x in compiled), compiled


@pytest.mark.slow
def test_another_byte_order_is_converted():
    ids = np.arange(5) * 70001 - 3
    rows = {"x": good(5)["x"].astype(">f4"), "id": ids.astype(">i8")}
    w = start()["w"].astype(">f8")
    step = build(remainder="pad")
    step.check({"w": w}, rows)
    state = step.init({"w": w})
    jax.eval_shape(lambda state: step.fn(state, rows), state)
    predict = tj.build_predict_step(
        lambda p, b, tower: (p["w"][0] + b["x"], b["id"]), step.strategy
    )
    for params in ({"w": w}, state.params):
        x, found = predict(params, rows)
        np.testing.assert_array_equal(found, ids)
        np.testing.assert_array_equal(x, good(5)["x"] + start()["w"][0])
    for split, n in (("batch", 1), ("elements", 2)):
        placed = S.distribute_dataset([rows, rows], split=split, remainder="pad")
        found = np.asarray(next(iter(placed)).arrays["id"]).reshape(-1)
        np.testing.assert_array_equal(found[: 5 * n], np.tile(ids, n))
