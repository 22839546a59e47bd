"""What a step's passes merge is proved equal to one tower, without a run."""

import dataclasses
import functools

import audited_losses
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from audited_losses import BATCH, PARAMS, errors, mean, scores
from jax import lax
from jax.sharding import PartitionSpec as P
from layouts import names
from one_tower_programs import answers_of_step

import towerjax as tj
from towerjax.prover.equality.rules.rules import RULES

TWO = tj.Mirrored(("cpu:0",), towers=2)


def says_of(step, state=None, batch=BATCH):
    """What is said of each leaf of a step."""
    state = step.init(PARAMS, rng=jax.random.key(0)) if state is None else state
    return {x.leaf: x for x in answers_of_step(step, state, batch)}


def train(loss_fn, **options):
    return tj.build_train_step(loss_fn, optax.sgd(0.1), TWO, **options)


def all_say(found):
    return {x.says for x in found.values()}


NAMES = ["masked_tokens", "dropout", "penalised", "advantage_less_the_mean_of_all"]


@pytest.mark.few_fast(3)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("remainder", ["error", "pad"])
def test_a_right_loss_is_proved_with_its_metrics(name, remainder):
    def loss_fn(params, batch, tower):
        loss = audited_losses.RIGHT[name](params, batch, tower)
        hits = tj.metrics.accuracy(batch["y"] > 0, batch["y"] > 0, tower.weight)
        return tj.TowerOutput(loss, {"hits": hits})

    found = says_of(train(loss_fn, remainder=remainder))
    assert all_say(found) == {"proved"} and "metrics['hits']" in "".join(found)


def test_a_metric_that_depends_on_the_split_is_said_by_name():
    def loss_fn(params, batch, tower):
        worst = tj.Sum(errors(params, batch).max())
        return tj.TowerOutput(mean(errors(params, batch), tower), {"worst": worst})

    found = says_of(train(loss_fn))
    assert found["loss"].says == "proved"
    [odd] = [x for x in found.values() if x.says != "proved"]
    assert "worst" in odd.leaf and "a maximum over the tower's rows" in odd.why


@pytest.mark.slow
def test_a_rule_of_a_derivative_is_walked():
    name = "gradient_by_the_number_of_rows"
    found = says_of(train(audited_losses.WRONG[name]))
    assert found["loss"].says == "proved"
    [of_w] = [x for leaf, x in found.items() if "gradient" in leaf and "'w'" in leaf]
    assert of_w.says == "refuted" and "T times" in of_w.why


def test_gradients_are_left_out_where_they_follow():
    found = says_of(train(lambda p, b, t: mean(errors(p, b), t)))
    assert [*found] == ["loss"]


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", audited_losses.WRONG_STEPS)
def test_a_wrong_step_of_ones_own_is_not_proved(name):
    def tower_fn(state, batch, tower):
        loss_fn = lambda params: mean(errors(params, batch), tower)  # noqa: E731
        loss, grads = tj.value_and_grad(loss_fn)(state.params)
        return audited_losses.WRONG_STEPS[name](loss, grads)

    step = tj.build_step(tower_fn, lambda state, merged: (state, {}), TWO)
    found = says_of(step).items()
    # No loss reads k, whose gradient is 0.
    assert "proved" not in {x.says for leaf, x in found if "'k'" not in leaf}


@pytest.mark.slow
def test_towers_that_meet_in_micro_batches_are_unknown():
    def loss_fn(params, batch, tower):
        centred = scores(params, batch) - tower.mean(batch["y"], tower.weight)
        return mean(centred**2, tower)

    assert all_say(says_of(train(loss_fn))) == {"proved"}
    found = says_of(train(loss_fn, micro_batches=2))
    assert "one micro-batch" in found["loss"].why
    alone = train(lambda p, b, t: mean(errors(p, b), t), micro_batches=2)
    assert all_say(says_of(alone)) == {"proved"}


def by_row_numbers(params, batch, tower):
    number = tower.id * tower.rows + jnp.arange(tower.rows)
    return mean(errors(params, batch) * jnp.tanh(0.1 * number), tower)


IN_PARTS = {
    "a term of each micro-batch": lambda p, b, t: tj.Weighted(
        errors(p, b) @ t.weight + (p["w"] ** 2).sum() / t.num_towers, t.weight.sum()
    ),
    "the number of micro-batches": lambda p, b, t: tj.Weighted(
        errors(p, b) @ t.weight * t.micro_batches, t.weight.sum()
    ),
    "numbers of a micro-batch's rows": by_row_numbers,
}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", IN_PARTS)
def test_what_depends_on_micro_batches_is_not_proved(name):
    """It is the same for any number of towers, which have one each."""
    assert all_say(says_of(train(IN_PARTS[name]))) == {"proved"}
    found = says_of(train(IN_PARTS[name], micro_batches=2))
    assert "proved" not in all_say(found), found


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("remainder", ["error", "pad"])
@pytest.mark.parametrize("towers", [1, 2])
def test_what_is_added_up_is_proved_in_micro_batches(towers, remainder):
    def loss_fn(params, batch, tower):
        kept = jax.random.bernoulli(tower.rng, 0.5, batch["y"].shape)
        shared = (params["w"] ** 2).sum() / tower.num_towers / tower.micro_batches
        weight = tower.weight * kept
        return tj.Weighted(errors(params, batch) @ weight + shared, weight.sum())

    strategy = tj.Mirrored(("cpu:0",), towers=towers)
    how = {"remainder": remainder, "micro_batches": 2}
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **how)
    assert all_say(says_of(step)) == {"proved"}


@pytest.mark.slow
def test_variables_that_micro_batches_change_are_unknown():
    def loss_fn(params, batch, tower):
        own = tower.local["mean"]
        loss = mean((scores(params, batch) - own) ** 2, tower)
        return tj.TowerOutput(loss, local={"mean": own + 1.0})

    local = {"mean": tj.TowerLocal(np.float32(0), tj.Reduction.MEAN)}
    for micro_batches, says in ((1, "proved"), (2, "unknown")):
        step = train(loss_fn, micro_batches=micro_batches)
        assert says_of(step, step.init(PARAMS, local=local))["loss"].says == says


def test_other_leaves_for_another_number_of_towers_are_unknown():
    def fn(state, batch, tower):
        value = state.params["w"]
        return {"value": value if tower.num_towers == 1 else tj.Sum(value)}

    assert "different leaves" in of_step(fn)["value"].why


def of_two_passes(first):
    def second(state, batch, tower, merged):
        centre = merged["centre"].value
        return {"spread": mean((batch["y"] - centre) ** 2, tower)}

    return of_step([first, second])


@pytest.mark.slow
def test_a_later_pass_is_proved_where_those_before_it_are():
    right = lambda state, batch, tower: {"centre": mean(batch["y"], tower)}  # noqa: E731
    assert all_say(of_two_passes(right)) == {"proved"}

    def wrong(state, batch, tower):
        return {"centre": tj.Weighted(jnp.tanh(batch["y"].sum()), 1.0)}

    found = of_two_passes(wrong)
    assert found["pass 2"].why == "the results of pass 1 are not proved"


def of_step(tower_fn, **options):
    """What is said of a step of one's own that keeps its state."""
    update = lambda state, merged: (state, {})  # noqa: E731
    return says_of(tj.build_step(tower_fn, update, TWO, **options))


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("wrap", [tj.PerTower, lambda x: tj.PerTower(tj.Sum(x))])
def test_what_each_tower_has_of_its_own_is_unknown_in_a_later_pass(wrap):
    def first(state, batch, tower):
        return {"own": wrap(batch["y"].sum()), "all": mean(batch["y"], tower)}

    def second(name):
        def fn(state, batch, tower, merged):
            centre = merged["all"].value
            if name == "own":
                own = merged["own"].values
                centre = getattr(own, "value", own).sum()
            return {"spread": mean((batch["y"] - centre) ** 2, tower)}

        return fn

    assert of_step([first, second("own")])["pass 2: spread"].says == "unknown"
    assert all_say(of_step([first, second("all")])) == {"proved"}


@pytest.mark.slow
def test_a_mean_is_proved_with_its_sum_where_that_may_be_read():
    """Each tower weighs its mean by 1: towers add up to another sum and weight."""

    def by_one(state, batch, tower):
        return {"centre": tj.Weighted(batch["y"].mean(), 1.0)}

    def second(state, batch, tower, merged):
        weight = merged["centre"].weight
        return {"spread": mean(batch["y"] * weight, tower)}

    found = of_step([by_one, second])
    assert "may be read alone" in found["pass 1: centre"].why
    assert found["pass 2"].says == "unknown"
    assert "may be read alone" in of_step(by_one)["centre"].why

    def loss_fn(params, batch, tower):
        by_one = tj.Weighted(errors(params, batch).mean(), 1.0)
        return tj.TowerOutput(by_one, {"metric": by_one}, extra={"seen": by_one})

    update = lambda state, merged: {"seen": merged["seen"].sum}  # noqa: E731
    step = train(loss_fn, update_extra=update)
    found = says_of(step, step.init(PARAMS, extra={"seen": np.float32(0)}))
    assert found["loss"].says == found["metrics['metric']"].says == "proved"
    assert "may be read alone" in found["extra['seen']"].why


def table_rows(values, indices):
    def fn(state, batch, tower):
        ids = jnp.abs(batch["y"]).astype(int) % 3
        y = batch["y"] * tower.weight
        orders = {
            "joined": lambda x, y: jnp.concatenate([x, y]),
            "mixed": lambda x, y: jnp.stack([x, y], 1).reshape(-1),
            "no order": lambda x, y: jnp.zeros(2 * len(x), x.dtype),
        }
        found = orders[values](y, 2 * y), orders[indices](ids, (ids + 1) % 3)
        return tj.sparse.IndexedRows(*found, (3,))

    return fn


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("remainder", ["error", "pad"])
@pytest.mark.parametrize("order", ["joined", "mixed"])
def test_rows_of_a_table_are_pairs(order, remainder):
    [found] = of_step(table_rows("joined", order), remainder=remainder).values()
    assert (found.says == "proved") == (order == "joined"), found
    [found] = of_step(table_rows(order, "no order"), remainder=remainder).values()
    assert found.says == "proved"


def test_padding_counts_in_rows_of_a_table():
    def fn(state, batch, tower):
        ids = jnp.abs(batch["y"]).astype(int) % 3
        return tj.sparse.IndexedRows(batch["y"], ids, (3,))

    assert all_say(of_step(fn)) == {"proved"}
    [found] = of_step(fn, remainder="pad").values()
    assert found.why == "padding counts in it"


def test_a_later_pass_may_not_read_rows_of_a_table():
    def second(state, batch, tower, merged):
        return {"spread": mean((batch["y"] - merged.values[0]) ** 2, tower)}

    found = of_step([table_rows("joined", "joined"), second])
    assert "a per-tower value" in found["pass 2: spread"].why


def of_variable(update, start=0.0, update_fn=None):
    """What is said of a loss that reads a tower-local variable, and updates it."""

    def loss_fn(params, batch, tower):
        own = tower.local["mean"]
        loss = mean((scores(params, batch) - own) ** 2, tower)
        return tj.TowerOutput(loss, local={"mean": update(own, batch, tower)})

    local = {"mean": tj.TowerLocal(start, tj.Reduction.MEAN)}
    if update_fn is None:
        step = train(loss_fn)
    else:
        step = tj.build_step(tj.of_loss(loss_fn), update_fn, TWO)
    return says_of(step, step.init(PARAMS, local=local))["loss"]


def test_variables_that_stay_the_same_on_all_towers_are_replicated():
    def of_all(own, batch, tower):
        return 0.9 * own + 0.1 * tower.mean(batch["y"], tower.weight)

    assert of_variable(of_all).says == "proved"
    assert of_variable(lambda own, batch, tower: own + 1.0).says == "proved"


@pytest.mark.slow
def test_variables_of_a_tower_are_unknown_where_they_are_read():
    count = lambda own, batch, tower: own + 1.0  # noqa: E731
    other = tj.PerTower(np.float32([0, 1]))
    found = [
        of_variable(lambda own, batch, tower: 0.9 * own + batch["y"].mean()),
        of_variable(lambda own, batch, tower: own * tower.num_towers),
        of_variable(count, start=other),
        of_variable(count, update_fn=lambda state, merged: (state, {})),
    ]
    assert all("a per-tower value" in x.why for x in found)


@pytest.mark.parametrize("reduction", tj.Reduction)
def test_an_evaluation_reads_the_mean_of_variables(reduction):
    def metric_fn(params, batch, tower):
        own = tower.local["mean"]
        centre = 0.0 if own is None else own
        spread = mean((scores(params, batch) - centre) ** 2, tower)
        return {"spread": spread, "own": jnp.float32(centre)}

    local = {"mean": tj.TowerLocal(tj.PerTower(np.float32([0, 1])), reduction)}
    step = train(lambda p, b, t: mean(errors(p, b), t))
    state = step.init(PARAMS, local=local)
    found = all_say(says_of(tj.build_eval_step(metric_fn, TWO), state))
    is_read = reduction in (tj.Reduction.SUM, tj.Reduction.ONLY_FIRST_TOWER)
    assert found == {"unknown" if is_read else "proved"}


def test_variables_that_read_those_of_a_tower_are_unknown():
    def loss_fn(params, batch, tower):
        own = tower.local["a"]
        other = tower.local["b"]
        loss = mean((scores(params, batch) - own) ** 2, tower)
        local = {"a": own + other, "b": other + batch["y"].sum()}
        return tj.TowerOutput(loss, local=local)

    step = train(loss_fn)
    zero = tj.TowerLocal(np.float32(0), tj.Reduction.MEAN)
    found = says_of(step, step.init(PARAMS, local={"a": zero, "b": zero}))
    assert "a per-tower value" in found["loss"].why


def test_what_cannot_be_traced_for_other_rows_is_unknown():
    def loss_fn(params, batch, tower):
        assert len(batch["y"]) == len(BATCH["y"]) // 2
        return mean(errors(params, batch), tower)

    found = says_of(train(loss_fn))
    assert "traced for one tower of 24 rows, raises AssertionError" in found["step"].why


@pytest.mark.slow
@pytest.mark.parametrize("remainder", ["error", "pad"])
def test_the_number_of_the_steps_own_towers_is_compared_too(remainder):
    def loss_fn(params, batch, tower):
        once = 1.0 if tower.num_towers < 5 else 2.0
        return mean(once * errors(params, batch), tower)

    for towers, says in ((4, "proved"), (6, "unknown")):
        strategy = tj.Mirrored(("cpu:0",), towers=towers)
        how = {"remainder": remainder}
        step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **how)
        assert all_say(says_of(step)) == {says}
        right = lambda p, b, t: mean(errors(p, b), t)  # noqa: E731
        step = tj.build_train_step(right, optax.sgd(0.1), strategy, **how)
        assert all_say(says_of(step)) == {"proved"}


def test_a_step_of_thousands_of_towers_is_proved():
    def loss_fn(params, batch, tower):
        every = tower.all_gather(errors(params, batch).sum())
        return tj.Weighted(errors(params, batch).sum() / every.sum(), len(batch["y"]))

    step = tj.build_train_step(
        loss_fn, optax.sgd(0.1), tj.Mirrored(("cpu:0",), towers=4096)
    )
    found = answers_of_step(step, step.init(PARAMS), BATCH, rows=1)
    assert [x.says for x in found] == ["proved"]


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("extend", [tj.contrib.LocalSGD(2), tj.contrib.DiLoCo(2)])
def test_of_towers_that_train_alone_nothing_is_proved(extend):
    loss_fn = lambda p, b, t: mean(errors(p, b), t)  # noqa: E731
    step = train(loss_fn, extend=extend)
    assert says_of(step) == {}
    whys = [*step.check(step.init(PARAMS), BATCH).unproved.values()]
    assert len(whys) == 1 and whys[0].startswith("its towers merge nothing")


def test_sums_of_a_cross_tower_op_of_ones_own_are_unknown():
    @dataclasses.dataclass(frozen=True)
    class Halved:
        needs_every_tower = False

        def sum_over_towers(self, tree, axes):
            halves = jax.tree.map(lambda x: 0.5 * x, tree)
            return tj.AllReduce().sum_over_towers(halves, axes)

    strategy = tj.Mirrored(("cpu:0",), towers=2, cross_tower_ops=Halved())
    loss_fn = lambda p, b, t: mean(errors(p, b), t)  # noqa: E731
    [found] = says_of(tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)).values()
    assert found.says == "unknown" and "Halved" in found.why


def test_what_has_no_passes_is_unknown(monkeypatch):
    step = train(lambda p, b, t: mean(errors(p, b), t))
    passes = dataclasses.replace(step.plan.passes, each=())
    plan = dataclasses.replace(step.plan, passes=passes)
    monkeypatch.setattr(step, "plan", plan)
    found = answers_of_step(step, step.init(PARAMS), BATCH)
    assert [x.says for x in found] == ["unknown"]


def test_nothing_is_compiled(compiled):
    step = train(functools.partial(lambda p, b, t: mean(errors(p, b), t)))
    state = step.init(PARAMS)
    compiled.clear()
    assert all_say(says_of(step, state)) == {"proved"} and not compiled


# A `shard_map` over a tower's own devices: of features, or of the tower's rows.


def within(fn, in_specs, out_specs):
    """What is said of a loss of such a function of rows and parameters."""
    strategy = tj.Mirrored(names(4), towers=1, within={"data": 2, "model": 2})

    def loss_fn(params, batch, tower):
        mapped = jax.shard_map(
            lambda x, w: fn(x, w, tower),
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names={"data", "model"},
            check_vma=False,
        )
        out = mapped(batch["x"], params["w"])
        rows = tower.weight.sum()
        return mean(out - batch["y"], tower) if out.ndim else tj.Weighted(out, rows)

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    [found] = says_of(step).values()
    return found


OF_FEATURES = P(None, "model"), P("model")
OF_ROWS = P("data"), P()


@pytest.mark.slow
def test_what_a_towers_devices_make_of_their_features_is_proved():
    def product(x, w, tower):
        total = lax.psum(x @ w, "model")
        every = lax.all_gather(w, "model", tiled=True)
        turned = lax.ppermute(x, "model", [(0, 1), (1, 0)])
        most = lax.pmax(turned.max(1), "model") * lax.axis_index("data")
        return total + most + lax.psum(every.sum(), ("data", "model"))

    assert within(product, OF_FEATURES, P()).says == "proved"
    assert within(lambda x, w, t: jnp.tanh(x @ w), OF_ROWS, P("data")).says == "proved"
    part = lambda x, w, t: lax.psum((t.weight @ x).sum(), "model")  # noqa: E731
    assert within(part, OF_FEATURES, P()).says == "proved"


MET = {
    "a mean of rows": (lambda x, w, t: x @ w - x.mean(), *OF_FEATURES, P()),
    "the largest of parts": (
        lambda x, w, t: lax.pmax(x.sum(), "model"), *OF_FEATURES, P()),
    "rows by their device": (
        lambda x, w, t: x @ w * lax.axis_index("data"), *OF_ROWS, P("data")),
    "rows by what their device has": (
        lambda x, w, t: x[:, :2] @ w, P("data"), P("data"), P("data")),
    "rows of other devices": (
        lambda x, w, t: lax.psum(x @ w, "data"), *OF_ROWS, P("data")),
    "some rows of all towers": (
        lambda x, w, t: x @ w * lax.psum(x.sum(), t.axis_names), *OF_ROWS, P("data")),
    "the first device's rows": (lambda x, w, t: x.sum(), *OF_ROWS, P()),
    "rows that are scattered": (
        lambda x, w, t: lax.psum_scatter(x @ w, "model", tiled=True).sum(),
        *OF_FEATURES, P()),
}  # fmt: skip


@pytest.mark.few_fast(3)
@pytest.mark.parametrize("name", MET)
def test_what_a_towers_devices_make_of_its_rows_is_not_proved(name):
    fn, *in_specs, out_specs = MET[name]
    found = within(fn, tuple(in_specs), out_specs)
    assert found.says != "proved" and "raises" not in found.why


# Metric states.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Largest:
    value: jax.Array

    def merge(self, other):
        return Largest(lax.max(self.value, other.value))

    def compute(self):
        return self.value


def test_a_state_is_proved_by_how_it_merges():
    """The largest of the towers' largest is that of all; that of sums is not."""

    def metric_fn(params, batch, tower):
        own = errors(params, batch)
        return {"largest": Largest(own.max()), "sums": Largest(own.sum())}

    step = tj.build_eval_step(metric_fn, TWO, remainder="error")
    found = says_of(step, tj.TrainState.create(PARAMS, optax.sgd(0.1)))
    says = {name: x.says for name, x in found.items()}
    largest = "metrics['largest'].value"
    sums = "metrics['sums'].value"
    assert says == {largest: "proved", sums: "unknown"}


# Model functions.

SGD = tj.estimator.TowerOptimizer(optax.sgd(0.1))


def model_fn(variables, features, labels, mode, tower, params):
    """A loss whose towers meet, so that its gradient is in a second pass."""

    def loss_fn(p):
        centred = errors(p, features) - tower.mean(labels, tower.weight)
        return params["loss"](centred**2, tower)

    loss, after = SGD.minimize(loss_fn, variables)
    return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)


@pytest.mark.slow
@pytest.mark.parametrize("is_right", [True, False])
def test_the_passes_of_a_model_function_are_proved(is_right):
    def of_own(values, tower):
        return tj.Weighted(jnp.sqrt(values @ tower.weight), tower.weight.sum())

    loss = {"loss": mean if is_right else of_own}
    fn = tj.estimator.replicate_model_fn(model_fn, devices=TWO)
    state = tj.TrainState.create(PARAMS, SGD)
    batch = {"features": BATCH, "labels": BATCH["y"]}
    found = says_of(fn.train_step(params=loss), state, batch)
    says = "proved" if is_right else "unknown"
    assert found["loss"].says == found["gradient['w']"].says == says


BARE = {
    tj.Reduction.SUM: (lambda losses: losses.mean(), "a sum over a tower's rows"),
    tj.Reduction.MEAN: (
        lambda losses: losses.sum(),
        "a mean over a tower's rows",
    ),
}


@pytest.mark.parametrize("how", BARE)
def test_a_refused_bare_loss_is_told_by_what_was_said_of_it(how):
    of, wanted = BARE[how]

    def loss_fn(params, batch, tower):
        return of(errors(params, batch))

    step = train(loss_fn, loss_reduction=how)
    text = f"loss_reduction={how.name} .* return {wanted}, or tj.Weighted.mean"
    with pytest.raises(tj.ReplicationError, match=text):
        step.check(step.init(PARAMS, rng=jax.random.key(0)), BATCH)


def next_of(update):
    """The step of a tower that returns its own mean, and that of its rows' sum."""

    def tower_fn(state, batch, tower):
        loss = tj.Weighted.mean(batch["x"].sum(1), tower.weight)
        return {"own": tj.PerTower(batch["x"].mean()), "loss": loss}

    def update_fn(state, merged):
        return dataclasses.replace(state, **update(merged)), {"loss": merged["loss"]}

    return tj.build_step(tower_fn, update_fn, TWO)


def unproved_of(step, params):
    state = step.init(params)
    return step.check(state, {"x": np.ones((4, 2), np.float32)}).unproved


def test_an_update_that_reads_a_value_of_each_tower_is_not_proved():
    """Whether it computes with it, or keeps it as it is."""
    params = {"w": np.float32(1)}
    reads = next_of(lambda merged: {"params": {"w": merged["own"].values.max()}})
    why = unproved_of(reads, params).get("update", "")
    assert "it reads ['own'], which each tower has a value of its own of, at " in why
    keeps = next_of(lambda merged: {"params": {"w": merged["own"].values}})
    assert "update" in unproved_of(keeps, {"w": np.ones(2, np.float32)})
    other = next_of(lambda merged: {"params": {"w": merged["loss"].value}})
    assert unproved_of(other, params) == {}


def loss_of_sines(params, batch, tower):
    return tj.Weighted.mean(jnp.sin(batch["x"]).sum(1) * params["w"], tower.weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [TypeError("a fault"), RecursionError("too deep"), KeyError("a")]
)
def test_an_error_in_a_rule_ends_no_training(error, monkeypatch):
    """The leaf is unknown, its reason says so, and the step is audited."""

    def raise_it(pair, *ins):
        raise error

    monkeypatch.setitem(RULES, "sin", [x._replace(rule=raise_it) for x in RULES["sin"]])
    step = tj.build_train_step(loss_of_sines, optax.sgd(0.1), TWO, audit=None)
    params = {"w": np.float32(1)}
    batch = {"x": np.ones((4, 2), np.float32)}
    why = step.check(step.init(params), batch).unproved["loss"]
    name = type(error).__name__
    assert f"the proof failed with {name}: " in why and "please report this" in why
    assert "at tests/check/test_step_equality.py:" in why
    with pytest.warns(UserWarning, match="the proof failed .* A sample agreed"):
        step(step.init(params), batch)


def test_ctrl_c_in_a_rule_is_one(monkeypatch):
    def stop(pair, *ins):
        raise KeyboardInterrupt

    monkeypatch.setitem(RULES, "sin", [x._replace(rule=stop) for x in RULES["sin"]])
    step = tj.build_train_step(loss_of_sines, optax.sgd(0.1), TWO)
    with pytest.raises(KeyboardInterrupt):
        step.check(step.init({"w": np.float32(1)}), {"x": np.ones((4, 2), np.float32)})


def test_an_error_of_the_loss_is_the_losss():
    def loss_fn(params, batch, tower):
        raise AttributeError("a name of mine")

    step = train(loss_fn)
    with pytest.raises(AttributeError, match="a name of mine"):
        step.check(step.init({"w": np.float32(1)}), {"x": np.ones((4, 2), np.float32)})


def nested(function, depth):
    for _ in range(depth):
        function = jax.jit(lambda x, function=function: function(x) * 0.99)
    return function


@pytest.mark.slow
def test_functions_that_call_functions_are_proved_as_deep_as_jax_traces_them():
    def loss_fn(params, batch, tower):
        x = nested(jnp.sin, 80)(batch["x"] * params["w"])
        return tj.Weighted.mean(x.sum(1), tower.weight)

    devices = tj.Mirrored(("cpu:0", "cpu:1"))
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), devices)
    batch = {"x": np.ones((4, 2), np.float32)}
    assert step.check(step.init({"w": np.float32(1)}), batch).unproved == {}
