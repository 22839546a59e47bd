"""Each mistake gets one clear error before compilation, and loses nothing."""

import dataclasses
import functools
import re
from types import SimpleNamespace

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.experimental import io_callback

import towerjax as tj
from towerjax.loop.options import check_hooks
from towerjax.step.checking import Verdicts

TWO, SGD = ("cpu:0", "cpu:1"), optax.sgd(0.01)


def loss_fn(params, batch, tower):
    return tj.Weighted.mean((batch["x"] @ params["w"]) ** 2, tower.weight)


def good(rows=4):
    rng = np.random.default_rng(rows)
    return {"x": rng.normal(size=(rows, 3)).astype(np.float32)}


def start():
    return {"w": np.array([1.0, 2.0, 3.0], np.float32)}


def build(fn=loss_fn, strategy=None, optimizer=SGD, **options):
    strategy = strategy or tj.Mirrored(TWO)
    return tj.build_train_step(fn, optimizer, strategy, **options)


@pytest.fixture(scope="module")
def trains():
    """The step that refuses nothing of `good`, whose program tests share."""
    return build()


def refused(step, state, batch, text, names, error=ValueError):
    names.clear()
    with pytest.raises(error, match=text):
        step(state, batch)
    assert not any("step" in name for name in names), names
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    return True


BATCHES = {
    "indivisible": (good(5), r"batch\['x'\] has 5 examples, which 2 towers.*remainder"),
    "different sizes": ({"x": np.ones((4, 3), np.float32), "y": np.ones(2)},
        r"batch\['x'\]: 4, batch\['y'\]: 2.* Of graphs stack a padded pack"),
    "scalar": ({"x": np.ones((4, 3)), "k": np.float32(1)}, r"batch\['k'\] is "),
    "numbers": ({"x": np.ones((4, 3)), "k": 3}, r"batch\['k'\] is 3 of type int"),
    "list": ({"x": [1.0, 2.0]}, r"batch\['x'\]\[0\] is 1.0 of type float.*np.asarray"),
    "frame": ({"x": SimpleNamespace(to_numpy=len)},
        r"pass x\.to_numpy\(\), or a dict of"),
    "empty": ({"x": np.ones((0, 3))}, r"batch is empty: batch\['x'\] has shape"),
    "no leaves": ({}, "holds no arrays"),
    "no rows": (tj.Whole(np.ones(3)), "holds no arrays: .* draw .*np.arange"),
}  # fmt: skip


def test_malformed_batches_are_refused(trains, compiled):
    state = trains.init(start())
    for batch, text in BATCHES.values():
        refused(trains, state, batch, text, compiled)
    state, _ = trains(state, good())  # nothing was lost
    assert int(state.step) == 1


CHANGES = {
    "new leaf": ({**good(), "y": np.ones(4)},
        r"batch\['y'\] was absent and is float32\[4\]"),
    "other name": ({"z": good()["x"]},
        r"batch\['x'\] was .* is absent.*batch\['z'\] was absent"),
    "dtype": ({"x": np.ones((4, 3), np.int32)}, r"was float32\[4, 3\] and is int32"),
    "trailing shape": ({"x": np.ones((4, 5), np.float32)}, r"\[4, 3\].*\[4, 5\]"),
    "size": (good(6), r"was float32\[4, 3\] and is float32\[6, 3\].*"),
    "container": ([good()["x"]],
        r"batch\['x'\] was .* is absent.*batch\[0\] was absent"),
}  # fmt: skip


def test_a_batch_that_changes_is_refused_saying_what(trains, compiled):
    state, _ = trains(trains.init(start()), good())
    for batch, text in CHANGES.values():
        text = rf"(?s)has changed since.*{text}.*max_programs=\.\.\. \(now 1\)"
        refused(trains, state, batch, text, compiled)
    state, _ = trains(state, good())


@pytest.mark.slow
def test_padding_that_nothing_masks_is_refused(compiled):
    def careless(params, batch, tower):
        return tj.Weighted.mean((batch["x"] @ params["w"]) ** 2)

    step = build(careless, remainder="pad")
    state = step.init(start())
    refused(step, state, good(5), "does not depend on tower.weight", compiled)
    state, _ = step(state, good(6))
    refused(step, state, good(5), "does not depend on tower.weight", compiled)
    evaluate = tj.build_eval_step(
        lambda p, b, tower: {"m": tj.Weighted.mean(b["x"])}, tj.Mirrored(TWO)
    )
    with pytest.raises(ValueError, match="does not depend on tower.weight"):
        evaluate(state, good(5))


@pytest.mark.parametrize("count", [1, 2])
def test_padding_that_the_other_part_of_a_loss_masks_is_refused(count):
    """On one device a gradient begins with a 1 computed after the loss and its mask."""

    def careless(params, batch, tower):
        masked = tower.weight * (batch["x"] @ params["w"]) ** 2
        unmasked = batch["x"] ** 2 * params["aux"]
        return tj.Weighted(masked.sum() + unmasked.sum(), tower.weight.sum())

    step = build(careless, tj.Mirrored(TWO[:count], towers=2), remainder="pad")
    params = {**start(), "aux": np.float32(1)}
    assert step.check(params, good(5)).unmasked() == ["grads.sum['aux']"]


@pytest.mark.slow
def test_denominators_that_count_padding_are_refused(compiled):
    def masked(params, batch, tower):
        return tower.weight * (batch["x"] @ params["w"]) ** 2

    def deep(*args):  # each of its constants is computed once
        count = jnp.ones(len(args[1]["x"])).sum()
        for _ in range(25):
            count = (count + count) / 2
        return tj.Weighted(masked(*args).sum(), count)

    wrong = (deep, 1), (lambda *args: tj.metrics.mean(masked(*args)), 2)
    for fn, parts in wrong:
        step = build(fn, remainder="pad", micro_batches=parts)
        found = step.check(start(), good(5)).unmasked()
        assert found == ["grads.weight", "loss.weight"]
    refused(step, step.init(start()), good(5), r"but loss\.weight, grads", compiled)

    class Mean(tj.metrics.Additive):
        total: jax.Array
        count: jax.Array

        def compute(self):
            return self.total / self.count

    def metric_fn(params, batch, tower):
        return {
            "own": Mean(
                masked(params, batch, tower).sum(), jnp.ones(len(batch["x"])).sum()
            )
        }

    with pytest.raises(ValueError, match=r"metrics\['own'\]\.count does not depend"):
        tj.build_eval_step(metric_fn, tj.Mirrored(TWO))(start(), good(5))

    def right(params, batch, tower):  # of three columns and of three rows a tower
        columns = tower.weight @ batch["x"]
        metrics = {
            "share": tj.Weighted.mean(tower.weight),
            "columns": tj.Weighted.mean(columns**2),
            "tower": tj.Weighted(columns.sum(), 1.0),
        }
        return tj.TowerOutput(loss_fn(params, batch, tower), metrics)

    step = build(right, remainder="pad")
    assert step.check(start(), good(5)).unmasked() == []


def gaps_of(params, batch):  # as where predictions [b] meet labels [b, 1]
    return (batch["x"] @ params["w"])[None] - batch["x"][:, :1]


def column(params, batch, tower):
    return tj.Weighted.mean(gaps_of(params, batch) ** 2, tower.weight)


def unweighted(params, batch, tower):
    return tj.Weighted.mean(jax.checkpoint(gaps_of)(params, batch) ** 2)


def of_a_metric(params, batch, tower):
    gap = tj.metrics.mean(abs(gaps_of(params, batch)), tower.weight)
    return tj.TowerOutput(loss_fn(params, batch, tower), {"gap": gap})


@pytest.mark.few_fast(3)
@pytest.mark.parametrize("fn", [column, unweighted, of_a_metric])
@pytest.mark.parametrize(
    ("towers", "rows", "options"),
    [
        (1, 4, {}),
        (2, 6, {}),
        (4, 5, {"remainder": "pad"}),
        (2, 8, {"micro_batches": 2}),
    ],
)
def test_labels_as_a_column_are_refused(fn, towers, rows, options):
    """Predictions [b] less labels [b, 1] are [b, b], of each tower's rows alone."""
    step = build(fn, tj.Mirrored(TWO[:1], towers=towers), **options)
    text = rf"values \[b, b\].* at \S*test_bad_input.py:\d+ \({fn.__name__}\).*\[:, 0\]"
    with pytest.raises(tj.ReplicationError, match=text):
        step.check(start(), good(rows))


def features(params, batch, tower):
    return tj.Weighted.mean((batch["x"] * params["w"][None]) ** 2, tower.weight)


def pairs(params, batch, tower):
    x, weight = tower.all_gather((batch["x"], tower.weight), axis=0)
    gaps = (batch["x"] @ params["w"])[:, None] - (x[:, 0] * weight)[None]
    return tj.Weighted.mean(gaps**2, tower.weight)


def of_three_rows(params, batch, tower):
    return features(params, {"x": batch["x"].reshape(3, 3)}, tower)


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("fn", [features, pairs, of_three_rows])
@pytest.mark.parametrize("towers", [1, 3])
def test_as_many_features_as_rows_are_no_pairs_of_rows(fn, towers):
    step = build(fn, tj.Mirrored(TWO[:1], towers=towers))
    step.check(start(), good(3 * towers))


def by_number(number):
    def loss(params, batch, tower):
        return tj.Weighted(((batch["x"] @ params["w"]) ** 2).sum(), number)

    return loss


def of_all_numbers(params, batch, tower):
    squares = (batch["x"] * params["w"][None]) ** 2
    return tj.Weighted(squares.sum(), squares.size)


def of_parameters(params, batch, tower):
    return tj.Weighted.mean(params["w"] ** 2 * batch["x"].mean(0))


def of_means(params, batch, tower):
    return tj.Weighted(((batch["x"] @ params["w"]) ** 2).mean(), 1)


@pytest.mark.parametrize(
    ("fn", "towers", "rows"),
    [(by_number(6), 1, 6), (of_all_numbers, 3, 6)]
    + [(of_parameters, 3, 3), (of_means, 6, 6)],
)
def test_weights_that_are_numbers_of_a_towers_own_pass(fn, towers, rows):
    """Also where they are by chance as many as the whole batch has rows."""
    build(fn, tj.Mirrored(TWO[:1], towers=towers)).check(start(), good(rows))


def by_time(params, batch, tower):
    losses = (batch["x"] * params["w"][None]).T ** 2  # [3, b]
    return tj.Weighted.mean(losses, tower.weight)


@pytest.mark.parametrize("rows", [12, 11, 16])
def test_rows_in_another_dim_than_the_first_are_refused(rows):
    """Also where there are as many as of what is first, so that weights would fit."""
    step = build(by_time, tj.Mirrored(TWO[:1], towers=4), remainder="pad")
    text = r"values (at|of shape \(3, 4\)) .*: give jnp.moveaxis\(values, 1, 0\)"
    with pytest.raises(ValueError, match=text):
        step.check(start(), good(rows))


def of_reduced(params, batch, tower):
    rows = tj.Weighted.mean(batch["x"][:, 0], tower.weight)
    mean = tower.reduce(tj.Reduction.SUM, rows).value
    return tj.Weighted.mean(batch["x"] @ params["w"] * mean, tower.weight)


def of_gathered(params, batch, tower):
    x, weight = tower.all_gather((batch["x"], tower.weight), axis=0)
    return tj.Weighted.mean(batch["x"] @ params["w"] * (weight @ x[:, 0]), tower.weight)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("fn", [of_reduced, of_gathered])
def test_what_micro_batches_tell_each_other_alone_is_warned_of(fn, towers):
    """Such a loss is another one for each number of micro-batches."""
    text = rf"Each of 2 micro-batches calls tower\.\w+ at \S+ \({fn.__name__}\), of its"
    with pytest.warns(UserWarning, match=text):
        build(fn, tj.Mirrored(TWO[:1], towers=towers), micro_batches=2).check(
            start(), good()
        )
    build(fn, tj.Mirrored(TWO[:1], towers=towers)).check(start(), good())


@pytest.mark.slow
def test_a_state_from_elsewhere_is_refused(compiled):
    local = {"n": tj.TowerLocal(np.zeros(()), tj.Reduction.SUM)}
    there = build(strategy=tj.Mirrored(("cpu:2", "cpu:3")))
    here = build()
    strange = there.init(start())
    refused(here, strange, good(), r"not placed .*\['cpu:0', 'cpu:1'\]", compiled)
    state, _ = here(here.place(strange), good())
    refused(here, strange, good(), r"step\.place\(state\)", compiled)
    four = build(strategy=tj.Mirrored(TWO, towers=4)).init(start(), local=local)
    text = r"another number of towers than 2: state\.local\['n'\]"
    refused(here, four, good(), text, compiled)
    host = jax.device_get(state)
    with pytest.raises(ValueError, match="the host"):
        here(host, good())
    for wrong in (start(), None, (state, 1)):
        with pytest.raises(ValueError, match="not a tj.TrainState. Make it with step"):
            here(wrong, good())


@pytest.mark.parametrize("copies", [(), (3,), (4, 2)])
def test_other_numbers_of_copies_are_not_placed(copies):
    local = {"n": tj.TowerLocal(np.zeros(copies), tj.Reduction.SUM)}
    state = tj.TrainState.create(start(), optax.sgd(0.1), local=local)
    text = r"towers than 2: state\.local\['n'\].* model\.init\(tj\.TrainState\.create"
    with pytest.raises(ValueError, match=text):
        build().place(state)


def test_a_state_of_other_parameters_is_refused_by_name(trains):
    step = trains
    step(step.init(start()), good())
    other = step.init({"w": np.ones(3, np.float32), "b": np.ones(1, np.float32)})
    with pytest.raises(ValueError, match=r"params\['b'\] was absent and is float32"):
        step(other, good())
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), step.init(start()).params)
    half = dataclasses.replace(step.init(start()), params=narrow)
    with pytest.raises(ValueError, match=r"was float32\[3\] and is bfloat16\[3\]"):
        step(half, good())


def test_a_state_of_another_optimizer_is_refused_with_what_to_write():
    momentum = build(optimizer=optax.sgd(0.1, momentum=0.9))
    for other in (optax.sgd(0.1), optax.adam(0.1)):
        state = build(optimizer=other).init(start())
        with pytest.raises(ValueError, match=r"another optimizer.*opt_state\[0\]\."):
            momentum(state, good())
    anew = momentum.init(state.params).opt_state
    momentum.check(dataclasses.replace(state, opt_state=anew), good())


def test_closing_over_another_states_arrays_names_what_to_write():
    teacher = build().init(start())

    def distilled(params, batch, tower):
        return tj.Weighted.mean(batch["x"] @ (params["w"] - teacher.params["w"]))

    def drawn(params, batch, tower):
        noise = jax.random.normal(jax.random.fold_in(teacher.rng, tower.step), ())
        return tj.Weighted.mean(batch["x"] @ params["w"] * noise)

    for fn, kind in ((distilled, r"float32\[3\]"), (drawn, "key")):
        step = build(fn)
        with pytest.raises(ValueError, match=rf"in a mesh.*{kind}.*tj\.Whole\("):
            step(step.init(start()), good())


def test_an_ordered_print_on_several_devices_is_told_of():
    def loud(params, batch, tower):
        jax.debug.print("{}", tower.id, ordered=True)
        return loss_fn(params, batch, tower)

    step = build(loud)
    with pytest.raises(ValueError, match="ordered effects") as caught:
        step.program(step.init(start()), good())
    assert "write ordered=False" in caught.value.__notes__[0]


def test_a_state_where_the_batch_goes_is_told_of():
    step, state = build(), build().init(start())
    metric_fn = lambda p, b, t: {"loss": loss_fn(p, b, t)}  # noqa: E731
    evaluate = tj.build_eval_step(metric_fn, tj.Mirrored(TWO))
    for call in (
        lambda: step(good(), state),
        lambda: step.place_batch(state),
        lambda: step.check(start(), state),
        lambda: evaluate(good(), state),
    ):
        with pytest.raises(ValueError, match=r"first: step\(state, batch\)\.$"):
            call()
    for batches, what in ((state, "a TrainState"), (good(), "one batch"), (3, "a int")):
        with pytest.raises(ValueError, match=f"^batches is {what}.* tj.batches"):
            tj.evaluate(evaluate, start(), batches)
    with pytest.raises(ValueError, match="^batches is a function, but is to be an ite"):
        tj.run(step, state, lambda: [good()])


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(
    "builder", [tj.build_eval_step, tj.build_predict_step], ids=lambda x: x.__name__
)
def test_only_another_kind_of_state_is_told_that_the_step_has_one(builder):
    def fn(params, batch, tower):
        if params["w"].shape == (2,):
            raise ValueError("two weights")
        rows = batch["x"][:, :1] * params["w"].sum()
        mean = {"mean": tj.Weighted.mean(rows, tower.weight[:, None])}
        return mean if builder is tj.build_eval_step else rows

    run = builder(fn, tj.Mirrored(TWO[:1]), max_programs=2)
    two = {"w": np.ones(2, np.float32)}
    for size in (4, 6):
        with pytest.raises(ValueError, match="^two weights"):
            run(two, good(size))
        run(start(), good())
    for params in (two, {"v": two["w"]}, {"w": np.ones(3, np.int32)}):
        text = "changed since the step was compiled.*or parameters alone"
        with pytest.raises(ValueError, match=text):
            run(params, good())


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(
    "call", [jax.pure_callback, functools.partial(io_callback, ordered=True)]
)
def test_what_jax_cannot_vmap_says_how_towers_run_without(call):
    def fn(params, batch, tower):
        doubled = call(lambda x: 2 * x, batch["x"], batch["x"])
        return tj.Weighted.mean(doubled @ params["w"], tower.weight)

    step = build(fn, tj.Mirrored(TWO[:1], towers=2))
    with pytest.raises(ValueError, match="vmap") as caught:
        jax.eval_shape(step.fn, step.shapes(start()), good())
    told = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert "local='scan'" in " ".join(told)
    step = build(fn, tj.Mirrored(TWO[:1], towers=2, local="scan"))
    jax.eval_shape(step.fn, step.shapes(start()), good())


def test_a_step_inside_a_trace_names_step_fn():
    step, state = build(), build().init(start())
    evaluate = tj.build_eval_step(
        lambda p, b, t: {"loss": loss_fn(p, b, t)}, tj.Mirrored(TWO)
    )
    for call in (
        lambda: jax.jit(step)(state, good()),
        lambda: jax.eval_shape(lambda state: step(state, good()), state),
        lambda: jax.jit(evaluate)(state, good()),
        lambda: jax.vmap(lambda p: evaluate(p, good()))({"w": np.ones((2, 3))}),
    ):
        with pytest.raises(ValueError, match=r"step\.fn\(state, batch\)"):
            call()


def loss(p):
    return tj.Weighted(p["w"].sum(), 1.0)


def beside(of_batch):
    """A loss function whose metrics, beside a good loss, are these."""
    return lambda p, b, t: tj.TowerOutput(loss(p), of_batch(b))


# fmt: off
LOSSES = {
    "vector": (lambda p, b, t: tj.Weighted(p["w"], 1.0), r"sum has shape \(3,\)"),
    "vector weight": (lambda p, b, t: tj.Weighted(p["w"].sum(), t.weight),
        r"weight shape \(2,\)"),
    "integer": (lambda p, b, t: tj.Weighted(jnp.int32(1), 1.0), "dtype int32"),
    "boolean": (lambda p, b, t: tj.Weighted(p["w"][0] > 0, 1.0), "dtype bool"),
    "bare": (lambda p, b, t: p["w"].sum(), r"bare scalar.*Weighted\.mean.*loss_reduc"),
    "tuple": (lambda p, b, t: (p["w"].sum(), {}), r"returned is a tuple.*TowerOutput"),
    "none": (lambda p, b, t: None, "returned is a NoneType"),
    "text": (lambda p, b, t: "mse", r"returned is a str\. Return tj\.Weighted"),
    "bare vector": (lambda p, b, t: p["w"], r"not a scalar: sum has shape \(3,\)"),
    "negative weight": (lambda p, b, t: tj.Weighted(p["w"].sum(), -1.0),
        "weight must be >= 0, got -1.0"),
    "negative weights": (
        lambda p, b, t: tj.Weighted.mean(b["x"][:, 0], np.array([1.0, -2.0])),
        r"a weight of -2\.0; give 0 to mask"),
    "weights of another shape": (lambda p, b, t: tj.Weighted.mean(b["x"].T, t.weight),
        r"shape \(3, 2\) and weights of shape \(2,\)"),
    "loss as metric": (beside(lambda b: {"loss": 1}),
        "the name of the global loss. Give it another name"),
    "metrics not named": (beside(lambda b: [1]), "mapping of name to"),
    "nested metrics": (beside(lambda b: {"group": {"a": tj.Weighted(1.0, 1.0)}}),
        r"metrics\['group'\] is a dict.*'group/part'"),
    "rows as a metric": (beside(lambda b: {"r": tj.Rows(b["x"])}),
        r"metrics\['r'\] is a Rows.*tj\.Rows\(x\) in tj\.build_step"),
    "metric named by a number": (beside(lambda b: {1: tj.Weighted(1.0, 1.0)}),
        "a name that is a string, but 1 is the name of one"),
    "metric that is none": (beside(lambda b: {"m": None}),
        r"metrics\['m'\] is a NoneType"),
    "local not there": (
        lambda p, b, t: tj.TowerOutput(loss(p), local={"n": jnp.ones(())}),
        r"local\['n'\] was absent and is float32"),
}
# fmt: on


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_none_are_refused(name, compiled):
    fn, text = LOSSES[name]
    step = build(fn, tj.Mirrored(TWO[:1], towers=2))
    refused(step, step.init(start()), good(4), text, compiled)


def test_a_weighted_loss_needs_no_loss_reduction(compiled):
    step = build(loss_reduction=tj.Reduction.MEAN)
    text = "gives a meaning to a scalar loss"
    refused(step, step.init(start()), good(), text, compiled)


def test_an_optimizer_that_changes_types_is_refused(compiled):
    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -g, grads), state.astype(jnp.float32)

    optimizer = optax.GradientTransformation(lambda p: jnp.int32(0), update)
    step = tj.build_train_step(loss_fn, optimizer, tj.Mirrored(TWO))
    text = r"state\.opt_state was int32\[\] and is float32\[\]"
    refused(step, step.init(start()), good(), text, compiled)


def forgotten(params, batch, tower):
    out = batch["x"] @ params["w"]
    return tj.TowerOutput(
        loss=tj.Weighted.mean(out**2, tower.weight),
        metrics={"fine": tj.Weighted.mean(out), "worst": jnp.abs(out).max()},
    )


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("towers", [1, 2, 8])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_forgotten_reduction_is_refused_naming_leaf_and_line(
    towers, devices, compiled
):
    if towers % devices:
        devices = 1
    strategy = tj.Mirrored(TWO[:devices], towers=towers)
    step = build(forgotten, strategy)
    with pytest.raises(tj.ReplicationError) as caught:
        step(step.init(start()), good(16))
    line = forgotten.__code__.co_firstlineno + 4
    assert re.search(
        rf"metrics\['worst'\].*batch\['x'\].*test_bad_input\.py:{line} \(forgotten\)",
        str(caught.value), re.DOTALL,
    ), str(caught.value)  # fmt: skip
    assert "fine" not in str(caught.value)
    assert not any("step" in name for name in compiled), compiled


def test_check_refuses_without_a_device():
    strategy = tj.Mirrored(tuple(f"gpu:{i}" for i in range(64)))
    step = build(forgotten, strategy)
    with pytest.raises(tj.ReplicationError, match="worst"):
        step.check(start(), {"x": jax.ShapeDtypeStruct((128, 3), jnp.float32)})
    build(strategy=strategy).check(start(), good(128))
    with pytest.raises(ValueError, match=r"'gpu:\d+' is not on this machine"):
        step.init(start())


@pytest.mark.parametrize("call", ["merge_call", "reduce", "all_gather", "axis_names"])
def test_towers_cannot_meet_when_they_run_in_turn(call, compiled):
    def fn(params, batch, tower):
        out = (batch["x"] @ params["w"]).sum()
        if call == "merge_call":
            tower.merge_call(lambda strategy, x: x, out)
        elif call == "reduce":
            tower.reduce(tj.Reduction.SUM, out)
        elif call == "all_gather":
            tower.all_gather(out)
        else:
            _ = tower.axis_names
        return tj.Weighted(out, 1.0)

    step = build(fn, tj.Mirrored(TWO, local="scan"))
    text = rf"tower\.{call}.*local='scan'.*local='vmap'"
    refused(step, step.init(start()), good(), text, compiled)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["raise", "ignore"])
def test_nan_on_one_tower_gives_one_verdict(policy):
    poisoned = good(4)
    poisoned["x"][3, 0] = np.nan
    step = build(on_nonfinite=policy)
    state, _ = step(step.init(start()), good())
    before = jax.device_get(state.params)
    state, metrics = step(state, poisoned)
    assert np.isnan(metrics["loss"]) and int(state.step) == 2
    if policy == "ignore":
        assert np.isnan(state.params["w"]).all()
        return
    for shard in state.params["w"].addressable_shards:
        np.testing.assert_array_equal(shard.data, before["w"])
    with pytest.raises(tj.NonFiniteError, match="of step 1 was not finite") as e:
        for _ in range(40):
            state, _ = step(state, good())
    assert e.value.step == 1
    assert np.isfinite(jax.device_get(state.params)["w"]).all()


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_is_refused_when_guarded():
    def fn(params, batch, tower):  # the loss is finite, its gradient is not
        root = jnp.sqrt(jnp.abs(params["w"] - 1.0)).sum()
        return tj.Weighted(root + 0 * batch["x"].sum(), 1.0)

    step = build(fn, guard="gradients", on_nonfinite="skip")
    state, metrics = step(step.init({"w": np.ones(3, np.float32)}), good())
    assert np.isfinite(metrics["loss"])
    np.testing.assert_array_equal(state.params["w"], np.ones(3))


def test_weights_that_two_layers_share_are_not_trained_apart():
    shared, count = nnx.Param(np.ones(3, np.float32)), nnx.Variable(np.int32(0))
    model = [{"kernel": shared}, {"kernel": shared}]
    text = r"params\[0\]\['kernel'\] and .*\[1\]\['kernel'\] are one nnx.Param, .*split"
    for init in (build().init, functools.partial(tj.TrainState.create, optimizer=SGD)):
        with pytest.raises(ValueError, match=text):
            init(model)
    build().init([shared, count, count])  # as of keys, which do not train


def test_arguments_in_each_others_place_are_told():
    sgd, strategy = optax.sgd(0.1), tj.Mirrored(TWO)
    text = (
        r"build_train_step: optimizer is a Mirrored, strategy is a Gradient\w+, as if"
        r" arguments were swapped. Write build_train_step\(loss_fn, optimizer, strat"
    )
    with pytest.raises(ValueError, match=text):
        tj.build_train_step(loss_fn, strategy, sgd)
    with pytest.raises(ValueError, match=r"strategy is a str. Write .*tj.Mirrored\(\)"):
        tj.build_train_step(loss_fn, sgd, "cpu:0")
    with pytest.raises(ValueError, match=r"of optax \(of nnx.* the tx\) and a"):
        tj.build_train_step(loss_fn, SimpleNamespace(update=len, tx=sgd), strategy)
    text = r"update_fn is a Mirrored.* swapped. Write build_step\(tower_fn, update_fn"
    for tower_fns in (loss_fn, [loss_fn]):
        with pytest.raises(ValueError, match=text):
            tj.build_step(tower_fns, strategy, loss_fn)
    with pytest.raises(ValueError, match="build_step: tower_fn is a NoneType. Write"):
        tj.build_step([], loss_fn, strategy)
    for builder in (tj.build_eval_step, tj.build_predict_step):
        with pytest.raises(ValueError, match="_fn is a Mirrored, strategy is a func"):
            builder(strategy, loss_fn)


S = tj.Mirrored(TWO)
UNLIKE = {
    "fn(tower, *args)": lambda fn: S.call_for_each_tower(fn),
    "loss_fn(params, batch, tower)": lambda fn: tj.build_train_step(
        fn, optax.sgd(0.1), S
    ),
    "metric_fn(params, batch, tower)": lambda fn: tj.build_eval_step(fn, S),
    "predict_fn(params, batch, tower)": lambda fn: tj.build_predict_step(fn, S),
    "tower_fn(state, batch, tower)": lambda fn: tj.build_step(fn, loss_fn, S),
    "tower_fn(state, batch, tower, merged)": lambda fn: tj.build_step(
        (loss_fn, fn), loss_fn, S
    ),
    "update_fn(state, merged)": lambda fn: tj.build_step(loss_fn, fn, S),
    "hook(number, metrics)": lambda fn: check_hooks([fn]),
    "function(number, state, metrics)": lambda fn: tj.loop.WithState(fn, every=2),
}


@pytest.mark.parametrize("form", UNLIKE)
def test_a_function_of_other_arguments_is_told_its_form(form):
    text = rf"A function of \(\) cannot be called as {re.escape(form)}: too many"
    with pytest.raises(ValueError, match=text):
        UNLIKE[form](lambda: 0)


def test_arguments_in_another_order_are_told():
    table = {
        "loss_fn(params, batch, tower)": lambda tower, params, batch: 0,
        "tower_fn(state, batch, tower)": lambda batch, state, tower: 0,
        "update_fn(state, merged)": lambda merged, state: 0,
    }
    for form, fn in table.items():
        text = f"called as {form}: its arguments stand in another order. Write def"
        with pytest.raises(ValueError, match=re.escape(text)):
            UNLIKE[form](fn)
    assert S.call_for_each_tower(lambda tower, x, args: x + args, 1, 2) == 3


def test_a_function_is_asked_itself_and_not_what_it_wraps():
    @functools.wraps(lambda x: x)
    def wrapping(tower, x):
        return x + tower.id

    out = tj.OneDevice("cpu:0").call_for_each_tower(wrapping, np.float32(1))
    assert tj.OneDevice("cpu:0").unwrap(out) == [1.0]


def test_a_state_is_not_taken_for_parameters():
    step = build()
    with pytest.raises(ValueError, match=r"step\.init\(state\.params\), or go on"):
        step.init(step.init(start()))
    of_flax = TrainState.create(apply_fn=None, params=start(), tx=SGD)
    with pytest.raises(
        ValueError, match=r"is a TrainState.*its optimizer \(.*state\.tx"
    ):
        step.init(of_flax)


@pytest.mark.slow
def test_batch_statistics_are_no_parameters():
    """Floats are trained; a step of SGD would move a mean by its gradient."""
    variables = nn.BatchNorm(False).init(jax.random.key(0), np.ones((2, 3)))
    module = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    for params in (variables, module, nnx.state(module)):
        with pytest.raises(ValueError, match=r"batch statistics, which .*trainable="):
            build().init(params)
    build().init(variables["params"])
    build().init(nnx.state(module, nnx.Param))
    build(trainable={"params": True, "batch_stats": False}).init(variables)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(
    "loss_of",
    [
        lambda p, w: w,
        lambda p, w: jax.lax.stop_gradient(p),
        lambda p, w: jnp.float32(p > 0),
        lambda p, w: jax.jit(jnp.round)(p).astype(int),
    ],
)
def test_a_loss_without_a_gradient_is_refused(loss_of):
    """As of a model that a loss function closes over, or of a count of hits."""
    closed_over = np.float32(1)

    def mean(params, batch, tower):
        values = loss_of(params["w"].sum(), closed_over) * batch["x"][:, 0]
        return tj.Weighted.mean(values, tower.weight)

    text = "The loss depends on no parameter, so that every gradient is 0"
    for loss in (mean, lambda *args: mean(*args) + tj.penalty(1.0)):
        with pytest.raises(ValueError, match=text):
            build(loss).check(start(), good())

    def penalised(params, batch, tower):
        return mean(params, batch, tower) + tj.penalty(params["w"].sum())

    build(penalised).check(start(), good())


def test_an_optimizer_that_needs_an_argument_of_yours_is_told_where_to_call_it():
    def update(updates, state, params=None, *, temperature):
        return jax.tree.map(lambda x: x * temperature, updates), state

    needy = optax.GradientTransformationExtraArgs(optax.identity().init, update)
    step = build(optimizer=optax.chain(needy, SGD))
    text = r"keyword-only argument: 'temperature'\. Call it yourself.*tj\.build_step\("
    with pytest.raises(ValueError, match=text):
        step.check(start(), good())


def test_local_and_rng_are_checked_by_init():
    with pytest.raises(ValueError, match=r"local\['n'\].*tj\.TowerLocal\(value"):
        build().init(start(), local={"n": np.zeros(3)})
    with pytest.raises(ValueError, match="rng is float32"):
        build().init(start(), rng=np.zeros(2, np.float32))
    two = jax.random.wrap_key_data(np.zeros((2, 2), np.uint32))
    with pytest.raises(ValueError, match=r"rng is key<fry>\[2\]; pass one key"):
        build().init(start(), rng=two)
    with pytest.raises(ValueError, match="TowerLocal.reduction is 'mean'"):
        tj.TowerLocal(np.zeros(3), "mean")
    raw = build().init(start(), rng=np.array([0, 3], np.uint32))
    assert np.asarray(jax.random.key_data(raw.rng)).tolist() == [0, 3]


def test_predictions_without_a_row_each_are_refused():
    predict = tj.build_predict_step(
        lambda p, b, tower: {"mean": b["x"].mean(0), "ok": b["x"]}, tj.Mirrored(TWO)
    )
    with pytest.raises(ValueError, match=r"predictions\['mean'\] has shape \(3,\)"):
        predict(start(), good())


def test_a_state_that_was_donated_says_so(trains):
    step = trains
    state = step.init(start())
    step(state, good())
    with pytest.raises(ValueError, match="donated to an earlier step"):
        step(state, good())
    with pytest.raises(ValueError, match=r"donated to an earlier step.*error\.state"):
        step.program(state, good())


def test_what_fails_on_the_device_shows_and_not_that_the_state_was_donated():
    def fails(_):
        raise ArithmeticError("a fish")

    def one(params, batch, tower):
        shape = jax.ShapeDtypeStruct((), np.float32)
        scale = jax.pure_callback(fails, shape, jax.lax.stop_gradient(batch["x"].sum()))
        return tj.Weighted.mean(scale * (batch["x"] @ params["w"]), tower.weight)

    step = build(one, tj.Mirrored(TWO[:1]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="a fish"):
        float(step(step.init(start()), good())[1]["loss"])


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("devices", [TWO[:1], TWO])
def test_one_array_for_two_leaves_is_refused_by_name(devices):
    step = build(strategy=tj.Mirrored(devices))
    state = step.init({"w": np.ones(3, np.float32), "z": np.ones(3, np.float32)})
    state, _ = step(state, good())
    same = {"w": state.params["w"], "z": state.params["w"]}
    with pytest.raises(ValueError, match=r"'z'\] is the same array as .*'w'\]"):
        step(dataclasses.replace(state, params=same), good())
    step(state, good())  # nothing is lost


def test_a_refused_step_that_has_run_is_told_by_the_next_call(trains):
    poisoned = good(4)
    poisoned["x"][3, 0] = np.nan
    step = trains
    state = step.init(start())
    for batch in (good(), good(), poisoned):
        state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    kept = np.asarray(state.params["w"])
    with pytest.raises(tj.NonFiniteError, match="of step 2 "):
        step(state, good())
    np.testing.assert_array_equal(state.params["w"], kept)  # and not donated
    state, _ = step(state, good())
    assert int(state.step) == 4


class Loss:
    """One that arrives when it is told to, and counts who waits for it."""

    def __init__(self, value):
        self.value, self.has_arrived, self.waits = value, False, 0

    def is_ready(self):
        return self.has_arrived

    def __array__(self, dtype=None, copy=None):
        self.waits += not self.has_arrived
        return np.asarray(self.value, dtype)


@pytest.mark.parametrize("processes", [1, 2])
def test_verdicts_are_not_waited_for_and_processes_look_at_the_same_calls(processes):
    on = {"devices": ("cpu:0",), "num_processes": processes}
    placement = SimpleNamespace(platform="cpu", **on)
    verdicts = Verdicts(placement, refusals=True)
    losses = [Loss(1.0) for _ in range(15)]
    for i, loss in enumerate(losses):
        verdicts.add(i, loss)
        verdicts.check()
    assert not any(loss.waits for loss in losses)
    losses[0].has_arrived = losses[1].has_arrived = True
    losses[1].value = np.nan
    if processes == 1:
        with pytest.raises(tj.NonFiniteError, match="of step 1 "):
            verdicts.check()
        return
    verdicts.check()  # the other process may not see it yet
    verdicts.add(15, Loss(1.0))
    with pytest.raises(tj.NonFiniteError, match="of step 1 "):
        verdicts.check()


@pytest.mark.slow
def test_what_jax_debug_nans_finds_says_how_to_find_more():
    def log(w, batch, tower):
        return tj.Weighted.mean(jnp.log(w * batch), tower.weight)

    step = tj.build_train_step(log, optax.sgd(0.1), tj.Mirrored(TWO))
    state, batch = step.init(1.0), np.float32([1, 2, -1, 2])
    with jax.debug_nans(True):
        with pytest.raises(FloatingPointError, match=r"found nan.*one_tower\(step\)"):
            step(state, batch)


@pytest.mark.slow
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


def _draws(kind):
    """Losses with keys of a kind, and whether the draws depend on the devices."""

    def own(tower):
        return jax.random.fold_in(jax.random.key(3, impl=kind), tower.id)

    def shared(shape):
        return jax.random.normal(jax.random.key(3, impl=kind), shape)

    return {
        "own": (lambda t, n: jax.random.normal(own(t), n), True),
        "of the step": (lambda t, n: jax.random.uniform(t.rng, n), True),
        "shared": (lambda t, n: shared(n), False),
    }


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(
    "kind, name", [*(("rbg", name) for name in _draws("rbg")), ("unsafe_rbg", "own")]
)
def test_draws_that_depend_on_the_devices_are_refused(kind, name):
    draw, depends = _draws(kind)[name]

    def loss_fn(params, batch, tower):
        noise = draw(tower, batch["x"].shape[:1])
        return tj.Weighted.mean(batch["x"] @ params["w"] * noise)

    key = jax.random.key(0, impl=kind)
    one_each = tj.Mirrored([f"cpu:{i}" for i in range(4)])
    in_turn = tj.Mirrored(TWO, towers=4, local="scan")
    for strategy in (one_each, in_turn, tj.Mirrored(TWO, towers=4)):
        step = build(loss_fn, strategy=strategy)
        state = step.init(start(), rng=key)
        if depends and strategy.local == "vmap" and strategy is not one_each:
            with pytest.raises(tj.ReplicationError, match="rbg key .*bad_input.py"):
                step.check(state, good(8))
        else:
            step.check(state, good(8))


@pytest.mark.slow
def test_draws_of_a_call_are_looked_at_too():
    strategy = tj.Mirrored(TWO, towers=4)
    words = np.arange(16, dtype=np.uint32).reshape(4, 4)
    keys = tj.PerTower(jax.random.wrap_key_data(words, impl="rbg"))
    with pytest.raises(tj.ReplicationError, match="local='scan', or one tower a dev"):
        strategy.call_for_each_tower(lambda t, k: jax.random.normal(k), keys)


def test_what_is_no_array_among_params_is_told_of():
    params = {**start(), "f": jnp.tanh, "g": start, "name": "relu"}
    text = r"params\['f'\] is a PjitFunction: .*eqx.partition.*params\['g'\] is a func"
    for call in (build().init, lambda params: build().check(params, good())):
        with pytest.raises(ValueError, match=text + r".*params\['name'\] is a str"):
            call(params)
    with pytest.raises(ValueError, match=r"params is a Dense: .*model.init\(key, x\)"):
        build().init(nn.Dense(3))  # whose dtype is None


def test_of_many_leaves_an_error_names_the_first():
    with pytest.raises(ValueError, match=r"batch\[7\] is .* float; and 92 more\. Wrap"):
        build().check(start(), [0.5] * 100)
    text = r"batch\['x'\] is namespace.{47} \.\.\. of type SimpleNamespace\. Wrap"
    with pytest.raises(ValueError, match=text):
        build().place_batch({"x": SimpleNamespace(x=np.ones((100, 3)))})


def test_an_error_is_short_however_many_leaves_there_are():
    many = {f"w{i:03}": np.ones(3, np.float32) for i in range(60)}
    step, strategy = build(), tj.Mirrored(TWO)
    state, own = step.shapes(many), tj.PerTower(many)

    def differs(state, batch, tower):
        return {x: state.params[x] * batch["x"].sum() for x in state.params}

    own_step = tj.build_step(differs, lambda state, merged: (state, {}), strategy)
    for call, text in [
        (lambda: tj.run(state, step, [good()]), "Pass tj.build_train_step"),
        (lambda: tj.evaluate(state, step, [good()]), "Pass tj.build_eval_step"),
        (lambda: build(micro_batches=many), "must be a whole number"),
        (lambda: tj.Mirrored(cross_tower_ops=many), "is not a cross-tower op"),
        (lambda: strategy.select_tower(0, own), "must be a whole number"),
        (lambda: strategy.reduce(own, tj.Reduction.SUM), "write tj.Reduction.SUM"),
        (lambda: strategy.broadcast(1.0, many), "must be a device name"),
        (
            lambda: step.init(start(), local=many),
            r"w007'\], and 52 more: a tower-local",
        ),
        (lambda: own_step.check(state, good()), "and 52 more"),
        (
            lambda: step.place_batch({**many, **good()}),
            r"w000'\]: 3, batch\['x'\]: 4 *",
        ),
    ]:
        with pytest.raises(ValueError, match=text) as found:
            call()
        assert len(str(found.value)) < 2000


@pytest.mark.slow
def test_an_evaluation_that_was_called_in_a_trace_keeps_none_of_it():
    def metric_fn(params, batch, tower):
        return {
            "step": tj.Weighted.mean(tower.step + 0 * batch["x"][:, 0], tower.weight)
        }

    evaluate = tj.build_eval_step(metric_fn, tj.Mirrored(TWO))
    params, batch = start(), evaluate.place_batch(good())
    with pytest.raises(ValueError, match="A step is called from Python"):
        jax.jit(lambda params: evaluate(params, batch))(params)
    assert float(evaluate(params, batch)["step"].value) == 0


def test_a_reduction_hides_neither_the_rows_nor_the_mask():
    def reduced(weight_of):
        def fn(params, batch, tower):
            losses = (batch["x"] @ params["w"]) ** 2
            own = tj.Weighted.mean(losses, weight_of(tower))
            total, count = tower.reduce(tj.Reduction.SUM, (own.sum, own.weight))
            return tj.Weighted(total, count)

        return fn

    for weight_of, bad in ((lambda tower: tower.weight, False), (lambda _: None, True)):
        step = build(reduced(weight_of), remainder="pad")
        assert ("loss.sum" in step.check(start(), good(5)).unmasked()) == bad


def test_checking_without_devices_looks_at_the_batch_too():
    def loss_fn(params, batch, tower):
        return tj.Weighted.mean(params * batch["x"], tower.weight)

    def check(remainder, **batch):
        strategy = tj.Mirrored(towers=4096)
        step = tj.build_train_step(
            loss_fn, optax.sgd(0.1), strategy, remainder=remainder
        )
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


def test_integers_that_would_wrap_round_are_refused_by_name():
    def predict_fn(params, batch, tower):
        return batch["id"]

    strategy = tj.Mirrored(towers=2)
    predict = tj.build_predict_step(predict_fn, strategy)
    for value in (2**31, -(2**31) - 1, 2**40):
        ids = np.array([1, value, 3, 4])
        text = rf"batch\['id'\] is an array of int64 that holds {value} and would wrap"
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


# What NumPy has and devices have not: how to make it of ones, and what is said.
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
    "deleted": (deleted, r"a deleted array.*jnp\.copy\(x\)"),
}


def test_memory_that_is_written_in_place_is_no_parameter():
    with pytest.raises(ValueError, match=r"params\['k'\] is a int: make it smaller"):
        build().init({**start(), "k": 2**70})
    with pytest.raises(ValueError, match=r"params\['k'\] is a jax.Ref.*jnp.copy\(x\["):
        build().init({**start(), "k": jax.new_ref(jnp.ones(3))})


@pytest.mark.few_fast(5)
@pytest.mark.parametrize("name", UNHELD)
def test_what_no_device_holds_is_refused_by_name(name, compiled):
    made, text = UNHELD[name]
    bad = {"x": good()["x"], "k": made(np.ones(4, np.float32))}
    bad_params = {**start(), "k": made(np.ones(3, np.float32))}
    step, strategy = build(), tj.Mirrored(TWO)
    state = step.init(start())
    predict = tj.build_predict_step(lambda p, b, tower: b["x"], strategy)
    local = {"k": tj.TowerLocal(bad["k"], tj.Reduction.SUM)}
    calls = {
        r"batch\['k'\] is .*": [lambda: step(state, bad),
            lambda: step.check(start(), bad), lambda: predict(start(), bad),
            lambda: tj.batches(bad, 2),
            lambda: list(strategy.distribute_dataset([bad, bad])),
            lambda: list(strategy.distribute_dataset([bad, bad], split="elements"))],
        r"params\['k'\] is .*": [lambda: step.init(bad_params),
            lambda: step.check(bad_params, good()),
            lambda: predict(bad_params, good())],
        r"local\['k'\] is .*": [lambda: step.init(start(), local=local)],
    }  # fmt: skip
    compiled.clear()
    for name, several in calls.items():
        for call in several:
            with pytest.raises(ValueError, match=f"(?s){name}{text}"):
                call()
    assert not any("step" in one or "on_device" in one for one in compiled), compiled


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
        placed = step.strategy.distribute_dataset(
            [rows, rows], split=split, remainder="pad"
        )
        found = np.asarray(next(iter(placed)).arrays["id"]).reshape(-1)
        np.testing.assert_array_equal(found[: 5 * n], np.tile(ids, n))


def test_check_refuses_the_params_that_init_refuses():
    params = {**start(), "k": np.ones(3, "float8_e4m3fn")}
    text = r"is floating.*params\['k'\] is float8_e4m3fn\."
    shape = jax.eval_shape(lambda: params)
    for call in (
        lambda: build().init(params),
        lambda: build().check(params, good()),
        lambda: build().check(shape, good()),
    ):
        with pytest.raises(ValueError, match=text):
            call()
    for empty in ({}, {"w": None}):
        with pytest.raises(ValueError, match="params holds no arrays"):
            build().check(empty, good())
    with pytest.raises(ValueError, match=r"params\['k'\] is a shape alone"):
        build().init({"k": jax.ShapeDtypeStruct((3,), np.float32)})
