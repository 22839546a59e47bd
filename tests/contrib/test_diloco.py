"""Towers that go alone and meet now and then: against T trainings in NumPy float64."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.contrib import DiLoCo, LocalSGD

T = 4
STEPS = 9
INNER = 0.1
MOMENTUM = 0.5
OUTER = 0.7
NESTEROV = 0.9
FRAGMENT = {"b": 1, "w": 0}  # the larger leaf first
START = {"b": np.float32(0.25), "w": np.array([0.5, -1, 2], np.float32)}
SYNCS = {
    "local": LocalSGD(every=3),
    "diloco": DiLoCo(every=2),
    "streaming": DiLoCo(every=4, fragments=2, overlap=3, keep=0.5),
}


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params["w"] + params["b"] - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight * batch["weight"])


def batches(rows=14):
    """So many rows: four towers of two micro-batches share them unevenly."""
    rng = np.random.default_rng(0)
    return [
        {
            "x": rng.normal(size=(rows, 3)).astype(np.float32),
            "y": rng.normal(size=rows).astype(np.float32),
            "weight": rng.uniform(0.05, 1, rows).astype(np.float32),
        }
        for _ in range(STEPS)
    ]


WITH_MOMENTUM = optax.sgd(INNER, momentum=MOMENTUM)
PLAIN = optax.sgd(INNER)
OF_STRATEGY = ("tower_loop", "state", "cross_tower_ops")


@functools.cache
def build(sync, devices=1, optimizer=WITH_MOMENTUM, loss_fn=loss_fn, **options):
    """A step, whose programs all tests share."""
    names = [f"cpu:{i}" for i in range(devices)]
    given = {k: options.pop(k) for k in OF_STRATEGY if k in options}
    strategy = tj.Mirrored(names, towers=T, **given)
    options = {"remainder": "pad", "micro_batches": 2, **options}
    return tj.build_train_step(loss_fn, optimizer, strategy, extend=sync, **options)


def trained(step, given=None, state=None):
    """The state after the batches, and the loss that each step told."""
    state = state or step.init(START)
    losses = []
    for batch in batches() if given is None else given:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    step.settle()
    return state, losses


class Oracle:
    """T local trainings and the outer update, in NumPy float64."""

    def __init__(self, sync):
        self.sync = sync
        first = {name: np.float64(x) for name, x in START.items()}
        self.outer = dict(first)
        self.velocity = {name: 0.0 for name in first}
        self.towers = [dict(first) for _ in range(T)]
        self.trace = [{name: 0.0 for name in first} for _ in range(T)]
        self.weight = {name: np.zeros(T) for name in first}
        self.loss = np.zeros(2)
        self.told = np.nan
        self.done = 0

    def step(self, batch):
        padded = -(-len(batch["y"]) // (2 * T)) * 2 * T // T
        for t in range(T):
            rows = slice(t * padded, (t + 1) * padded)
            self.alone(t, *(np.float64(batch[k][rows]) for k in ("x", "y", "weight")))
        self.done += 1
        plan = self.sync
        if isinstance(plan, LocalSGD):
            plan = DiLoCo(plan.every)
        for name in self.outer:
            at = (FRAGMENT[name] + 1) * plan.every // plan.fragments
            at = plan.every if plan.fragments == 1 else at
            if self.done >= at and (self.done - at) % plan.every == 0:
                self.meet(name)
            since = self.done - at - plan.overlap
            if since >= 0 and since % plan.every == 0:
                for tower in self.towers:
                    new = plan.keep * tower[name] + (1 - plan.keep) * self.outer[name]
                    tower[name] = new
        if self.done % (plan.every // plan.fragments) == 0:
            self.told = self.loss[0] / self.loss[1]
            self.loss = np.zeros(2)

    def alone(self, t, x, y, weight):
        own = self.towers[t]
        errors = x @ own["w"] + own["b"] - y
        if weight.sum() == 0 or not np.isfinite(errors).all():
            return
        self.loss += [(weight * errors**2).sum(), weight.sum()]
        slope = 2 * weight * errors / weight.sum()
        for name, grad in {"w": slope @ x, "b": slope.sum()}.items():
            self.trace[t][name] = grad + MOMENTUM * self.trace[t][name]
            own[name] = own[name] - INNER * self.trace[t][name]
            self.weight[name][t] += weight.sum()

    def meet(self, name):
        moved = [self.outer[name] - tower[name] for tower in self.towers]
        move = np.average(moved, axis=0, weights=self.weight[name])
        if isinstance(self.sync, LocalSGD):
            self.outer[name] = self.outer[name] - move
        else:
            self.velocity[name] = move + NESTEROV * self.velocity[name]
            step = move + NESTEROV * self.velocity[name]
            self.outer[name] = self.outer[name] - OUTER * step
        self.weight[name] = np.zeros(T)


def expected(sync, given=None):
    oracle = Oracle(sync)
    told = []
    for batch in batches() if given is None else given:
        oracle.step(batch)
        told.append(oracle.told)
    return oracle, told


def assert_as_expected(state, losses, sync, given=None):
    oracle, told = expected(sync, given)
    np.testing.assert_allclose(losses, told, rtol=2e-5)
    own = state.local["own"].value.params
    for name, outer in oracle.outer.items():
        np.testing.assert_allclose(state.params[name], outer, rtol=2e-5, atol=2e-6)
        towers = np.array([tower[name] for tower in oracle.towers])
        np.testing.assert_allclose(own[name], towers, rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def streaming():
    """The step whose rounds have everything, on four devices."""
    return build(SYNCS["streaming"], devices=4)


def counting(params, batch, tower):
    local = {"rows": tower.local["rows"] + tower.weight.sum()}
    return tj.TowerOutput(loss_fn(params, batch, tower), local=local)


@pytest.fixture(scope="module")
def careful():
    """Local SGD with a fixed parameter, local variables, and steps that are skipped."""
    options = {"on_nonfinite": "skip", "guard": "gradients", "loss_fn": counting}
    return build(
        SYNCS["local"], 2, trainable=lambda name, x: name != "fixed", **options
    )


def begun(careful):
    local = {"rows": tj.TowerLocal(np.float32(0), tj.Reduction.NONE)}
    return careful.init(START | {"fixed": np.float32(7)}, local=local)


@pytest.mark.slow
def test_towers_train_alone_and_the_outer_update_is_made_of_them(streaming):
    assert_as_expected(*trained(streaming), SYNCS["streaming"])


@pytest.mark.slow
def test_local_sgd_averages_what_is_trained_and_a_tower_skips_its_own_step(careful):
    sync = SYNCS["local"]
    for given in (batches(), spoiled()):
        state, losses = trained(careful, given, begun(careful))
        assert_as_expected(state, losses, sync, given)
        assert state.local["own"].value.params["fixed"] is None
        assert state.params["fixed"] == 7
        # Of 14 rows the last of four towers has 2; a step that is skipped counts none.
        skipped = np.array([4, 0, 4, 0]) * (given[1]["x"][9, 0] != given[1]["x"][9, 0])
        rows = STEPS * np.array([4, 4, 4, 2]) - skipped
        assert state.local["rows"].value.tolist() == rows.tolist()


def branches(text):
    """The computations of an HLO text, and those that a conditional may leave out."""
    parts = re.findall(r"^(?:ENTRY )?(%[\w.]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S)
    chosen = re.findall(r"branch_computations=\{([^}]*)\}", text)
    return dict(parts), {name for names in chosen for name in names.split(", ")}


def sent(body):
    """The bytes of a computation's all-reduces."""
    found = re.findall(r"= (.*?) all-reduce\(", body)
    shapes = re.findall(r"[fs]32\[(\d*)\]", " ".join(found))
    return sum(4 * int(n or 1) for n in shapes)


@pytest.mark.slow
def test_between_rounds_nothing_is_sent_and_then_what_the_formula_says(streaming):
    text = streaming.program(streaming.init(START), batches()[0]).call.as_text()
    bodies, chosen = branches(text)
    others = r"(all-gather|all-to-all|collective-\w+|reduce-scatter)(-start)?\("
    assert not re.search(others, text)
    names = [name for name, body in bodies.items() if " all-reduce(" in body]
    assert len(names) == 2 and chosen.issuperset(names)
    # A fragment's numbers, 3 sums of weights and losses, and the faults of 2 steps.
    formula = sorted(4 * (n + 3 + 2) for n in (3, 1))
    assert sorted(sent(bodies[name]) for name in names) == formula


@pytest.mark.slow
def test_what_a_tower_updates_is_not_copied():
    def squares(params, batch, tower):
        return tj.Weighted.mean((batch["x"] @ params["m"]).sum(-1) ** 2, tower.weight)

    step = build(SYNCS["local"], 4, loss_fn=squares, optimizer=optax.adam(0.1))
    state = step.init({"m": np.ones((3, 70), np.float32)})
    text = step.program(state, batches()[0]).call.as_text()
    assert "f32[1,3,70]" in text and not re.search(r"70\]\S* copy\(", text)


@pytest.mark.slow
def test_the_bits_do_not_depend_on_the_devices():
    """Nor do those of an optimizer that divides leaves by one number."""

    def recurrent(params, batch, tower):
        def cell(h, _):
            return jnp.tanh(batch["x"] @ params["a"] + h @ params["b"]), None

        h, _ = jax.lax.scan(cell, jnp.zeros((len(batch["y"]), 5)), length=2)
        return tj.Weighted.mean((h @ params["c"])[:, 0] ** 2, tower.weight)

    rng = np.random.default_rng(0)
    sizes = {"a": 3, "b": 5, "c": 5}
    start = {k: rng.normal(size=(n, 5)).astype("f") for k, n in sizes.items()}
    pinned = {
        "tower_loop": "scan",
        "cross_tower_ops": tj.PinnedTree(),
        "micro_batches": 1,
    }
    pinned |= {"optimizer": optax.adam(0.01), "loss_fn": recurrent}
    ends = []
    for devices in (1, 4):
        step = build(SYNCS["diloco"], devices, **pinned)
        state, told = trained(step, batches()[:3], step.init(start))
        ends.append(jax.tree.leaves((state.params, state.local, told)))
    for one, *others in zip(*ends, strict=True):
        for other in others:
            assert np.array_equal(one, other, equal_nan=True)


@pytest.mark.slow
def test_it_goes_on_in_the_middle_of_a_round_on_other_devices(streaming, tmp_path):
    # between what is sent and what is taken
    given = batches()
    at = 5
    store = tj.Checkpointer(tmp_path, every=at)
    quiet = {"progress": False, "checkpointer": store}
    state, _ = tj.run(streaming, streaming.init(START), given[:at], steps=at, **quiet)
    other = build(SYNCS["streaming"], 2)
    quiet |= {"steps": STEPS}
    state, history = tj.run(other, other.init(START), given, **quiet)
    assert int(state.step) == STEPS and len(history.metrics["loss"]) == STEPS - at
    _, told = expected(SYNCS["streaming"])
    losses = [*told[:at], *history.metrics["loss"]]
    assert_as_expected(state, losses, SYNCS["streaming"])


@pytest.mark.slow
def test_another_number_of_towers_cannot_go_on(streaming, tmp_path):
    quiet = {"progress": False, "checkpointer": tj.Checkpointer(tmp_path, every=1)}
    tj.run(streaming, streaming.init(START), batches()[:1], steps=1, **quiet)
    strategy = tj.Mirrored(["cpu:0"], towers=2)
    sync = SYNCS["streaming"]
    two = tj.build_train_step(
        loss_fn, WITH_MOMENTUM, strategy, remainder="pad", extend=sync
    )
    with pytest.raises(tj.CheckpointError, match=r"Use \d+ towers, on any devices"):
        tj.run(two, two.init(START), batches(), steps=2, **quiet)
    state = two.init(START)
    text = r"another number of towers than 4: .*\. Start anew with step\.init\(stat"
    with pytest.raises(ValueError, match=text):
        streaming(state, batches()[0])
    streaming(streaming.init(state.params), batches()[0])  # as it says


@pytest.mark.slow
def test_it_is_a_function(streaming):
    start = streaming.shapes(START)
    after, metrics = jax.eval_shape(streaming.fn, start, batches()[0])
    assert jax.tree.structure(after) == jax.tree.structure(start)
    assert metrics["loss"].shape == ()


@pytest.mark.slow
def test_the_outer_parameters_are_evaluated(streaming):
    state, _ = trained(streaming)
    measure = tj.build_eval_step(
        lambda *args: {"loss": loss_fn(*args)}, streaming.strategy
    )
    found = tj.evaluate(measure, state, batches())["loss"]
    outer, _ = expected(SYNCS["streaming"])
    total = np.zeros(2)
    for x in batches():
        errors = x["x"] @ outer.outer["w"] + outer.outer["b"] - x["y"]
        total += [(x["weight"] * errors**2).sum(), x["weight"].sum()]
    np.testing.assert_allclose(found, total[0] / total[1], rtol=2e-5)
    of_every_step = dataclasses.replace(state, local={})
    assert tj.evaluate(measure, of_every_step, batches())["loss"] == found


@pytest.mark.slow
def test_a_sweep_trains_towers_that_go_alone():
    def member(rate):
        inner = optax.sgd(rate, momentum=MOMENTUM)
        step = build(SYNCS["local"], 2, optimizer=inner)
        return step, step.init(START)

    def evaluate(state, rate):
        return {"b": np.asarray(state.local["own"].value.params["b"])[3]}

    options = {"order": "together", "evaluate": evaluate, "progress": False}
    found = tj.sweep(member, {"rate": [0.05, INNER]}, batches(), **options)
    oracle, _ = expected(SYNCS["local"])
    own = oracle.towers[3]["b"]
    assert found.members[1].evaluation["b"] == pytest.approx(own, rel=2e-5)


def spoiled():
    """Batches whose second has a NaN on tower 2, and whose fourth one on tower 0."""
    given = batches()
    for number, row in ((1, 9), (3, 0)):
        given[number]["x"][row] = np.nan
    return given


@pytest.mark.slow
def test_it_is_told_when_towers_meet(streaming):
    state = streaming.init(START)
    given = batches()[:2] + spoiled()[1:2] + batches()[3:4]
    for batch in given:
        state, _ = streaming(state, batch)
    text = "^A tower's loss or gradient was not finite in step 3. That tower left"
    with pytest.raises(tj.NonFiniteError, match=text) as told:
        streaming.settle()
    assert told.value.step == 3 and "changed nothing" not in str(told.value)
    (here, *_) = streaming.locate(streaming.init(START), given[2])
    assert (here.tower, here.part, here.kind) == (2, "loss", "NaN")
    _, told = expected(SYNCS["streaming"], given)
    assert_as_expected(state, told, SYNCS["streaming"], given)


@pytest.mark.slow
def test_a_run_tells_the_true_step_and_looks_only_into_its_batch(streaming):
    """Of steps 2 and 4 that are not finite, the towers meet after 2, and after 4."""
    quiet = {"progress": False}
    for given, places in ((spoiled(), 1), (spoiled()[3:4] + batches(), 0)):
        with pytest.raises(tj.NonFiniteError, match="in step [12]. That") as told:
            tj.run(streaming, streaming.init(START), given, **quiet)
        step = 2 if places else 1
        assert (told.value.step, len(told.value.locations) > 0) == (step, places > 0)
        assert told.value.history.skipped == (step,)
        assert int(told.value.state.step) >= 2


def two_means(params, batch, tower):
    return loss_fn(params, batch, tower) + loss_fn(params, batch, tower)


def total(params, batch, tower):
    return loss_fn(params, batch, tower).sum


def with_metrics(params, batch, tower):
    loss = loss_fn(params, batch, tower)
    return tj.TowerOutput(loss, metrics={"again": loss})


def with_extra(params, batch, tower):
    return tj.TowerOutput(loss_fn(params, batch, tower), extra=tower.extra)


def count(state, merged):
    return state.extra + 1


REFUSED = {
    "several means": (dict(loss_fn=two_means), "sum of several means"),
    "metrics": (dict(loss_fn=with_metrics), r"TowerOutput\(metrics=...\)"),
    "extra": (dict(loss_fn=with_extra), r"or extra=, but"),
    "sharded": (dict(state="sharded"), "state='sharded'"),
    "sum": (dict(loss_fn=total, loss_reduction=tj.Reduction.SUM), "or has loss_reduc"),
    "update_extra": (dict(update_extra=count), "update_extra=... needs all"),
    "fragments": (dict(sync=DiLoCo(3, fragments=3)), "trained, 2. Use at most"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name):
    given, text = REFUSED[name]
    options = {"sync": SYNCS["local"], **given}
    extra = {"extra": np.float32(1)} if "extra" in name else {}
    with pytest.raises(ValueError, match=text):
        build(options.pop("sync"), **options).check(START, batches()[0], **extra)


@pytest.mark.slow
def test_padding_that_nothing_masks_is_refused():
    def unmasked(params, batch, tower):
        return tj.Weighted.mean(batch["x"] @ params["w"] * batch["weight"])

    step = build(SYNCS["local"], loss_fn=unmasked)
    with pytest.raises(ValueError, match="does not depend on tower.weight"):
        step(step.init(START), batches()[0])


ROUNDS = [("every", 0), ("every", 2.0), ("every", True), ("fragments", 3)]
ROUNDS += [("fragments", 0), ("overlap", 4), ("overlap", -1), ("keep", 1.0)]
ROUNDS += [("keep", "half"), ("outer", 0.7)]


@pytest.mark.parametrize(("name", "value"), ROUNDS)
def test_rounds_say_what_they_must_be(name, value):
    with pytest.raises(ValueError, match=rf"DiLoCo\.{name}|fragments"):
        DiLoCo(**{"every": 4, name: value})
    if name == "every":
        with pytest.raises(ValueError, match=r"LocalSGD\.every"):
            LocalSGD(value)


def test_they_are_data():
    assert LocalSGD(4) == LocalSGD(every=4) != LocalSGD(5)
    text = "DiLoCo(every=4, fragments=2, overlap=0, keep=0.0)"
    assert repr(DiLoCo(4, fragments=2)) == text
    assert hash(DiLoCo(4)) == hash(DiLoCo(4))
    with pytest.raises(dataclasses.FrozenInstanceError):
        LocalSGD(4).every = 5
    assert build(LocalSGD(4)).init(START).local["own"].value.faults.shape == (T, 4)


# Another extend= in mid-training.


def advised(step, state, call):
    """The state after what the error says to write, and what it says."""
    with pytest.raises(ValueError, match=r"another extend=") as error:
        call(state)
    code = str(error.value).split("anew: ")[1].removesuffix(".")
    names = {"dataclasses": dataclasses, "step": step, "state": state}
    exec(code, names)
    return names["state"], code


LOCAL = "local={**state.local, **fresh.local})"
OPTIMIZER = "opt_state=fresh.opt_state"
SWITCHES = {
    "every step to rounds": (None, SYNCS["local"], f"{OPTIMIZER}, {LOCAL}"),
    "rounds to every step": (SYNCS["local"], None, f"{OPTIMIZER})"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SWITCHES)
def test_a_step_says_how_the_state_of_another_extend_goes_on(name):
    *made, text = SWITCHES[name]
    options = dict(optimizer=optax.adam(0.1), donate=False)
    first, then = (build(sync, **options) for sync in made)
    state = first.init(START)
    batch = batches()[0]
    for call in (
        lambda state: then.check(state, batch),
        lambda state: then.check(then.place(state), batch),
        lambda state: jax.eval_shape(then.fn, state, batch),
    ):
        going_on, code = advised(then, state, call)
        assert code.endswith(text), code
        call(going_on)
    if "bits" in name:
        assert going_on.opt_state is state.opt_state
    advised(then, state, lambda state: then(state, batch))


@pytest.mark.slow
@pytest.mark.parametrize("weight", [1.0, None])
def test_rounds_of_one_step_are_the_synchronous_step(weight):
    given = [x | ({"weight": x["weight"] * 0 + 1} if weight else {}) for x in batches()]
    every = build(None, devices=4, optimizer=PLAIN)
    alone = build(LocalSGD(every=1), devices=4, optimizer=PLAIN)
    (state, losses) = trained(every, given)
    (other, others) = trained(alone, given)
    np.testing.assert_allclose(losses, others, rtol=2e-6)
    for a, b in zip(*map(jax.tree.leaves, (state.params, other.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=5e-6, atol=1e-6)
