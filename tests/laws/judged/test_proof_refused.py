"""Train steps that must be refused before they run: leaf, line and reason are named."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from known_wrong import adding
from layouts import cases

import towerjax as tj
from towerjax.contrib import LocalSGD

R = tj.Reduction
S = jax.ShapeDtypeStruct
PARAMS = {"w": S((3,), jnp.float32), "b": S((), jnp.float32)}
BATCH = {"x": S((16, 3), jnp.float32), "y": S((16,), jnp.float32)}


def errors(params, batch):
    return batch["x"] @ params["w"] + params["b"] - batch["y"]


def output(params, batch, tower, metrics=None, loss=None):
    losses = errors(params, batch) ** 2
    mean = tj.Weighted.mean(losses, tower.weight)
    return tj.TowerOutput(loss or mean, metrics or {})


def norm(params):
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(params)))


# A metric that differs from tower to tower, made at the line that is marked.


class Differing:
    def forgotten_mean(params, batch, tower):
        return output(params, batch, tower, {"m": errors(params, batch).mean()})  # here

    def reduced_before_it_differs(params, batch, tower):
        mean = tower.reduce(R.MEAN, params["b"])
        return output(params, batch, tower, {"m": mean * batch["y"][0]})  # here

    def by_tower_id(params, batch, tower):
        return output(params, batch, tower, {"m": params["b"] * tower.id})  # here

    def by_tower_key(params, batch, tower):
        noise = jax.random.normal(tower.rng)  # here
        return output(params, batch, tower, {"m": noise})

    def by_tower_weight(params, batch, tower):
        return output(params, batch, tower, {"m": tower.weight.sum()})  # here

    def by_local(params, batch, tower):
        return output(params, batch, tower, {"m": tower.local["n"] + 1})  # here

    def forward_that_differs(params, batch, tower):
        tangent = jax.jvp(straight, (params["b"], batch["y"][0]), (1.0, 0.0))[1]
        return output(params, batch, tower, {"m": tangent})

    def foreign_call(params, batch, tower):
        call = jax.ffi.ffi_call("towerjax_test", S((3,), jnp.float32))
        w = lax.stop_gradient(params["w"])
        return output(params, batch, tower, {"m": call(w).sum()})  # here

    def own_row_of_a_merge(params, batch, tower):
        m = tower.merge_call(lambda strategy, y: y, batch["y"].sum())  # here
        return output(params, batch, tower, {"m": m})


@jax.custom_jvp
def straight(b, y):
    return b


straight.defjvp(lambda p, t: (p[0], t[0] * p[1]))  # here


DIFFERS = {"forgotten_mean": "batch", "by_tower_weight": "tower.weight"}
DIFFERS |= {"by_local": "state.local['n'].value", "foreign_call": "ffi_call"}
DIFFERS |= dict.fromkeys(["by_tower_id", "by_tower_key"], "tower.id")
DIFFERS["own_row_of_a_merge"] = "tower.id"  # of the others: batch['y']

# The backward of a custom_vjp may add up over towers.


def gradient_of_a_mean(params, batch, tower):
    return output({**params, "w": adding(tower, mean=True)(params["w"])}, batch, tower)


def statistics_of_all(params, batch, tower):
    """As in a batch norm of one's own: cotangents of sums over all rows."""
    hidden = (batch["x"] * params["w"][None]).sum(1) + params["b"]
    total = adding(tower, forward=lambda x: lax.psum(x, tower.axis_names))
    losses = (hidden * total(hidden.sum()) - batch["y"]) ** 2
    return tj.Weighted.mean(losses, tower.weight)


@pytest.mark.slow
@pytest.mark.parametrize("ops", [tj.AllReduce(), tj.PinnedTree()])
@pytest.mark.parametrize("loss_fn", [gradient_of_a_mean, statistics_of_all])
def test_what_a_backward_adds_up_by_right_trains_as_one_tower(loss_fn, ops):
    rng = np.random.default_rng(0)
    batch = {x: rng.normal(size=s.shape).astype(s.dtype) for x, s in BATCH.items()}
    params = {"w": np.float32([1, -2, 3]), "b": np.float32(0.5)}
    after = []
    for devices, towers in (1, 1), (1, 4), (2, 4):
        names = [f"cpu:{i}" for i in range(devices)]
        strategy = tj.Mirrored(names, towers=towers, cross_tower_ops=ops)
        step = tj.build_train_step(loss_fn, optax.sgd(1e-4), strategy)
        after.append(step(step.init(params), batch)[0].params)
    for other in after[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5), after[0], other)


class Hanging:
    def sum_where_it_is_needed(params, batch, tower):
        def summed():
            return tower.reduce(R.MEAN, batch["y"].sum())  # here

        m = lax.cond(batch["y"][0] > 0, summed, lambda: 0.0)
        return output(params, batch, tower, {"m": tower.reduce(R.MEAN, m)})

    def switched_by_tower(params, batch, tower):
        mean = lambda: lax.pmean(params["b"], tower.axis_names)  # here  # noqa: E731
        m = lax.switch(tower.id % 2, [lambda: 0.0, mean])
        return output(params, batch, tower, {"m": tower.reduce(R.MEAN, m)})

    def gather_under_a_branch_of_a_scan(params, batch, tower):
        def body(carry, y):
            gathered = lambda: tower.all_gather(y).sum()  # here  # noqa: E731
            return carry + lax.cond(y > 0, gathered, lambda: y), None

        m = lax.scan(body, 0.0, batch["y"])[0]
        return output(params, batch, tower, {"m": tower.reduce(R.MEAN, m)})


def refusal(loss_fn, num_towers=8, optimizer=None, ops=None, **options):
    strategy = tj.Mirrored(towers=num_towers, cross_tower_ops=ops or tj.AllReduce())
    optimizer = optimizer or optax.sgd(0.1)
    step = tj.build_train_step(loss_fn, optimizer, strategy, **options)
    local = {"n": tj.TowerLocal(np.float32(0), R.SUM)}
    with pytest.raises(tj.ReplicationError) as caught:
        step.check(PARAMS, BATCH, local=local)
    return str(caught.value)


def marked(function, text="# here"):
    lines, _ = inspect.getsourcelines(inspect.getmodule(function))
    source, start = inspect.getsourcelines(function)
    numbers = [start + i for i, line in enumerate(source) if text in line]
    if not numbers:  # the rule of a derivative stands below it, and not in it
        numbers = [i for i, x in enumerate(lines, 1) if x.startswith("straight.def")]
    [number] = numbers
    return f"test_proof_refused.py:{number}"


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("loss_fn", cases(Differing).values(), ids=cases(Differing))
def test_what_differs_is_refused(loss_fn):
    text = refusal(loss_fn)
    assert text.startswith("These outputs must be the same on every tower, but are not")
    [line] = [line for line in text.splitlines() if line.startswith("  - ")]
    source = DIFFERS.get(loss_fn.__name__, "batch['y']")
    assert f"  - metrics['m'] depends on {source}" in line
    assert marked(loss_fn) in line


def mean_of_all(x, params, tower):
    return tower.mean(jnp.tanh(x @ params["w"]), tower.weight) / tower.num_towers


def mean_of_all_by_hand(x, params, tower):
    own = jnp.tanh(x @ params["w"]) * tower.weight
    total, weight = (tower.reduce(R.SUM, v.sum()) for v in (own, tower.weight))
    return total / weight / tower.num_towers


def own_rows(x, params, tower):
    weight = tower.reduce(R.SUM, tower.weight.sum())
    return (jnp.tanh(x @ params["w"]) * tower.weight).sum() / weight


@pytest.mark.slow
@pytest.mark.parametrize("energy", [mean_of_all, mean_of_all_by_hand, own_rows])
def test_forces_of_a_share_or_of_ones_own_rows_are_those_of_one_tower(energy):
    def loss_fn(params, batch, tower):
        forces = 13 * jax.grad(energy)(batch["x"], params, tower)
        squares = ((forces - batch["x"]) ** 2).sum(1)
        return tj.Weighted.mean(squares, tower.weight)

    rng = np.random.default_rng(0)
    w = rng.normal(size=3)
    x = rng.normal(size=(13, 3))

    def of_one(w):  # in NumPy's float64
        forces = (1 - np.tanh(x @ w) ** 2)[:, None] * w
        return ((forces - x) ** 2).sum(1).mean()

    with jax.enable_x64(True):
        near = [of_one(w + 1e-6 * e) - of_one(w - 1e-6 * e) for e in np.eye(3)]
        how = optax.sgd(1.0), tj.Mirrored(towers=4)
        step = tj.build_train_step(loss_fn, *how, remainder="pad")
        state, metrics = step(step.init({"w": w}), {"x": x})
        np.testing.assert_allclose(metrics["loss"], of_one(w), rtol=1e-12)
        np.testing.assert_allclose(w - state.params["w"], np.array(near) / 2e-6, 1e-6)


class Factors:
    def by_a_number_of_rows(params, batch, tower):
        scale = jnp.std(batch["y"])
        return output(params, batch, tower).loss / scale  # here

    def a_term_by_tower_id(params, batch, tower):
        mean = output(params, batch, tower).loss
        factor = 0.1 * tower.id  # here
        return mean + factor * mean + tj.penalty(params["b"])

    def a_metric_by_tower_key(params, batch, tower):
        scale = jax.random.uniform(tower.rng)  # here
        mean = output(params, batch, tower).loss
        return output(params, batch, tower, {"m": scale * mean})


def by_what_all_share(params, batch, tower):
    mean = output(params, batch, tower).loss
    number = tower.reduce(R.MEAN, batch["y"].mean()) + norm(params) * tower.step
    drawn = jax.random.uniform(tower.shared_rng)
    return number * mean - drawn * mean / tower.num_towers


def by_own_parameters(params, batch, tower):
    return jnp.exp(params["b"]) * output(params, batch, tower).loss


@pytest.mark.parametrize("loss_fn", cases(Factors).values(), ids=cases(Factors))
def test_a_factor_of_a_mean_that_differs_is_refused(loss_fn):
    first, told, *advice = refusal(loss_fn).splitlines()
    of_rows = loss_fn is Factors.by_a_number_of_rows
    source = "batch['y']" if of_rows else "tower.id"
    assert first.startswith("A mean's factor, or the value in tj.penalty, differs")
    assert f"depends on {source};" in told and marked(loss_fn) in told
    assert "tj.Weighted.mean(values * factor, weight)" in advice[0]
    mean = "tower.mean(values, tower.weight)"
    assert mean in (text := " ".join(advice)) and "with tower.shared_rng" in text


@pytest.mark.slow
@pytest.mark.parametrize(("loss_fn", "options"), [
    (by_what_all_share, {"audit": False}),  # it depends on their number
    (by_own_parameters, {}),
    (by_own_parameters, {"extend": LocalSGD(every=2)}),  # each has its own
])  # fmt: skip
def test_a_factor_of_a_mean_that_all_towers_share_is_none(loss_fn, options):
    strategy = tj.Mirrored(towers=8)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)
    step.check(PARAMS, BATCH)


@pytest.mark.parametrize("loss_fn", cases(Hanging).values(), ids=cases(Hanging))
def test_what_would_hang_is_refused(loss_fn):
    text = refusal(loss_fn)
    assert text.startswith("Only some towers reach these collectives, so devices would")
    [line] = [line for line in text.splitlines() if line.startswith("  - ")]
    assert marked(loss_fn) in line and "whose predicate differs" in line


def test_an_optimizer_that_communicates_is_refused():
    def add_up(updates, params=None):
        return jax.tree.map(lambda g: lax.psum(g, "towerjax_tower"), updates)

    optimizer = optax.chain(optax.stateless(add_up), optax.sgd(0.1))
    text = refusal(output, optimizer=optimizer)
    assert "The update must not communicate" in text and "towerjax_tower" in text
