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
from refusals import refused

import towerjax as tj

TWO = ("cpu:0", "cpu:1")
SGD = optax.sgd(0.01)
SUM = tj.Reduction.SUM
S = tj.Mirrored(TWO)


def on_one(towers, **options):
    return tj.Mirrored(TWO[:1], towers=towers, **options)


def loss_fn(params, batch, tower):
    return tj.Weighted.mean((batch["x"] @ params["w"]) ** 2, tower.weight)


def metric_fn(params, batch, tower):
    return {"loss": loss_fn(params, batch, tower)}


def good(rows=4):
    rng = np.random.default_rng(rows)
    return {"x": rng.normal(size=(rows, 3)).astype(np.float32)}


def start(**more):
    return {"w": np.array([1.0, 2.0, 3.0], np.float32), **more}


def build(fn=loss_fn, strategy=S, optimizer=SGD, **options):
    return tj.build_train_step(fn, optimizer, strategy, **options)


@functools.cache
def used():
    """A step that is compiled for `good`, and a state."""
    step = build()
    return step, step(step.init(start()), good())[0]


def check(fn=loss_fn, strategy=S, batch=None, **options):
    """A call of ``check`` of a train step."""
    batch = good() if batch is None else batch
    return lambda: build(fn, strategy, **options).check(start(), batch)


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


# Losses that are none.


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
FOUR = tj.Mirrored(TWO, towers=4)
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


def evaluate(*args):
    return tj.build_eval_step(metric_fn, S)(*args)


def measure(batches):
    return lambda: tj.evaluate(tj.build_eval_step(metric_fn, S), start(), batches)


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


@pytest.mark.parametrize("name", CALLS)
def test_a_mistake_is_refused(name, compiled):
    used()
    call, text = CALLS[name]
    if name.startswith(("a donated", "one array", "twice")):  # compile and donate
        with pytest.raises(ValueError, match=re.compile(text, re.DOTALL)):
            call()
    else:
        refused(compiled, call, text)


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


# Padding, and rows that stand where they are not looked for.


@pytest.mark.slow
def test_padding_that_nothing_masks_is_refused(compiled):
    def careless(params, batch, tower):
        return tj.Weighted.mean((batch["x"] @ params["w"]) ** 2)

    step = build(careless, remainder="pad")
    text = "does not depend on tower.weight"
    state = step.init(start())
    refused(compiled, lambda: step(state, good(5)), text)
    state, _ = step(state, good(6))
    refused(compiled, lambda: step(state, good(5)), text)
    measure = tj.build_eval_step(lambda p, b, t: {"m": tj.Weighted.mean(b["x"])}, S)
    with pytest.raises(ValueError, match=text):
        measure(state, good(5))


@pytest.mark.parametrize("count", [1, 2])
def test_padding_that_the_other_part_of_a_loss_masks_is_refused(count):
    def careless(params, batch, tower):
        masked = tower.weight * (batch["x"] @ params["w"]) ** 2
        unmasked = batch["x"] ** 2 * params["aux"]
        return tj.Weighted(masked.sum() + unmasked.sum(), tower.weight.sum())

    step = build(careless, tj.Mirrored(TWO[:count], towers=2), remainder="pad")
    params = start(aux=np.float32(1))
    assert step.check(params, good(5)).unmasked() == ["grads.sum['aux']"]


@pytest.mark.parametrize("parts", [1, 2])
def test_padding_that_a_later_micro_batch_is_given_is_refused(parts):
    def careless(params, batch, tower):
        loss = tj.Weighted(params["aux"] * tower.local["seen"], tower.weight.sum())
        return tj.TowerOutput(loss, local={"seen": batch["x"].mean()})

    how = {"micro_batches": parts, "remainder": "pad"}
    step = build(careless, tj.Mirrored(TWO[:1], towers=2), **how)
    local = {"seen": tj.TowerLocal(np.float32(0.5), tj.Reduction.MEAN)}
    proof = step.check(start(aux=np.float32(1)), good(5), local=local)
    expected = ["grads.sum['aux']", "loss.sum"] if parts == 2 else []
    assert proof.unmasked() == expected


@pytest.mark.parametrize("weighted", [True, False])
def test_a_reduction_hides_neither_the_rows_nor_the_mask(weighted):
    def fn(params, batch, tower):
        losses = (batch["x"] @ params["w"]) ** 2
        own = tj.Weighted.mean(losses, tower.weight if weighted else None)
        return tj.Weighted(*tower.reduce(SUM, (own.sum, own.weight)))

    found = check(fn, batch=good(5), remainder="pad")().unmasked()
    assert ("loss.sum" in found) != weighted


@pytest.mark.slow
def test_numbers_of_columns_and_masks_are_not_taken_for_padding():
    class Mean(tj.metrics.Additive):
        total: jax.Array
        count: jax.Array

        def compute(self):
            return self.total / self.count

    def right(params, batch, tower):  # of three columns and of three rows a tower
        columns = tower.weight @ batch["x"]
        metrics = {
            "share": tj.Weighted.mean(tower.weight),
            "columns": tj.Weighted.mean(columns**2),
            "tower": tj.Weighted(columns.sum(), 1.0),
            "none": Mean(columns.sum(), jnp.zeros(0)),  # no element counts a row
        }
        return tj.TowerOutput(loss_fn(params, batch, tower), metrics)

    how = {"remainder": "pad", "audit": False}  # "tower" is a mean over towers
    assert check(right, batch=good(5), **how)().unmasked() == []

    def means(params, batch, tower):
        weight = batch["x"][:, 0] ** 2 * tower.weight
        second = tj.Weighted.mean(batch["x"] @ params["w"], weight)
        return loss_fn(params, batch, tower) + second

    step = build(means, remainder="pad")  # the gradient of z is a complex 0
    assert step.check(start(z=np.complex64(1j)), good(5)).unmasked() == []


def gaps_of(params, batch):  # as where predictions [b] meet labels [b, 1]
    return (batch["x"] @ params["w"])[None] - batch["x"][:, :1]


def column(params, batch, tower):
    return tj.Weighted.mean(gaps_of(params, batch) ** 2, tower.weight)


def unweighted(params, batch, tower):
    return tj.Weighted.mean(jax.checkpoint(gaps_of)(params, batch) ** 2)


def of_a_metric(params, batch, tower):
    gap = tj.metrics.mean(abs(gaps_of(params, batch)), tower.weight)
    return tj.TowerOutput(loss_fn(params, batch, tower), {"gap": gap})


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("fn, towers, rows, options", [
    (column, 2, 6, {}), (column, 4, 8, {"remainder": "pad"}),
    (column, 2, 8, {"micro_batches": 2}), (unweighted, 4, 8, {"remainder": "pad"}),
    (of_a_metric, 2, 8, {"micro_batches": 2}),
])  # fmt: skip
def test_labels_as_a_column_are_refused(fn, towers, rows, options):
    """Predictions [b] less labels [b, 1] are [b, b], of each tower's rows alone."""
    step = build(fn, on_one(towers), audit=True, **options)
    with pytest.raises(ValueError, match="gap|loss"):
        step(step.init(start()), good(rows))


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
    check(fn, on_one(towers), good(3 * towers))()


def of_six(params, batch, tower):
    return tj.Weighted(((batch["x"] @ params["w"]) ** 2).sum(), 6)


def of_all_numbers(params, batch, tower):
    squares = (batch["x"] * params["w"][None]) ** 2
    return tj.Weighted(squares.sum(), squares.size)


def of_parameters(params, batch, tower):
    return tj.Weighted.mean(params["w"] ** 2 * batch["x"].mean(0))


def of_means(params, batch, tower):
    return tj.Weighted(((batch["x"] @ params["w"]) ** 2).mean(), 1)


OWN = [(of_six, 1, 6), (of_all_numbers, 3, 6), (of_parameters, 3, 3), (of_means, 6, 6)]


@pytest.mark.parametrize(("fn", "towers", "rows"), OWN)
def test_weights_that_are_numbers_of_a_towers_own_pass(fn, towers, rows):
    """Also where they are by chance as many as the whole batch has rows."""
    check(fn, on_one(towers), good(rows))()


@pytest.mark.parametrize("rows", [12, 11, 16])
def test_rows_in_another_dim_than_the_first_are_refused(rows):
    """Also where there are as many as of what is first, so that weights would fit."""

    def by_time(params, batch, tower):
        losses = (batch["x"] * params["w"][None]).T ** 2  # [3, b]
        return tj.Weighted.mean(losses, tower.weight)

    text = r"values of shape \(3, \d+\) .*: give jnp.moveaxis\(values, 1, 0\)"
    step = build(by_time, on_one(4), audit=True, remainder="pad")
    with pytest.raises(ValueError, match=text):
        step(step.init(start()), good(rows))


def of_reduced(params, batch, tower):
    rows = tj.Weighted.mean(batch["x"][:, 0], tower.weight)
    mean = tower.reduce(SUM, rows).value
    return tj.Weighted.mean(batch["x"] @ params["w"] * mean, tower.weight)


def of_gathered(params, batch, tower):
    x, weight = tower.all_gather((batch["x"], tower.weight), axis=0)
    return tj.Weighted.mean(batch["x"] @ params["w"] * (weight @ x[:, 0]), tower.weight)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.parametrize("fn", [of_reduced, of_gathered])
def test_what_micro_batches_tell_each_other_alone_is_warned_of(fn, towers):
    """Such a loss is another one for each number of micro-batches."""
    text = rf"Each of 2 micro-batches calls tower\.\w+ at \S+ \({fn.__name__}\) with"
    with pytest.warns(UserWarning, match=text):
        check(fn, on_one(towers), micro_batches=2)()
    check(fn, on_one(towers))()


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


LOST = [
    lambda p, w: w,
    lambda p, w: jax.lax.stop_gradient(p),
    lambda p, w: jnp.float32(p > 0),
    lambda p, w: jax.jit(jnp.round)(p).astype(int),
]


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("loss_of", LOST)
def test_a_loss_without_a_gradient_is_refused(loss_of):
    """As of a model that a loss function closes over, or of a count of hits."""
    closed_over = np.float32(1)

    def mean(params, batch, tower):
        values = loss_of(params["w"].sum(), closed_over) * batch["x"][:, 0]
        return tj.Weighted.mean(values, tower.weight)

    text = "The loss depends on no parameter, so that every gradient is 0"
    for loss in (mean, lambda *args: mean(*args) + tj.penalty(1.0)):
        with pytest.raises(ValueError, match=text):
            check(loss)()

    def penalised(params, batch, tower):
        return mean(params, batch, tower) + tj.penalty(params["w"].sum())

    check(penalised)()


def of_outside(params, batch, tower):
    """A mean over rows of a notebook, and not of the batch."""
    return tj.Weighted.mean((OUTSIDE @ params["w"]) ** 2)


READS_NO_ROW = {
    "a mean": of_outside,
    "in jit": jax.jit(of_outside),
    "means": lambda *args: of_outside(*args) + 0.1 * of_outside(*args),
    "a penalty": lambda p, b, t: tj.Weighted.mean(0 * t.weight) + tj.penalty(p["w"][0]),
    "only a metric reads": lambda p, b, t: tj.TowerOutput(
        of_outside(p, b, t), {"x": tj.Weighted.mean(b["x"], t.weight[:, None])}
    ),
}
OUTSIDE = np.float32([[1, 2, 3], [4, 5, 6]])
READS = {
    "noise": lambda p, b, t: tj.Weighted.mean(
        jax.random.normal(t.rng, t.weight.shape) * p["w"][0], t.weight
    ),
    "0 * a leaf": lambda *args: 0 * tj.Weighted.mean(args[1]["x"]) + of_outside(*args),
    "a value of all rows": lambda p, b, t: tj.Weighted.mean(
        b["all"] * p["w"][0] * t.weight, t.weight
    ),
}


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", [*READS_NO_ROW, *READS])
@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=str)
def test_a_loss_that_reads_no_leaf_of_its_batch_is_refused(name, options):
    step = tj.build_train_step(
        (READS_NO_ROW | READS)[name],
        optax.sgd(0.1),
        tj.Mirrored(towers=2),
        **options,
    )
    given = {"w": np.ones(3, np.float32)}
    batch = {"x": np.ones((8, 3), np.float32), "all": tj.Whole(np.float32(2))}
    if name in READS:
        step.check(given, batch)
        return
    with pytest.raises(ValueError, match="The loss reads no leaf of its batch"):
        step.check(given, batch)


@pytest.mark.slow
def test_a_pass_of_an_own_step_that_reads_no_leaf_of_its_batch_is_refused():
    def tower_fn(state, batch, tower):
        loss, grads = tj.value_and_grad(of_outside)(state.params, batch, tower)
        return {"loss": loss, "grads": grads}

    def update_fn(state, merged):
        return state, {"loss": merged["loss"]}

    step = tj.build_step(tower_fn, update_fn, tj.OneDevice())
    with pytest.raises(ValueError, match="The loss reads no leaf of its batch"):
        step(step.init({"w": np.ones(3, np.float32)}), np.ones((4, 3), np.float32))


def _draws(kind):
    """Losses with keys of a kind, and whether the draws depend on the devices."""
    key = functools.partial(jax.random.key, 3, impl=kind)
    own = lambda tower: jax.random.fold_in(key(), tower.id)  # noqa: E731
    return {
        "own": (lambda t, n: jax.random.normal(own(t), n), True),
        "of the step": (lambda t, n: jax.random.uniform(t.rng, n), True),
        "shared": (lambda t, n: jax.random.normal(key(), n), False),
    }


KINDS = [*(("rbg", name) for name in _draws("rbg")), ("unsafe_rbg", "own")]


@pytest.mark.slow
@pytest.mark.parametrize("kind, name", KINDS)
def test_draws_that_depend_on_the_devices_are_refused(kind, name):
    draw, depends = _draws(kind)[name]

    def loss_fn(params, batch, tower):
        noise = draw(tower, batch["x"].shape[:1])
        return tj.Weighted.mean(batch["x"] @ params["w"] * noise)

    key = jax.random.key(0, impl=kind)
    one_each = tj.Mirrored([f"cpu:{i}" for i in range(4)])
    in_turn = tj.Mirrored(TWO, towers=4, tower_loop="scan")
    for strategy in (one_each, in_turn, FOUR):
        step = build(loss_fn, strategy=strategy)
        state = step.init(start(), rng=key)
        if depends and strategy is FOUR:
            with pytest.raises(tj.ReplicationError, match="rbg key .*bad_input.py"):
                step.check(state, good(8))
        else:
            step.check(state, good(8))
    words = np.arange(16, dtype=np.uint32).reshape(4, 4)
    keys = tj.PerTower(jax.random.wrap_key_data(words, impl="rbg"))
    with pytest.raises(
        tj.ReplicationError, match="tower_loop='scan', or one tower a dev"
    ):
        with_verbs = tj.tf1.with_verbs(FOUR)
        with_verbs.call_for_each_tower(lambda t, k: jax.random.normal(k), keys)


# What is not finite.


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
