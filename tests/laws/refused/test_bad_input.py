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
from mistaken import (
    FOUR,
    SGD,
    SUM,
    TWO,
    S,
    build,
    check,
    evaluate,
    good,
    loss,
    loss_fn,
    measure,
    metric_fn,
    on_one,
    start,
    used,
)
from refusals import refused

import towerjax as tj


def of_symbol():
    """The shape of a batch of any number of rows."""
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape("n, 3"), np.float32)


def init(params=None, **options):
    return lambda: build().init(start() if params is None else params, **options)


def in_place(state):
    """A call with a state that a function makes, of a step that is in use."""
    return lambda: used()[0](state(), good())


@dataclasses.dataclass
class Rows:
    """A class that JAX does not know as a tree."""

    x: np.ndarray


# Batches that are none, and batches unlike the first one.
BATCHES = {
    "indivisible": (good(5), r"batch\['x'\] has 5 examples, which 2 towers.*remainder"),
    "different sizes": ({"x": np.ones((4, 3), np.float32), "y": np.ones(2)},
        r"batch\['x'\]: 4, batch\['y'\]: 2.*how_to/uneven_data.md#graphs"),
    "scalar": ({"x": np.ones((4, 3)), "k": np.float32(1)}, r"batch\['k'\] is "),
    "numbers": ({"x": np.ones((4, 3)), "k": 3}, r"batch\['k'\] is 3 of type int"),
    "list": ({"x": [1.0, 2.0]},
        r"'x'\]\[0\] \(and 1 more of that list\) is 1.0 of.*np.asarray"),
    "frame": ({"x": SimpleNamespace(to_numpy=len)},
        r"pass x\.to_numpy\(\), or a dict of"),
    "empty": ({"x": np.ones((0, 3))}, r"batch is empty: batch\['x'\] has shape"),
    "no leaves": ({}, "holds no arrays"),
    "no rows": (tj.Whole(np.ones(3)), "holds no arrays: .* draw .*np.arange"),
    "dataclass": ({"x": Rows(np.ones((4, 3)))},
        r"batch\['x'\] is a Rows: register the class, jax\.tree_util\.reg.*a dict\. W"),
    "many": ([0.5] * 100,
        r"batch\[0\] \(and 99 more of that list\) is .* float\. Wrap"),
    "long": ({"x": SimpleNamespace(x=np.ones((100, 3)))},
        r"batch\['x'\] is namespace.{47} \.\.\. of type SimpleNamespace\. Wrap"),
}  # fmt: skip
CHANGES = {
    "new leaf": ({**good(), "y": np.ones(4)},
        r"batch\['y'\] is float32\[4\], expected absent"),
    "other name": ({"z": good()["x"]},
        r"batch\['x'\] is absent, .*batch\['z'\] is .*, expected absent"),
    "dtype": ({"x": np.ones((4, 3), np.int32)}, r"is int32\[.*, expected float32\[4"),
    "trailing shape": ({"x": np.ones((4, 5), np.float32)}, r"\[4, 5\].*\[4, 3\]"),
    "size": (good(6), r"is float32\[6, 3\], expected float32\[4, 3\].*"),
    "container": ([good()["x"]],
        r"batch\['x'\] is absent, .*batch\[0\] is .*, expected absent"),
}  # fmt: skip


@pytest.mark.parametrize("name", [*BATCHES, *CHANGES])
def test_malformed_batches_are_refused(name, compiled):
    used()
    batch, text = (BATCHES | CHANGES)[name]
    if name in CHANGES:
        text = rf"has changed since.*{text}.*max_programs=\.\.\. \(now 1\)"
    else:
        fresh = build()
        refused(compiled, lambda: fresh(used()[1], batch), text)
    refused(compiled, lambda: used()[0](used()[1], batch), text)


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
    "tuple": (lambda p, b, t: (p["w"].sum(), {}), r"returned a tuple.*TowerOutput"),
    "none": (lambda p, b, t: None, "returned a NoneType"),
    "text": (lambda p, b, t: "mse", r"returned a str as .* Return tj\.Weighted"),
    "bare vector": (lambda p, b, t: p["w"], r"not a scalar: sum has shape \(3,\)"),
    "negative weight": (lambda p, b, t: tj.Weighted(p["w"].sum(), -1.0),
        "weight must be >= 0, but has -1.0"),
    "negative weights": (
        lambda p, b, t: tj.Weighted.mean(b["x"][:, 0], np.array([1.0, -2.0])),
        r"a weight of -2\.0, .* Give 0 to mask"),
    "weights of another shape": (lambda p, b, t: tj.Weighted.mean(b["x"].T, t.weight),
        r"shape \(3, 2\) and weights of shape \(2,\)"),
    "loss as metric": (beside(lambda b: {"loss": 1}),
        "the global loss there. Give your metric another name"),
    "metrics not named": (beside(lambda b: [1]), "must be a dict of names"),
    "nested metrics": (beside(lambda b: {"group": {"a": tj.Weighted(1.0, 1.0)}}),
        r"metrics\['group'\] is a dict.*'group/part'"),
    "rows as a metric": (beside(lambda b: {"r": tj.Rows(b["x"])}),
        r"metrics\['r'\] is a Rows.*tj\.build_step and tj\.Rows\(x\)"),
    "metric named by a number": (beside(lambda b: {1: tj.Weighted(1.0, 1.0)}),
        "arrays under names: 1 is not a string"),
    "metric that is none": (beside(lambda b: {"m": None}),
        r"metrics\['m'\] is a NoneType"),
    "local not there": (
        lambda p, b, t: tj.TowerOutput(loss(p), local={"n": jnp.ones(())}),
        r"local\['n'\] is float32\[\], expected absent"),
}
# fmt: on


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_are_none_are_refused(name, compiled):
    fn, text = LOSSES[name]
    step = build(fn, on_one(2))
    state = step.init(start())
    refused(compiled, lambda: step(state, good()), text)


# States, parameters, optimizers, and calls of which something stands elsewhere.


def start_of(strategy=S, params=None, optimizer=SGD, **options):
    step = build(strategy=strategy, optimizer=optimizer)
    return step.init(start() if params is None else params, **options)


def copies(*size):
    local = {"n": tj.TowerLocal(np.zeros(size), SUM)}
    state = tj.TrainState.create(start(), optax.sgd(0.1), local=local)
    return lambda: build().place(state)


def narrow():
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), start_of().params)
    return dataclasses.replace(start_of(), params=params)


def donated(take):
    def call():
        step = used()[0]
        state = start_of()
        step(state, good())
        take(step, state)

    return call


def put_aside():
    kept = []
    jax.eval_shape(kept.append, np.float32(1))
    return kept[0]


def twice(devices):
    """A state of which one array is two leaves."""

    def call():
        step = build(strategy=tj.Mirrored(devices))
        state, _ = step(step.init(start(z=np.ones(3, np.float32))), good())
        same = dict.fromkeys(state.params, state.params["w"])
        try:
            step(dataclasses.replace(state, params=same), good())
        finally:
            step(state, good())  # nothing is lost

    return call


def changes_types(grads, state, params=None):
    return jax.tree.map(lambda g: -g, grads), state.astype(jnp.float32)


def needs_more(updates, state, params=None, *, temperature):
    return jax.tree.map(lambda x: x * temperature, updates), state


CAST = optax.GradientTransformation(lambda p: jnp.int32(0), changes_types)
NEEDY = optax.GradientTransformationExtraArgs(optax.identity().init, needs_more)
MOMENTUM = optax.sgd(0.1, momentum=0.9)
ONE = nnx.Param(np.ones(3, np.float32))
SHARED = [{"kernel": ONE}, {"kernel": ONE}]
THERE = tj.Mirrored(("cpu:2", "cpu:3"))
LOCAL = {"n": tj.TowerLocal(np.zeros(()), SUM)}
NO_ARRAYS = start(f=jnp.tanh, g=start, name="relu")
NO_ARRAYS_TEXT = r"params\['f'\] is a PjitFunction: .*eqx.partition.*params\['g'\] is a"
NO_ARRAYS_TEXT += r" func.*params\['name'\] is a str"
TWINS = r"params\[0\]\['kernel'\] and .*\[1\]\['kernel'\] are one nnx.Param, .*split"
FLOAT8 = start(k=np.ones(3, "float8_e4m3fn"))
FLOAT8_TEXT = r"must be floating.*params\['k'\] is float8_e4m3fn\."
UNPACK = r"state, metrics = step\(state, batch\)\.$"
NO_STATE = "^The state is None. P"
ASIDE = r" has no value, .*put it aside.*Return it.*tj\.TowerOutput\(loss"
MIXED = {"x": np.ones(4, np.float32), 0: np.ones(4, np.float32)}
KEYS = " is a dict with keys of several types, 'x', 0, .* Make all keys strings"
OTHERS = "towers than 2: state.local"
ELSEWHERE = r"not a tj.TrainState. Make one with"
SWAPPED = r"build_train_step: optimizer is a Mirrored, strategy is a Gradient\w+, as if"
SWAPPED += r" arguments were swapped. Write build_train_step\(loss_fn, optimizer, strat"
UPDATE = r"update_fn is a Mirrored.* swapped. Write build_step\(tower_fn, update_fn"
FIRST = r"first: step\(state, batch\)\.$"
INSIDE = r"step\.fn\(state, batch\)"
DONATED = r"donated to (step 1|an earlier step)"
SAME = r"'z'\] is the same array as .*'w'\]"


def forgotten(params, batch, tower):
    out = batch["x"] @ params["w"]
    return tj.TowerOutput(
        loss=tj.Weighted.mean(out**2, tower.weight),
        metrics={"fine": tj.Weighted.mean(out), "worst": jnp.abs(out).max()},
    )


FORGOTTEN = forgotten.__code__.co_firstlineno + 4
# fmt: off
CALLS = {
    "a state of other devices": (in_place(lambda: start_of(THERE)),
        r"not placed .*\['cpu:0', 'cpu:1'\].*step\.place\(state\)"),
    "a state of other towers": (in_place(lambda: start_of(FOUR, local=LOCAL)),
        r"another number of towers than 2: state\.local\['n'\]"),
    "a state of the host": (in_place(lambda: jax.device_get(start_of())), "the host"),
    "parameters as a state": (in_place(start), ELSEWHERE),
    "None as a state": (in_place(lambda: None), ELSEWHERE),
    "a state and more": (in_place(lambda: (start_of(), 1)), UNPACK),
    **{f"what a step returned, to {name}": (lambda call=call: call(used()), UNPACK)
        for name, call in {
            "its fn": lambda both: both[0].fn((both[1], {}), good()),
            "an evaluation": lambda both: evaluate((both[1], {}), good()),
            "tj.evaluate": lambda both: tj.evaluate(
                tj.build_eval_step(metric_fn, S), (both[1], {}), [good()]),
            "check": lambda both: both[0].check((both[1], {}), good()),
            "init": lambda both: both[0].init((both[1], {})),
            "place": lambda both: both[0].place((both[1], {}))}.items()},
    "a donated state, to fn": (
        donated(lambda step, state: step.fn(state, good())), DONATED),
    "a donated state, to place": (
        donated(lambda step, state: step.place(state)), DONATED),
    "None to evaluate": (lambda: tj.evaluate(
        tj.build_eval_step(metric_fn, S), None, [good()]), NO_STATE),
    "None to an evaluation": (lambda: evaluate(None, good()), NO_STATE),
    "a value put aside, as a batch": (
        lambda: used()[0](used()[1], {**good(), "y": put_aside()}),
        rf"^batch\['y'\]{ASIDE}"),
    "a value put aside, as parameters": (lambda: init({"w": put_aside()})(),
        rf"^params\['w'\]{ASIDE}"),
    "a value put aside, to evaluate": (
        lambda: evaluate({"w": put_aside()}, good()), rf"^state\['w'\]{ASIDE}"),
    **{f"mixed keys, to {name}": (call, text) for name, call, text in [
        ("init", init({"a": start(), "b": MIXED}), rf"^params\['b'\]{KEYS}"),
        ("init, extra", init(extra=[MIXED]), rf"^extra\[0\]{KEYS}"),
        ("create", lambda: tj.TrainState.create(MIXED, SGD), f"^params{KEYS}"),
        ("a step", lambda: used()[0](used()[1], MIXED), f"^batch{KEYS}"),
        ("check", lambda: build().check(start(), MIXED), f"^batch{KEYS}"),
        ("batches", lambda: tj.batches(MIXED, 2), f"^batch{KEYS}"),
        ("a data set", lambda: [*S.distribute_dataset([MIXED])], f"^batch{KEYS}")]},
    "no copies": (copies(), rf"{OTHERS}.* model\.init\(tj\.TrainState\.create"),
    "three copies": (copies(3), OTHERS), "four copies": (copies(4, 2), OTHERS),
    "other parameters": (
        in_place(lambda: start_of(params=start(b=np.ones(1, np.float32)))),
        r"params\['b'\] is float32\[1\], expected absent"),
    "narrow parameters": (in_place(narrow), r"is bfloat16\[3\], expected float32\[3\]"),
    "another optimizer": (
        lambda: build(optimizer=MOMENTUM)(start_of(optimizer=SGD), good()),
        r"opt_state\[0\]\..*another optimizer"),
    "another optimizer, with more state": (
        lambda: build(optimizer=MOMENTUM)(start_of(optimizer=optax.adam(1)), good()),
        r"opt_state\[0\]\..*another optimizer"),
    "a donated state": (donated(lambda step, state: step(state, good())), DONATED),
    "a donated state, to a program": (
        donated(lambda step, state: step.program(state, good())),
        rf"{DONATED}.*error\.state"),
    "one array twice": (twice(TWO[:1]), SAME), "twice on two": (twice(TWO), SAME),
    "batch for state": (lambda: used()[0](good(), used()[1]), FIRST),
    "place a state": (lambda: build().place_batch(used()[1]), FIRST),
    "check a state": (check(batch=start_of()), FIRST),
    "evaluate a state": (lambda: evaluate(good(), used()[1]), FIRST),
    "batches: a state": (lambda: measure(used()[1])(), "^batches is a Train.* tj."),
    "batches: one": (measure(good()), "^batches is one batch.* tj.batches"),
    "batches: a number": (measure(3), "^batches is an int.* tj.batches"),
    "batches: a function": (lambda: tj.run(build(), used()[1], lambda: [good()]),
        "^batches is a function, but must be an ite.* Call it, or pass "),
    "in a jit": (lambda: jax.jit(build())(used()[1], good()), INSIDE),
    "in eval_shape": (
        lambda: jax.eval_shape(lambda x: build()(x, good()), used()[1]), INSIDE),
    "evaluation in a jit": (lambda: jax.jit(evaluate)(used()[1], good()), INSIDE),
    "evaluation in a vmap": (lambda: jax.vmap(lambda p: evaluate(p, good()))(
        {"w": np.ones((2, 3))}), INSIDE),
    "a loss_reduction of a mean": (check(loss_reduction=tj.Reduction.MEAN),
        "is for a loss that is a bare scalar"),
    "a loss_reduction that takes one": (
        lambda: tj.value_and_grad(loss_fn, loss_reduction=tj.Reduction.NONE),
        "one of None, Reduction.SUM, Reduction.MEAN"),
    "an optimizer that casts": (check(optimizer=CAST),
        r"state\.opt_state is float32\[\], expected int32\[\]"),
    "an optimizer that needs more": (check(optimizer=optax.chain(NEEDY, SGD)),
        r"keyword-only argument: 'temperature'\. A step gives it.*tj\.build_step\("),
    "init of a text to keep": (init(opt_state={"mode": "a"}),
        r"^Devices can hold only arrays of numbers, but opt_state\['mode'\] is a str"),
    "shared weights": (init(SHARED), TWINS),
    "shared weights of a state": (lambda: tj.TrainState.create(SHARED, SGD), TWINS),
    "a text to keep in a state": (
        lambda: tj.TrainState.create(start(), SGD, extra={"mode": "a"}),
        r"^Devices can hold only arrays of numbers, but extra\['mode'\] is a str"),
    "swapped": (lambda: tj.build_train_step(loss_fn, S, SGD), SWAPPED),
    "a device": (lambda: tj.build_train_step(loss_fn, SGD, "cpu:0"),
        r"strategy is a str. Write .*tj.Mirrored\(\)"),
    "an optimizer of nnx": (
        lambda: tj.build_train_step(loss_fn, SimpleNamespace(update=len, tx=SGD), S),
        r"of optax \(of nnx.* the tx\) and a"),
    "a strategy for an update": (lambda: tj.build_step(loss_fn, S, loss_fn), UPDATE),
    "for that of a list": (lambda: tj.build_step([loss_fn], S, loss_fn), UPDATE),
    "no passes": (lambda: tj.build_step([], loss_fn, S),
        "build_step: tower_fn is a NoneType. Write"),
    "swapped in eval": (lambda: tj.build_eval_step(S, loss_fn),
        "_fn is a Mirrored, strategy is a func"),
    "swapped in predict": (lambda: tj.build_predict_step(S, loss_fn),
        "_fn is a Mirrored, strategy is a func"),
    "init of a state": (lambda: init(used()[1])(), r"step\.init\(state\.params\), or"),
    "init of Flax's": (
        init(TrainState.create(apply_fn=None, params=start(), tx=SGD)),
        r"is a TrainState.*its optimizer \(.*state\.tx"),
    "init of a module": (init(nn.Dense(3)), r"params is a Dense: .*model.init\(key, x"),
    "init of no arrays": (init(NO_ARRAYS), NO_ARRAYS_TEXT),
    "check of no arrays": (lambda: build().check(NO_ARRAYS, good()), NO_ARRAYS_TEXT),
    "init of float8": (init(FLOAT8), FLOAT8_TEXT),
    "check of float8": (lambda: build().check(FLOAT8, good()), FLOAT8_TEXT),
    "check of its shape": (
        lambda: build().check(jax.eval_shape(lambda: FLOAT8), good()), FLOAT8_TEXT),
    "check of {}": (lambda: build().check({}, good()), "params holds no arrays"),
    "check of None": (lambda: build().check({"w": None}, good()), "params holds no a"),
    "init of a shape": (init({"k": jax.ShapeDtypeStruct((3,), np.float32)}),
        r"params\['k'\] is a shape alone"),
    "check of a symbol": (
        lambda: build().check(start(), {**good(), "x": of_symbol()}),
        r"batch\['x'\] is of shape \(n, 3\), with a symbol: give a number"),
    "a step of a symbol": (
        lambda: jax.eval_shape(build().fn, build().init(start()), of_symbol()),
        r"batch is of shape \(n, 3\), with a symbol: give a number"),
    "init of a long int": (init(start(k=2**70)), r"params\['k'\] is an int: make it"),
    "init of a Ref": (lambda: init(start(k=jax.new_ref(jnp.ones(3))))(),
        r"params\['k'\] is a jax.Ref.*jnp.copy\(x\["),
    "local": (init(local={"n": np.zeros(3)}), r"local\['n'\].*tj\.TowerLocal\(value"),
    "rng": (init(rng=np.zeros(2, np.float32)), "rng is float32"),
    "two rngs": (lambda: init(rng=jax.random.wrap_key_data(np.zeros((2, 2), "u4")))(),
        r"rng is key<fry>\[2\]; pass one key"),
    "reduction": (lambda: tj.TowerLocal(np.zeros(3), "mean"),
        "TowerLocal.reduction is 'mean'"),
    "a forgotten reduction": (lambda: build(forgotten)(start_of(), good()),
        rf"metrics\['worst'\] depends on batch\['x'\].*test_bad_input\.py:{FORGOTTEN} "
        r"\(forgotten\)"),
    "predictions without rows": (
        lambda: tj.build_predict_step(lambda p, b, t: {"mean": b["x"].mean(0)}, S)(
            start(), good()),
        r"predictions\['mean'\] has shape \(3,\)"),
}
# fmt: on


@pytest.mark.few_fast(40)
@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_is_refused(name, compiled):
    used()
    call, text = CALLS[name]
    if name.startswith(("a donated", "one array", "twice")):  # compile and donate
        with pytest.raises(ValueError, match=re.compile(text, re.DOTALL)):
            call()
    else:
        refused(compiled, call, text)


@pytest.mark.slow
def test_what_is_right_beside_mistakes_passes():
    step = build()
    strange = start_of(THERE)
    step(step.place(strange), good())
    momentum = build(optimizer=MOMENTUM)
    anew = dataclasses.replace(strange, opt_state=momentum.init(start()).opt_state)
    momentum.check(anew, good())
    count = nnx.Variable(np.int32(0))
    build().init([ONE, count, count])  # as of keys, which do not train
    raw = build().init(start(), rng=np.array([0, 3], np.uint32))
    assert np.asarray(jax.random.key_data(raw.rng)).tolist() == [0, 3]


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

    run = builder(fn, on_one(1), max_programs=2)
    two = {"w": np.ones(2, np.float32)}
    for size in (4, 6):
        with pytest.raises(ValueError, match="^two weights"):
            run(two, good(size))
        run(start(), good())
    for params in (two, {"v": two["w"]}, {"w": np.ones(3, np.int32)}):
        text = "does not fit this step: .*or parameters each"
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

    # step.fn has no rows to audit, and no proof reads a callback.
    step = build(fn, on_one(2), audit=False)
    with pytest.raises(ValueError, match="vmap") as caught:
        jax.eval_shape(step.fn, step.shapes(start()), good())
    told = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert "tower_loop='scan'" in " ".join(told)
    step = build(fn, on_one(2, tower_loop="scan"), audit=False)
    jax.eval_shape(step.fn, step.shapes(start()), good())


def test_an_ordered_print_on_several_devices_is_told_of():
    def loud(params, batch, tower):
        jax.debug.print("{}", tower.id, ordered=True)
        return loss_fn(params, batch, tower)

    step = build(loud)
    with pytest.raises(ValueError, match="ordered effects") as caught:
        step.program(step.init(start()), good())
    assert "write ordered=False" in caught.value.__notes__[0]


@pytest.mark.slow
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


WITH_VERBS = tj.tf1.with_verbs(S)
UNLIKE = {
    "fn(tower, *args)": lambda fn: WITH_VERBS.call_for_each_tower(fn),
    "loss_fn(params, batch, tower)": lambda fn: build(fn),
    "metric_fn(params, batch, tower)": lambda fn: tj.build_eval_step(fn, S),
    "predict_fn(params, batch, tower)": lambda fn: tj.build_predict_step(fn, S),
    "tower_fn(state, batch, tower)": lambda fn: tj.build_step(fn, loss_fn, S),
    "tower_fn(state, batch, tower, merged)": lambda fn: tj.build_step(
        (loss_fn, fn), loss_fn, S
    ),
    "update_fn(state, merged)": lambda fn: tj.build_step(loss_fn, fn, S),
    "hook(number, metrics)": lambda fn: tj.run(
        build(), build().init(start()), [good()], hooks=[fn]
    ),
    "function(number, state, metrics)": lambda fn: tj.loop.WithState(fn, every=2),
}
OTHER_ORDER = {
    "loss_fn(params, batch, tower)": lambda tower, params, batch: 0,
    "tower_fn(state, batch, tower)": lambda batch, state, tower: 0,
    "update_fn(state, merged)": lambda merged, state: 0,
}


@pytest.mark.slow
def test_a_function_of_other_arguments_is_told_its_form():
    for form, use in UNLIKE.items():
        text = rf"the signature \(\) cannot be called as {re.escape(form)}: too many"
        with pytest.raises(ValueError, match=text):
            use(lambda: 0)
    for form, fn in OTHER_ORDER.items():
        text = f"called as {form}: its arguments have another order. Write def"
        with pytest.raises(ValueError, match=re.escape(text)):
            UNLIKE[form](fn)
    assert WITH_VERBS.call_for_each_tower(lambda tower, x, args: x + args, 1, 2) == 3

    @functools.wraps(lambda x: x)
    def wrapping(tower, x):  # is asked itself, and not what it wraps
        return x + tower.id

    out = tj.tf1.OneDeviceStrategy("cpu:0").call_for_each_tower(wrapping, np.float32(1))
    assert tj.tf1.OneDeviceStrategy("cpu:0").unwrap(out) == [1.0]


def test_an_error_is_short_however_many_leaves_there_are():
    many = {f"w{i:03}": np.ones(3, np.float32) for i in range(60)}
    step = build()
    strategy = tj.tf1.MirroredStrategy(TWO)
    state = step.shapes(many)
    own = tj.PerTower(many)

    def differs(state, batch, tower):
        return {x: state.params[x] * batch["x"].sum() for x in state.params}

    own_step = tj.build_step(differs, lambda state, merged: (state, {}), strategy)
    for call, text in [
        (lambda: tj.run(state, step, [good()]), "Pass tj.build_train_step"),
        (lambda: tj.evaluate(state, step, [good()]), "Pass tj.build_eval_step"),
        (lambda: build(micro_batches=many), "must be a whole number"),
        (lambda: tj.Mirrored(cross_tower_ops=many), "is not a cross-tower op"),
        (lambda: strategy.select_tower(0, own), "must be a whole number"),
        (lambda: strategy.reduce(own, SUM), "Write tj.Reduction.SUM"),
        (lambda: strategy.broadcast(1.0, many), "must be a device name"),
        (lambda: step.init(start(), local=many), r"w007'\], and 52 more: a tower-loc"),
        (lambda: own_step.check(state, good()), "and 52 more"),
        (lambda: step.place_batch(many | good()), r"w000'\]: 3, batch\['x'\]: 4 *"),
    ]:
        refused([], call, text)


# Without a device.


def test_check_refuses_without_a_device():
    strategy = tj.Mirrored(tuple(f"gpu:{i}" for i in range(64)))
    step = build(forgotten, strategy)
    with pytest.raises(tj.ReplicationError, match="worst"):
        step.check(start(), {"x": jax.ShapeDtypeStruct((128, 3), jnp.float32)})
    build(strategy=strategy).check(start(), good(128))
    with pytest.raises(
        ValueError, match=r"'gpu:7', and 56 more are not on this machine"
    ):
        step.init(start())
