"""Programs that were not written with towerjax, on several numbers of devices."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import dynamic_scale, train_state
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import towerjax as tj

P = PartitionSpec
DRAW = np.random.default_rng(3)
W = DRAW.normal(size=3).astype(np.float32)
X = DRAW.normal(size=(16, 3)).astype(np.float32)
Y = DRAW.normal(size=16).astype(np.float32)
MASK = (DRAW.uniform(size=16) < 0.6).astype(np.float32)


WHOLE = P()


def mesh_of(devices):
    return Mesh(devices, "i")


def mapped(fn, *args, out=WHOLE, **how):
    """``make`` of a `shard_map`, whose first argument all devices have."""

    def make(devices):
        specs = (P(), *[P("i")] * (len(args) - 1))
        how_ = {"mesh": mesh_of(devices), "in_specs": specs, "out_specs": out, **how}
        return jax.jit(jax.shard_map(fn, **how_)), args

    return make


def loss(w, x, y):
    return ((x @ w - y) ** 2).mean()


def clip(g):
    return g * jnp.minimum(1.0, 0.5 / jnp.linalg.norm(g))


def masked_mean(w, x, y, m):
    return (((x @ w - y) ** 2) * m).sum() / m.sum()


WITHOUT = {"check_vma": False}
WRONG = {
    "twice": (mapped(lambda *a: lax.pmean(jax.grad(loss)(*a), "i"), W, X, Y),
        "result: multiplied by the number of devices"),
    "clipped": (
        mapped(lambda *a: lax.pmean(clip(jax.grad(loss)(*a)), "i"), W, X, Y, **WITHOUT),
        "Devices communicate at .*test_same_on_devices.py:.*(psum)",
    ),
    "masked": (
        mapped(lambda *a: lax.pmean(masked_mean(*a), "i"), W, X, Y, MASK, **WITHOUT),
        "result is .* on . devices and .* on one"),
    "share": (mapped(lambda w, x: lax.pmean(x.sum(), "i"), W, X),
        "divided by the number of devices"),
    "own_rows": (mapped(lambda w, x: x - x.mean(0)[None], W, X, out=P("i"), **WITHOUT),
        "result is"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_what_depends_on_the_number_of_devices_is_refused(name):
    make, text = WRONG[name]
    with pytest.raises(tj.testing.SplitError, match=text) as error:
        tj.testing.same_on_devices(make)
    assert str(error.value).startswith("1 leaf depends on the number of devices")
    assert len(str(error.value).splitlines()) < 8


@pytest.mark.slow
def test_the_numbers_are_those_of_numpy():
    make, _ = WRONG["share"]
    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_on_devices(make, (1, 4))
    [finding] = error.value.findings
    total = X.sum(dtype=np.float64)
    np.testing.assert_allclose(
        (finding.value, finding.one_tower), (total / 4, total), 1e-5
    )
    assert finding.towers == 4


def of_pmap(devices):
    def step(w, x, y):
        return lax.pmean(jax.grad(loss)(w, x, y), "i"), x @ w

    rows = [a.reshape(len(devices), -1, *a.shape[1:]) for a in (X, Y)]
    return jax.pmap(step, "i", in_axes=(None, 0, 0), devices=devices), (W, *rows)


def of_jit(devices):
    rows = NamedSharding(mesh_of(devices), P("i"))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, x, y):
        grads = jax.grad(loss)(state["w"], x, y)
        key, own = jax.random.split(state["key"])
        noise = jax.random.normal(own, grads.shape)
        w = state["w"] - 0.1 * (grads + 0.01 * noise)
        return {"w": w, "key": key, "step": state["step"] + 1}, {"rows": x @ w}

    whole = NamedSharding(mesh_of(devices), P())
    state = {"w": W, "key": jax.random.key(3), "step": 0}
    state = jax.tree.map(lambda x: jax.device_put(x, whole), state)
    return step, (state, *(jax.device_put(x, rows) for x in (X, Y)))


def of_psum(w, x, y, m):
    total = lax.psum((((x @ w - y) ** 2) * m).sum(), "i")
    return total / lax.psum(m.sum(), "i")


def of_explicit_axes(devices):
    """JAX's newest form: types have shardings, and states are given as numbers."""
    types = {"axis_types": (jax.sharding.AxisType.Explicit,) * 2}
    grid = np.array(devices).reshape(-1, 1)
    mesh = Mesh(grid, ("i", "j"), **types)
    rows = NamedSharding(mesh, P("i"))

    @jax.jit
    def step(state, x, y):
        errors = (x * state["w"][None]).sum(1) - y
        grads = (x * errors[:, None]).mean(0)
        new = {"w": state["w"] - 0.1 * grads, "count": state["count"] + 1}
        return new, errors

    state = {"w": W, "count": 0}
    return step, (state, *(jax.device_put(a, rows) for a in (X, Y)))


RIGHT = {
    "explicit": of_explicit_axes,
    "pmap": of_pmap,
    "jit": of_jit,
    "shard_map": mapped(
        lambda *a: lax.pmean(jax.grad(loss)(*a), "i"), W, X, Y, **WITHOUT
    ),
    "two_sums": mapped(of_psum, W, X, Y, MASK),
    "rows": mapped(lambda w, x: x @ w, W, X, out=P("i")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_what_does_not_depend_on_it_passes(name):
    report = tj.testing.same_on_devices(RIGHT[name])
    assert report.towers == (2, 4) and report.largest < 1e-5
    assert "on 2, 4 devices as on one" in str(report)
    if name == "jit":  # keys and counters, too
        names = "result[0]['key'] result[0]['step'] result[0]['w'] result[1]['rows']"
        assert report.compared == tuple(names.split())


def on_all(devices):  # whatever it is given
    return mapped(lambda w, x: lax.pmean(x.mean(0), "i"), W, X)(jax.devices()[:4])


def on_one(devices):
    return jax.jit(jax.grad(loss)), (W, X, Y)


def within(devices):  # on the devices, but for a part of it
    part = NamedSharding(mesh_of(jax.devices()[:4]), P("i"))
    fn, args = RIGHT["rows"](devices)
    whole = NamedSharding(mesh_of(devices), P())
    put = lambda x: jax.device_put(jax.device_put(x, part), whole)  # noqa: E731
    return lambda w, x: put(fn(w, x)), args


def as_a_number(devices):  # which nobody can see
    return lambda w, x: float(loss(w, x, 0.0)), (W, X)


@pytest.mark.slow
@pytest.mark.parametrize(("make", "text"), [
    (on_all, r"make\(1 devices\) runs on 4 devices, cpu:0, cpu:1, cpu:2, cpu:3"),
    (on_one, r"make\(2 devices\) runs on 1 device, cpu:0, as"),
    (within, r"make\(2 devices\) runs on 4 devices, cpu:0, "),
    (as_a_number, r"make\(2 devices\) does not say on .*return an array"),
])  # fmt: skip
def test_a_program_that_runs_on_other_devices_is_refused(make, text):
    with pytest.raises(ValueError, match=text):
        tj.testing.same_on_devices(make)


@pytest.mark.slow
def test_a_program_that_draws_anew_is_told():
    drawn = np.random.default_rng(0)
    make, _ = WRONG["share"]
    draws = lambda devices: (lambda x: make(devices)[0](W, x * drawn.uniform()), [X])  # noqa: E731
    with pytest.raises(ValueError, match="not deterministic") as error:
        tj.testing.same_on_devices(draws)
    assert type(error.value).__name__ == "NotAudited"


@pytest.mark.parametrize("other", [np.nan, np.inf])
def test_zeros_are_not_the_same_as_what_is_not_finite(other):
    def make(workers):
        return lambda x: x + (other if workers > 1 else 0), [np.zeros(4, "f")]

    with pytest.raises(
        tj.testing.SplitError, match=f"result is {other} with workers=2"
    ):
        tj.testing.same_for(make, workers=(1, 2))


@pytest.mark.parametrize("wrong", [(2, 4), (1,), (1, 1), (1, 16)])
def test_numbers_of_devices_that_cannot_be_compared_are_refused(wrong):
    with pytest.raises(ValueError, match="must begin with 1|are only 8 dev"):
        tj.testing.same_on_devices(RIGHT["rows"], wrong)


PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

W, X = np.ones(3, np.float32), np.arange(24, dtype=np.float32).reshape(8, 3)

def made(fn, devices, **how):
    mesh = Mesh(devices, "i")
    how |= {"mesh": mesh, "in_specs": (P(), P("i")), "out_specs": P()}
    return jax.jit(jax.shard_map(fn, **how)), (W, X)

def loss(w, x):
    return ((x @ w) ** 2).mean()

def good(devices):
    fn = lambda w, x: lax.pmean(jax.grad(loss)(w, x), "i")
    return made(fn, devices, check_vma=False)

def bad(devices):
    return made(lambda w, x: lax.pmean(jax.grad(loss)(w, x), "i"), devices)

def quotients(devices):
    fn = lambda w, x: lax.pmean((x @ w).sum() / (x**2).sum(), "i")
    return made(fn, devices, check_vma=False)

def unproved(devices):
    return made(jax.grad(loss), devices, check_vma=False)

def everywhere(devices):
    return good(jax.devices()[:2])

def elsewhere(devices):
    x = jax.device_put(X, jax.devices()[0])
    return jax.jit(lambda w, x: x @ w), (W, x)

def noted(devices):
    fn = lambda w, x: 2 * (lax.psum(w, "i") / lax.axis_size("i"))[None]
    return made(fn, devices, check_vma=False)

def untraced(devices):
    fn, args = good(devices)
    return lambda *args: [float(fn(*args).sum()), fn(*args)], args

def forgot(devices):
    return {"fn": 1}

def sliced(number):
    return good(jax.devices()[:number])
"""


@pytest.mark.slow
def test_the_command_says_both_and_has_a_status(shell):
    assert len(jax.devices()) == 8  # and stay so, whatever a command asks for
    code, out, _ = shell("check", "of_user:good", "--devices", "1", "2")
    assert code == 0 and "proved without a run" in out and "is the same on" not in out
    code, out, _ = shell("check", "of_user:good", "--devices", "1", "2", "--run")
    assert code == 0 and "1 value is the same on 2 devices as on one" in out
    code, out, _ = shell("check", "of_user:good", "--devices", "1", "2", "--json")
    told = json.loads(out)
    assert told["results"] == {"result": {"says": "proved", "why": ""}}
    assert not told["ran"] and "over 'i'" in told["proved"][0]
    code, out, _ = shell("check", "of_user:quotients", "--json")
    told = json.loads(out)
    assert told["ran"] and told["results"]["result"]["says"] == "unknown"
    assert code == 1 and [x["kind"] for x in told["findings"]] == ["comparison"]
    code, out, err = shell("check", "of_user:bad")
    assert code == 1 and "refuted without a run" in out and out.count("\n") < 24
    assert "result: refuted\n" in out
    assert (out + err).count("D times what it is on one device") == 1
    code, out, _ = shell("check", "of_user:bad", "--run")
    assert code == 1 and "multiplied by the number" in out and out.count("\n") < 24
    code, out, _ = shell("check", "of_user:unproved", "--json")
    told = json.loads(out)
    assert (
        code == 1
        and not told["same"]
        and "proof" in [x["kind"] for x in told["findings"]]
    )
    assert shell("check", "of_user:nothing")[0] == 2
    code, out, err = shell("check", "of_user:everywhere", "--json")
    assert code == 2 and not out and "runs on 2 devices" in err
    code, out, err = shell("check", "of_user:elsewhere", "--json")
    assert code == 2 and not out and "runs on 1 device, cpu:0" in err


@pytest.mark.slow
def test_the_command_has_all_notes_in_its_json(shell):
    for name, texts in {
        "noted": ["one call was compared"],
        "untraced": ["nothing is proved", "one call", "cannot be traced"],
    }.items():
        call = "check", f"of_user:{name}", "--devices", "1", "2", "--run"
        code, out, _ = shell(*call)
        _, in_json, _ = shell(*call, "--json")
        notes = json.loads(in_json)["notes"]
        assert code == 0 and all(note in out for note in notes)
        for note, text in zip(notes, texts, strict=True):
            assert text in note


USED_AS_A_NUMBER = {
    "slice": lambda n: Mesh(jax.devices()[:n], "i"),
    "shape": lambda n: np.array(jax.devices()).reshape(n, -1),
    "quotient": lambda n: (lambda x: x.sum() / n, [X]),
    "product": lambda n: (lambda x: x.sum(), [X[: n * 2.0]]),
}


@pytest.mark.parametrize("make", USED_AS_A_NUMBER.values(), ids=[*USED_AS_A_NUMBER])
def test_a_list_that_is_used_as_a_number_is_noted(make):
    with pytest.raises(TypeError) as caught:
        tj.testing.same_on_devices(make, devices=(1, 2))
    assert "len(devices) for the number" in caught.value.__notes__[0]
    with pytest.raises(TypeError) as caught:
        tj.testing.same_on_devices(lambda devices: "x" + 1, devices=(1, 2))
    assert not any("len(devices)" in x for x in getattr(caught.value, "__notes__", ()))


def test_the_command_notes_a_list_that_is_used_as_a_number(shell):
    with pytest.raises(TypeError, match="slice indices") as caught:
        shell("check", "of_user:sliced")
    [note] = [x for x in caught.value.__notes__ if "len(devices)" in x]
    assert note.startswith("make(devices) is given a list of devices, ")


def test_what_make_must_return_is_one_sentence(shell):
    code, _, err = shell("check", "of_user:forgot")
    assert code == 2 and err.count("\n") == 1
    assert "but must return (fn, args), " in err and "returned a dict" in err
    with pytest.raises(ValueError, match=r"returned \(a function, a str\), but"):
        tj.testing.same_on_devices(lambda devices: (loss, "x"))


# What each device returns, of which the host makes one number.
def of_devices(state, devices, ways=("mean", "sum", "copies"), of_key="split"):
    number = len(devices)
    keys = jax.random.split(jax.random.PRNGKey(0), number)
    if of_key == "copies":
        keys = np.stack([jax.random.PRNGKey(0)] * number)

    def step(w, x, y, key):
        errors = (x @ w - y) ** 2
        told = {"mean": errors.mean(), "sum": errors.sum(), "max": errors.max()}
        told["copies"] = lax.pmean(told["mean"], "i")
        grads = jax.grad(loss)(w, x, y)
        grads = lax.pmean(grads, "i") if state == "reduced" else grads
        new = jax.random.split(key)[0]
        return w - 0.1 * grads, {name: told[name] for name in ways}, new

    rows = [a.reshape(number, -1, *a.shape[1:]) for a in (X, Y)]
    copies = np.stack([W] * number)
    return jax.pmap(step, "i", devices=devices), (copies, *rows, keys)


@pytest.mark.slow
def test_the_mean_or_sum_of_what_devices_return_may_be_that_of_one():
    report = tj.testing.same_on_devices(functools.partial(of_devices, "reduced"))
    told = "devices return different values, whose {} is the value of one device"
    assert report.notes == (
        f"result[1]['mean']: {told.format('mean')}",
        f"result[1]['sum']: {told.format('sum')}",
        "result[2]: not compared, because each device has a key of its own",
    )
    assert report.not_compared == ("result[2]",) and report.splits == 6
    same = functools.partial(of_devices, "reduced", of_key="copies")
    assert "result[2]" in tj.testing.same_on_devices(same).compared


@pytest.mark.slow
@pytest.mark.parametrize(("state", "ways", "leaf"), [
    ("reduced", ("max",), "result[1]['max']"),  # neither of both
    ("forgotten", ("mean",), "result[0]"),  # whose mean is right, too
])  # fmt: skip
def test_other_values_of_devices_depend_on_them(state, ways, leaf):
    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_on_devices(functools.partial(of_devices, state, ways=ways))
    assert [x.leaf for x in error.value.findings] == [leaf]


def test_a_key_is_told_last():
    def make(devices):
        key = jax.random.key(len(devices))
        fn, args = WRONG["share"][0](devices)
        return lambda *args: (key, fn(*args)), args

    with pytest.raises(tj.testing.SplitError) as error:
        tj.testing.same_on_devices(make, (1, 2))
    assert [x.leaf for x in error.value.findings] == ["result[1]", "result[0]"]


# What pip packages reduce over devices: Flax's scaled gradient, state and layer.
def of_flax(devices, axis="i", masked=False):
    net = nn.BatchNorm(use_running_average=False, axis_name=axis)
    variables = net.init(jax.random.key(0), X)
    dynamic = dynamic_scale.DynamicScale()
    state = train_state.TrainState.create(
        apply_fn=net.apply, params=variables["params"], tx=optax.sgd(0.1)
    )

    def step(held, x, y, m):
        state, stats, scale = held
        mask = m[:, None] > 0 if masked else None

        def own_loss(params):
            given = {"params": params, "batch_stats": stats}
            out, new = state.apply_fn(given, x, mask=mask, mutable="batch_stats")
            return ((out.sum(1) - y) ** 2).mean(), new["batch_stats"]

        scaled = scale.value_and_grad(own_loss, has_aux=True, axis_name=axis)
        scale, _, (_, stats), grads = scaled(state.params)
        return state.apply_gradients(grads=grads), stats, scale

    copies = (state, variables["batch_stats"], dynamic)
    copies = jax.tree.map(lambda x: np.stack([x] * len(devices)), copies)
    rows = [a.reshape(len(devices), -1, *a.shape[1:]) for a in (X, Y, MASK)]
    return jax.pmap(step, axis_name="i"), (copies, *rows)


@pytest.mark.slow
def test_flaxs_own_reductions_are_right():
    fn, args = of_flax(jax.devices()[:4])
    report = tj.testing.prove(fn, *args)
    assert report.copies == len(jax.tree.leaves(args[0])) and not report.notes
    assert tj.testing.same_on_devices(of_flax).largest < 1e-5


@pytest.mark.slow
def test_flaxs_reductions_without_an_axis_drift():
    fn, args = of_flax(jax.devices()[:4], axis=None)
    [note] = tj.testing.prove(fn, *args).notes
    assert "each device is given a copy, and returns another" in note


@pytest.mark.slow
def test_flaxs_masked_batch_norm_depends_on_the_devices():  # flax#2417, still so
    fn, args = of_flax(jax.devices()[:4], masked=True)
    assert not tj.testing.prove(fn, *args).notes
    with pytest.raises(tj.testing.SplitError, match="depend on the number of devices"):
        tj.testing.same_on_devices(functools.partial(of_flax, masked=True))
