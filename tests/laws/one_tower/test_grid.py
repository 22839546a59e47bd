"""N towers are one tower: a drawn grid, against one tower in float64.

``TOWERJAX_GRID_SEED=7 pytest tests/laws/one_tower/test_grid.py`` draws others. A case
prints its draw.
"""

import dataclasses
import functools
import os

import grid
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from containers import as_dicts, held
from grid import FEATURES, IDS, of_rows

import towerjax as tj

SEED = int(os.environ.get("TOWERJAX_GRID_SEED", "1413"))
# Of later draws those whose lowering is another: sums of parts by towers in turn, and
# over micro-batches of several towers of a device. And one of the original's numbers,
# of towers that meet in the loss.
FAST = (5, 9, 15)
DRAWS = (*range(10), *range(11, 16), 151, 155, 271)
KEY = 7
STEPS = 3
Kind = tj.estimator.LossReduction
Mode = tj.estimator.Mode


def penalty_of(params):
    return 0.01 * (params["out"] ** 2).sum()


def loss_fn(draw, params, batch, tower, local=None):
    """The loss of a draw, and what else its towers return."""
    params = as_dicts(params)
    if "local" in draw.has and local is None:
        local = tower.local["mean"]
    x, errors = of_rows(params, grid.OfTower(draw, batch, tower, local))
    weight = batch["weight"] * tower.weight
    far = tj.Weighted.mean((x**2).sum(-1), tower.weight * batch["labelled"])
    loss = tj.Weighted.mean(errors, weight)
    if draw.reduction:
        how = {"reduction": Kind[draw.reduction], "valid": tower.weight}
        loss = tj.estimator.compute_weighted_loss(errors, batch["weight"], **how)
    if draw.kind == "several":
        loss = -(-loss - 0.6 * far / 2) - tj.penalty(-2 * penalty_of(params)) / 2
    inputs = tj.Weighted(weight @ batch["x"], weight.sum())
    after = None
    extra = None
    if "local" in draw.has:
        mean = 0.9 * local + 0.1 * inputs.value
        after = {"mean": jnp.where(inputs.weight > 0, mean, local)}
    if "extra" in draw.has:
        mean = 0.9 * tower.extra["mean"] * inputs.weight + 0.1 * inputs.sum
        counts = jnp.zeros(IDS).at[batch["id"]].add(1.0 * (tower.weight > 0))
        extra = {"mean": tj.Weighted(mean, inputs.weight), "seen": tj.Sum(counts)}
        extra |= {"slow": 0.5 * (tower.extra["slow"] + params["scale"])}
    metrics = {"far": far}
    if draw.door not in grid.OF_MODEL:
        own = jnp.where(tower.weight > 0, errors, 0).sum()
        metrics |= {"rows": tj.Sum(tower.weight.sum()), "scale": params["scale"]}
        metrics |= {"own": tj.PerTower(tj.Sum(own))}
        own = tj.Weighted(own, tower.weight.sum())
        metrics |= {"own mean": tj.PerTower(own)}
    return tj.TowerOutput(loss, metrics, local=after, extra=extra)


def new_extra():
    return {"mean": np.zeros(FEATURES), "seen": np.zeros(IDS), "slow": np.float64(0)}


def first_of(draw):
    local = {"mean": tj.TowerLocal(np.zeros(FEATURES), tj.Reduction.MEAN)}
    first = {"local": local if "local" in draw.has else None}
    first |= {"extra": new_extra() if "extra" in draw.has else None}
    return first | {"rng": jax.random.key(KEY)}


def step_of(draw):
    """A step of `build_train_step`, or of one's own, and its first state."""
    optimizer = draw.made_optimizer()
    params = held(draw.container, draw.params())
    how = {"micro_batches": draw.micro_batches, "remainder": draw.remainder}
    how |= {"guard": draw.guard, "on_nonfinite": "skip" if draw.odd else "raise"}
    how |= {"audit": False} if draw.differs else {}
    loss = functools.partial(loss_fn, draw)
    if draw.door in ("own", "passes"):
        step = own_step(draw, optimizer, loss, how)
        first = first_of(draw) | {"opt_state": optimizer.init(params)}
        return step, step.init(params, **first)
    loss = jax.jit(jax.checkpoint(loss)) if "remat" in draw.has else loss
    if "fixed" in draw.has:
        how |= {"trainable": lambda name, leaf: name not in grid.FIXED}
    how |= {"loss_reduction": draw.reduction and tj.Reduction[draw.reduction]}
    step = tj.build_train_step(loss, optimizer, draw.strategy, **how)
    return step, step.init(params, **first_of(draw))


def uphill(params, grads):
    """As SAM goes, before it looks where down is.

    A gradient that is 0 except for rounding, as that of one row less the mean of all,
    has no direction.
    """
    to_dense = lambda x: x.to_dense() if is_table(x) else x  # noqa: E731
    grads = jax.tree.map(to_dense, grads, is_leaf=is_table)
    scale = 0.1 / jnp.maximum(optax.tree.norm(grads), 1e-3)
    return jax.tree.map(lambda p, g: p + scale * g, params, grads)


def is_table(x):
    return isinstance(x, tj.sparse.IndexedRows)


def values(tree):
    """Of what was merged."""
    value_of = lambda x: getattr(x, "value", x)  # noqa: E731
    return jax.tree.map(value_of, tree, is_leaf=lambda x: hasattr(x, "value"))


def passes_of(draw, loss):
    """With the gradient of the whole loss, or of each tower's own."""
    if draw.kind == "several":
        ahead = lambda state, merged: uphill(state.params, merged["grads"].value)  # noqa: E731
        after = lambda params, batch, tower, _: loss(params, batch, tower)  # noqa: E731
        several = tj.of_loss(loss), tj.of_loss(after, ahead)
        return several if draw.door == "passes" else several[0]

    def tower_fn(state, batch, tower, merged=None):
        at = state.params if merged is None else uphill(state.params, merged.value)
        out, grads = tj.value_and_grad(loss)(at, batch, tower)
        found = {"loss": out.loss, "grads": grads, "extra": out.extra}
        if "local" in draw.has:
            new = dataclasses.replace(state.local["mean"], value=out.local["mean"])
            found["local"] = {"mean": new}
        return {**found, "metrics": out.metrics}

    def first(state, batch, tower):
        return tj.value_and_grad(loss)(state.params, batch, tower)[1]

    return (first, tower_fn) if draw.door == "passes" else tower_fn


def own_step(draw, optimizer, loss, how):
    def update_fn(state, merged):
        loss = merged["loss"]
        metrics = merged["metrics"]
        state = tj.apply_gradients(optimizer, state, merged["grads"], loss=loss)
        if "extra" in draw.has:
            state = dataclasses.replace(state, extra=values(merged["extra"]))
        if "local" in draw.has:
            state = dataclasses.replace(state, local=merged["local"])
        return state, {"loss": loss, **metrics}

    return tj.build_step(passes_of(draw, loss), update_fn, draw.strategy, **how)


def model_fn_of(draw, optimizer):
    def model_fn(variables, features, labels, mode, tower):
        plain = draw.door == "plain"
        own = None
        batch = {**features, "y": labels}
        params = variables["params"] if plain else variables.params
        local = None
        if "local" in draw.has:
            own = variables["mean"] if plain else variables.local["mean"]
            local = own.value if plain else tower.local["mean"]

        def of(params):
            return loss_fn(draw, params, batch, tower, local)

        out = of(params)
        view = grid.OfTower(draw, batch, tower, local)
        rows = {"x": of_rows(params, view)[0], "tower": jnp.full(tower.rows, tower.id)}
        outputs = {"predictions": rows, "eval_metrics": out.metrics}
        if mode is Mode.EVAL:
            return tj.estimator.ModelSpec(mode, loss=out.loss, **outputs)
        if own is not None:
            own = {"mean": dataclasses.replace(own, value=out.local["mean"])}
        if plain:
            loss, grads = optimizer.compute_gradients(lambda p: of(p).loss, params)
            args = grads, variables["slots"], params
            after, slots = optimizer.apply_gradients(*args, loss=loss)
            after = {"params": after, "slots": slots, "step": variables["step"] + 1}
            after |= own or {}
        else:
            loss, after = optimizer.minimize(lambda p: of(p).loss, variables)
            changes = {} if own is None else {"local": own}
            changes |= {} if out.extra is None else {"extra": out.extra}
            after = dataclasses.replace(after, **changes)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after, **outputs)

    return model_fn


def trained_model(draw):
    """By a model function: its train step, or calls with variables of each kind."""
    optimizer = tj.estimator.TowerOptimizer(draw.made_optimizer())
    how = {"devices": draw.strategy, "remainder": draw.remainder}
    how |= {"audit": False} if draw.differs else {}
    how |= {"compat": "tf1"} if draw.kind.startswith("tf1") else {}
    how |= {"loss_reduction": Kind[draw.reduction]} if draw.reduction else {}
    model = tj.estimator.replicate_model_fn(model_fn_of(draw, optimizer), **how)
    params = held(draw.container, draw.params())
    state = tj.TrainState.create(params, optimizer, **first_of(draw))
    if draw.door == "plain":
        local = state.local or {}
        state = {"params": state.params, "slots": state.opt_state, "step": np.int32(0)}
        state |= local
    state = model.init(state)
    batches = draw.batches()
    found = []
    if draw.door == "model":
        step = model.train_step(micro_batches=draw.micro_batches, guard=draw.guard)
        for batch in batches:
            given = {"labels": batch.pop("y"), "features": batch}
            state, metrics = step(state, given)
            found.append(metrics)
        return state, found
    modes = [Mode.TRAIN] * STEPS + [Mode.EVAL]
    for batch, mode in zip([*batches, draw.batches()[0]], modes, strict=True):
        labels = batch.pop("y")
        spec = model(state, batch, labels, mode)
        state = state if spec.train_op is None else spec.train_op
        found.append({"predictions": spec.predictions, "loss": values(spec.loss)})
        found[-1] |= values(spec.eval_metrics)
    if draw.door == "plain":
        own = {"mean": state.get("mean")}
        state = tj.TrainState(state["step"], state["params"], state["slots"], own, None)
    return state, found


def trained(draw):
    """The state after all batches, and the metrics of each."""
    if draw.door in grid.OF_MODEL:
        return trained_model(draw)
    (step, state) = step_of(draw)
    batches = draw.batches()
    found = []
    if draw.door == "scan":
        batches = jax.tree.map(lambda *x: np.stack(x), *batches)
        state, found = jax.jit(lambda *x: jax.lax.scan(step.fn, *x))(state, batches)
    elif draw.door == "dispatch":
        for batch in batches:
            state, metrics, _ = step.dispatch(state, step.place_batch(batch))
            found.append(metrics)
        return state, found
    else:
        for batch in batches:
            state, metrics = step(state, batch)
            found.append(metrics)
        step.settle()
        assert len(step.programs.compiled) == 1
        return state, found
    return state, [jax.tree.map(lambda x, i=i: x[i], found) for i in range(STEPS)]


# The same of one tower, by JAX and NumPy.


def whole_batch(draw, batch):
    """The rows that count, filled up to one size by zeros that are no rows."""
    size = draw.kept(len(batch["y"]))
    n = draw.full

    def fill(x):
        return np.concatenate([x[:size], np.zeros((n, *x.shape[1:]), x.dtype)])[:n]

    rows = {name: fill(x) for name, x in batch.items() if name != "whole"}
    whole = {"whole": batch["whole"].value} if "whole" in batch else {}
    return {**rows, **whole, "valid": fill(np.ones(size))}


def by_hand(draw, batch, local, extra):
    """Towers' variables before each micro-batch and after all, and those of all."""
    tower, part = draw.places()
    weight = batch["valid"] * batch["weight"]
    before = []
    for number in range(draw.micro_batches):
        before.append(local)
        local = local.copy()
        for t in range(draw.towers):
            own = weight * (tower == t) * (part == number)
            if own.any():
                local[t] = 0.9 * local[t] + 0.1 * own @ batch["x"] / own.sum()
    mean = 0.9 * extra["mean"] + 0.1 * weight @ batch["x"] / (weight.sum() or 1)
    new = {"mean": mean, "seen": np.bincount(batch["id"], batch["valid"], IDS)}
    return np.stack(before), local, new


def noise_of(draw, step):
    """What towers draw: ``[towers, micro-batches, h]``."""

    def of(tower, part):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(KEY), step), tower)
        key = jax.random.fold_in(key, part) if draw.micro_batches > 1 else key
        return 1 + 0.3 * jax.random.normal(key, (draw.width,))

    parts = range(draw.micro_batches)
    return np.stack([[of(t, a) for a in parts] for t in range(draw.towers)])


def objective(draw, params, batch, state):
    """The global loss, and what else comes out."""
    view = grid.OfAll(draw, batch, state)
    x, errors = of_rows(params, view)
    valid = batch["valid"]
    number = view.tower * draw.micro_batches + view.part
    weight = valid * batch["weight"]
    errors = jnp.where(valid > 0, errors, 0)
    sum_of = functools.partial(jax.ops.segment_sum, num_segments=len(errors))
    ratio = lambda x, by: x / jnp.where(by > 0, by, 1)  # noqa: E731
    counts = {"SUM_BY_NONZERO_WEIGHTS": weight != 0, "SUM_OVER_BATCH_SIZE": valid}
    by = 1.0 * counts.get(draw.reduction, weight)
    far = ratio(valid * batch["labelled"] @ (x**2).sum(-1), batch["labelled"] @ valid)
    loss = ratio(weight @ errors, by.sum())
    terms = {}
    if draw.kind == "several":
        terms = {"0": loss, "1": 0.3 * far, "penalty": penalty_of(params)}
        loss = sum(terms.values())
    if draw.kind == "SUM":
        loss = weight @ errors
    if draw.kind.startswith(("MEAN", "tf1")):  # of the parts that have examples
        each = ratio(sum_of(weight * errors, number), sum_of(by, number))
        loss = each.sum() / (sum_of(valid, number) > 0).sum()
    found = {"loss": loss, "far": far, "rows": valid.sum(), "scale": params["scale"]}
    own, each = (sum_of(x, view.tower)[: draw.towers] for x in (errors, valid))
    found |= {"own": own, "own mean": ratio(own, each)}
    found |= {f"loss/{name}": term for name, term in terms.items()}
    return loss, found | {"predictions": {"x": x, "tower": view.tower}}


def one_tower(draw):
    """``(params, optimizer's state, local, extra)`` in the end, and the metrics."""
    optimizer = optax.with_extra_args_support(draw.made_optimizer())
    params = draw.params()
    fixed = {name: params.pop(name) for name in grid.FIXED if "fixed" in draw.has}

    @jax.jit
    def train(params, opt_state, batch, state):
        of = lambda p: objective(draw, p | fixed, batch, state)  # noqa: E731
        grads, found = jax.grad(of, has_aux=True)(params)
        if draw.door == "passes":
            grads, found = jax.grad(of, has_aux=True)(uphill(params, grads))
        how = {"value": found["loss"]}
        updates, opt_state = optimizer.update(grads, opt_state, params, **how)
        return optax.apply_updates(params, updates), opt_state, found

    opt_state = optimizer.init(params)
    found = []
    extra = new_extra()
    local = np.zeros((draw.towers, FEATURES))
    batches = [whole_batch(draw, batch) for batch in draw.batches()]
    for number, batch in enumerate(batches):
        before, local_after, new = by_hand(draw, batch, local, extra)
        noise = noise_of(draw, number) if "noisy" in draw.ops else None
        state = {"before": before.swapaxes(0, 1), "extra": extra, "noise": noise}
        new["slow"] = 0.5 * (extra["slow"] + (params | fixed)["scale"])
        *after, metrics = train(params, opt_state, batch, state)
        found.append(metrics)
        if draw.odd is None or number != 1:  # else nothing was learned
            (params, opt_state) = after
            local = local_after
            extra = new
    if draw.door in ("calls", "plain"):  # an evaluation reads one value of all towers
        read = np.broadcast_to(local.mean(0), local.shape)[:, None]
        state = {"before": read, "extra": extra, "noise": None}
        of = jax.jit(functools.partial(objective, draw))
        found.append(of(params, batches[0], state)[1])
    return (params | fixed, opt_state, local, extra), found


def assert_near(found, expected, what):
    pairs = jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(found)
    for (path, x), got in zip(*pairs, strict=True):
        x = np.asarray(x)
        name = f"{what}{jax.tree_util.keystr(path)}"
        size = max(1e-2, np.abs(x[np.isfinite(x)]).max(initial=0))
        np.testing.assert_allclose(got, x, rtol=0, atol=1e-10 * size, err_msg=name)


def check_metrics(draw, found, expected):
    for i, (got, all_of) in enumerate(zip(found, expected, strict=True)):
        wanted = {name: all_of[name] for name in all_of if name in got}
        assert wanted.keys() >= {"loss", "far"}
        if draw.odd == "nothing" and i == 1:
            wanted = {"loss": 0.0}
        if "predictions" in got:  # as many as there were rows
            size = draw.kept(draw.sizes[i % STEPS])
            cut = jax.tree.map(lambda x, size=size: x[:size], all_of["predictions"])
            wanted["predictions"] = cut
        assert_near({name: got[name] for name in wanted}, wanted, f"batch {i}: ")


def check_after(draw, state, params):
    """Evaluations and predictions of any number of rows, by NumPy."""

    def logits_of(p, batch):
        p = as_dicts(p)
        return batch["x"] @ p["into"] @ p["out"]

    def metric_fn(p, batch, tower):
        logits = logits_of(p, batch)
        weight = tower.weight * batch["weight"]
        sums = {"sum": tj.Sum((logits.sum(1) * weight).sum())}
        return {**sums, "mean": tj.Weighted.mean(logits[:, 0], weight)}

    size = draw.full - (draw.towers > 1)
    batch = {name: draw.batches()[0][name][:size] for name in ("x", "weight")}
    logits = logits_of(jax.tree.map(np.asarray, params), batch)
    weight = batch["weight"]
    if draw.after == "predict":
        predict = lambda p, batch, tower: {"logits": logits_of(p, batch)}  # noqa: E731
        step = tj.build_predict_step
        expected = {"logits": logits}
        found = step(predict, draw.strategy)(state, batch)
    else:
        found = values(tj.build_eval_step(metric_fn, draw.strategy)(state, batch))
        expected = {"mean": weight @ logits[:, 0] / weight.sum()}
        expected |= {"sum": weight @ logits.sum(1)}
    assert_near(found, expected, draw.after)


@pytest.mark.few_fast(1)
@pytest.mark.filterwarnings("ignore:Each of . micro-batches calls tower")
@pytest.mark.sampled  # batches of one example, for which JAX traces other equations
@pytest.mark.parametrize("number", [
    pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in DRAWS
])  # fmt: skip
def test_n_towers_are_one_tower(number):
    draw = grid.drawn(SEED, number)
    print(f"TOWERJAX_GRID_SEED={SEED}, draw {number}: {draw}, rows {draw.sizes}")
    with jax.enable_x64(True):
        (params, opt_state, local, extra), metrics = one_tower(draw)
        state, found = trained(draw)
        check_metrics(draw, found, metrics)
        assert int(state.step) == STEPS
        moves = jax.tree.map(lambda x, y: np.abs(x - y).max(), params, draw.params())
        assert max(jax.tree.leaves(moves)) > 1e-3, "the test would prove nothing"
        assert_near(state.params, params, "params")
        assert_near(state.opt_state, opt_state, "opt_state")
        if "local" in draw.has:
            assert_near(state.local["mean"].value, local, "local")
        if "extra" in draw.has:
            assert_near(state.extra, extra, "extra")
        if draw.after:
            check_after(draw, state, params)


def right(number):
    """The draw without what differs between towers by design."""
    draw = grid.drawn(SEED, number)
    changes = {"own": None, "has": tuple(x for x in draw.has if x != "local")}
    changes["ops"] = tuple(x for x in draw.ops if x != "gathered")
    if draw.door in grid.OF_MODEL:
        changes["door"] = "step"
    if draw.kind.startswith(("MEAN", "tf1")) or draw.door in grid.OF_MODEL:
        changes["kind"] = "mean"
    return dataclasses.replace(draw, **changes)


def in_32_bits(tree):
    def cast(x):
        return x.astype(np.float32) if getattr(x, "dtype", None) == np.float64 else x

    return jax.tree.map(cast, tree)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(300, 364, 4))
def test_the_audit_accepts_what_is_right(number):
    draw = right(number)
    print(f"TOWERJAX_GRID_SEED={SEED}, draw {number}: {draw}, rows {draw.sizes}")
    assert not draw.differs
    step, state = step_of(draw)
    report = step.audit(state, in_32_bits(draw.batches()[0]))
    assert not report.by_rounding
    for part in ("loss", "gradient"):
        assert any(part in name for name in report.compared)
