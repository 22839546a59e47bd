"""Drawn mistakes: each a sentence of ours before anything compiles, nothing lost."""

import collections
import enum
import functools
import inspect
import math
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn import few
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import sparse
from refusals import refused

import towerjax as tj
from towerjax import contrib

TWO = ("cpu:0", "cpu:1")
STRATEGY = tj.Mirrored(TWO)


def loss_fn(params, batch, tower):
    errors = batch["x"] @ params["w"] - batch["y"]
    return tj.Weighted.mean(errors**2, tower.weight)


def metric_fn(params, batch, tower):
    return {"loss": loss_fn(params, batch, tower)}


def predict_fn(params, batch, tower):
    return batch["x"] @ params["w"] - batch["y"]


def good(seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(4, 3))
    y = rng.normal(size=4)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def start():
    return {"w": np.array([1, 2, 3], np.float32)}


def deleted():
    x = jnp.ones(4)
    x.delete()
    return x


def generator():
    yield from good()["y"]


LEAVES = {
    "None": lambda: None,
    "nested None": lambda: {"a": [None, {}]},
    "text": lambda: "abcd",
    "bytes": lambda: b"abcd",
    "object": object,
    "function": lambda: np.ones,
    "type": lambda: np.ndarray,
    "number": lambda: 1.0,
    "bool": lambda: True,
    "list": lambda: [1.0, 2.0, 3.0, 4.0],
    "ragged": lambda: [[1.0], [2.0, 3.0], [4.0], []],
    "range": lambda: range(4),
    "set": lambda: {1.0, 2.0},
    "generator": generator,
    "memory": lambda: memoryview(b"abcd"),
    "shape alone": lambda: jax.ShapeDtypeStruct((4,), jnp.float32),
    "deleted": deleted,
    "objects": lambda: np.array([[1], [2, 3], [4], []], object),
    "texts": lambda: np.array(list("abcd")),
    "texts of NumPy 2": lambda: np.array(list("abcd"), np.dtypes.StringDType()),
    "raw bytes": lambda: np.zeros(4, "V3"),
    "records": lambda: np.zeros(4, [("a", "f4"), ("b", "i4")]),
    "recarray": lambda: np.zeros(4, [("a", "f4")]).view(np.recarray),
    "times": lambda: np.zeros(4, "M8[s]"),
    "durations": lambda: np.zeros(4, "m8[s]"),
    "long doubles": lambda: np.ones(4, np.longdouble),
    "complex": lambda: np.ones(4, np.complex64),
    "4 bits": lambda: jnp.ones(4, jnp.int4),
    "8 bits": lambda: jnp.ones(4, jnp.float8_e4m3fn),
    "masked": lambda: np.ma.ones(4),
    "big-endian integers": lambda: np.ones(4, ">i4"),
    "wide integers": lambda: np.array([2**40, 1, 2, 3]),
    "keys": lambda: jax.random.split(jax.random.key(0), 4),
    "scalar": lambda: np.float32(1),
    "array without dims": lambda: jnp.zeros(()),
    "no rows": lambda: np.zeros(0, np.float32),
    "rows of nothing": lambda: np.zeros((4, 0), np.float32),
    "one dim more": lambda: np.ones((4, 1, 1, 1), np.float32),
    "too few rows": lambda: np.ones(3, np.float32),
    "too many rows": lambda: np.ones(5, np.float32),
    "PerTower": lambda: tj.PerTower(np.ones((2, 2), np.float32)),
    "Weighted": lambda: tj.Weighted(1.0, 1.0),
    "TowerLocal": lambda: tj.TowerLocal(np.ones(4), tj.Reduction.SUM),
    "rows without a row": lambda: tj.sparse.IndexedRows(np.ones((1, 3)), [9], (4, 3)),
    "BCOO": lambda: sparse.BCOO((np.ones(2), np.eye(2, dtype=int)), shape=(5, 3)),
    "BCSR": lambda: sparse.BCSR((np.ones(4), np.arange(4), np.arange(5)), shape=(4, 4)),
}
ODD_ROWS = {"x": np.ones((5, 3), np.float32), "y": np.ones(5, np.float32)}
TREES = {
    "in the place of y": lambda leaf: {**good(), "y": leaf},
    "in the place of x": lambda leaf: {**good(), "x": leaf},
    "beside them": lambda leaf: {**good(), "z": leaf},
    "deep beside them": lambda leaf: {**good(), "z": [({"a": leaf},)]},
    "alone": lambda leaf: leaf,
    "y is missing": lambda leaf: {"x": leaf},
    "a tuple": lambda leaf: (good()["x"], leaf),
    "by numbers": lambda leaf: {0: good()["x"], 1: leaf},
    "rows that do not divide": lambda leaf: {**ODD_ROWS, "z": leaf},
}


class Steps:
    """Compiled once for all draws, with a state that each of them is to leave alone."""

    def __init__(self):
        def step(remainder):
            return tj.build_train_step(
                loss_fn, optax.sgd(0.1), STRATEGY, remainder=remainder
            )

        self.train = step("error")
        self.padded = step("pad")
        self.state, _ = self.train(self.train.init(start()), good())
        self.other, _ = self.padded(self.padded.init(start()), good())
        self.evaluate = tj.build_eval_step(metric_fn, STRATEGY, max_programs=1)
        self.predict = tj.build_predict_step(predict_fn, STRATEGY, max_programs=1)
        self.evaluate(self.state, good()), self.predict(self.state, good())
        self.calls = {
            "a step": lambda batch: self.train(self.state, batch),
            "a step that pads": lambda batch: self.padded(self.other, batch),
            "an evaluation": lambda batch: self.evaluate(self.state, batch),
            "a prediction": lambda batch: self.predict(self.state, batch),
            "evaluate": lambda batch: tj.evaluate(
                self.evaluate, self.state, [batch], prefetch=0
            ),
            "run": lambda batch: tj.run(
                self.train, self.state, [batch], prefetch=0, progress=False
            ),
        }


@pytest.fixture(scope="module")
def steps():
    return Steps()


def refuse(call, says, names=None):
    """An error of ours in these words."""
    kinds = ValueError, TypeError
    with warnings.catch_warnings():  # JAX warns of a generator besides
        warnings.simplefilter("ignore", DeprecationWarning)
        names = [] if names is None else names
        refused(names, call, re.escape(says), kinds, ours=kinds)


def check_draws(number, steps, compiled):
    @few(number)
    @given(
        leaf=st.sampled_from(sorted(LEAVES)),
        tree=st.sampled_from(sorted(TREES)),
        call=st.sampled_from(sorted(steps.calls)),
    )
    def draw(leaf, tree, call):
        batch = TREES[tree](LEAVES[leaf]())
        if leaf.startswith(("None", "nested")) and tree == "beside them":
            return  # the tree holds what there was, and nothing else
        refuse(lambda: steps.calls[call](batch), "batch", compiled)

    w = np.float64(steps.state.params["w"])
    done = int(steps.state.step)
    draw()
    for _ in range(2):
        x = np.float64(good(1)["x"])
        y = np.float64(good(1)["y"])
        errors = x @ w - y
        steps.state, metrics = steps.train(steps.state, good(1))
        np.testing.assert_allclose(metrics["loss"], (errors**2).mean(), rtol=1e-5)
        w -= 0.1 * 2 / 4 * x.T @ errors
    np.testing.assert_allclose(steps.state.params["w"], w, rtol=1e-5)
    assert int(steps.state.step) == done + 2


@pytest.mark.slow
def test_drawn_batches_are_refused_and_change_nothing(steps, compiled):
    check_draws(150, steps, compiled)


# Options: what each may be is left out of what is drawn for it.

NUMBERS = {
    "-1": -1,
    "huge": 10**30,
    "a bool": True,
    "a half": 1.5,
    "NaN": float("nan"),
    "text": "2",
    "None": None,
    "list": [2],
    "float32": np.float32(2),
    "object": object(),
}
FLAGS = {"1": 1, "None": None, "text": "no", "list": [], "NumPy": np.bool_(True)}
WORDS = {"unknown": "no such", "empty": "", "1": 1, "True": True, "list": ["pad"]}
FUNCTIONS = {"None": None, "3": 3, "text": "loss_fn", "list": [loss_fn], "type": int}
STRATEGIES = {"None": None, "text": "cpu:0", "class": tj.Mirrored, "list": [STRATEGY]}
# Of None programs, as many may compile as the step says by itself.
PROGRAMS = {name: x for name, x in NUMBERS.items() if x is not None}
TRAIN = {"micro_batches": NUMBERS, "max_programs": PROGRAMS}
TRAIN |= dict.fromkeys(["remainder", "on_nonfinite", "guard", "loss_reduction"], WORDS)
TRAIN |= {"donate": FLAGS, "loss_fn": FUNCTIONS, "strategy": STRATEGIES}
TRAIN |= {"optimizer": {**FUNCTIONS, "a function": optax.sgd}}
TRAIN |= {"trainable": {"3": 3, "text": "w", "numbers": {"w": 1}}}
INFERENCE = {"max_programs": PROGRAMS, "remainder": WORDS, "strategy": STRATEGIES}
LOOP = dict.fromkeys(["prefetch", "in_flight"], NUMBERS)


def without(values, *names):
    return {name: value for name, value in values.items() if name not in names}


def some(values):
    return without(values, "None")


def train_step(loss_fn=loss_fn, optimizer=None, strategy=STRATEGY, **options):
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    return tj.build_train_step(loss_fn, optimizer, strategy, **options)


def eval_step(metric_fn=metric_fn, strategy=STRATEGY, **options):
    return tj.build_eval_step(metric_fn, strategy, **options)


def predict_step(predict_fn=predict_fn, strategy=STRATEGY, **options):
    return tj.build_predict_step(predict_fn, strategy, **options)


def distributed(**options):
    return STRATEGY.distribute_dataset([good()], **options)


def model_of(**options):
    return tj.estimator.replicate_model_fn(
        lambda variables, features, labels, mode: 0, **options
    )


BUILDERS = {
    "build_train_step": (train_step, TRAIN | {"optimizer": some(TRAIN["optimizer"])}),
    "build_eval_step": (eval_step, INFERENCE | {"metric_fn": FUNCTIONS}),
    "build_predict_step": (predict_step, INFERENCE | {"predict_fn": FUNCTIONS}),
    "Mirrored": (
        tj.Mirrored,
        dict.fromkeys(["num_gpus", "num_gpus_per_worker", "towers"], some(NUMBERS))
        | dict.fromkeys(["tower_loop", "executor", "cross_tower_ops"], WORDS)
        | {"prefetch_on_device": NUMBERS, "devices": some(NUMBERS)},
    ),
    "batches": (
        lambda batch_size=2, **options: tj.batches(good(), batch_size, **options),
        {"batch_size": NUMBERS, "epochs": some(NUMBERS), "drop_remainder": FLAGS}
        | {"seed": without(NUMBERS, "None", "huge")},
    ),
    "distribute_dataset": (distributed,
        {"micro_batches": NUMBERS, "split": WORDS, "remainder": WORDS}),
    "replicate_model_fn": (
        model_of,
        {"max_programs": PROGRAMS, "donate": FLAGS, "remainder": WORDS, "compat": WORDS}
        | {"loss_reduction": WORDS, "variable_placement": WORDS},
    ),
    "EarlyStopping": (
        lambda metric="loss", patience=1, **options: tj.EarlyStopping(
            metric, patience, **options
        ),
        {"patience": NUMBERS, "mode": WORDS, "metric": without(FLAGS, "text")},
    ),
}  # fmt: skip
CHOICES = sorted(
    (builder, option, value)
    for builder, (_, options) in BUILDERS.items()
    for option, values in options.items()
    for value in values
)


def check_option(builder, option, value):
    build, options = BUILDERS[builder]
    refuse(lambda: build(**{option: options[option][value]}), option)


@pytest.mark.slow
@pytest.mark.parametrize("builder", BUILDERS)
def test_all_odd_options_are_refused_by_name(builder):
    for choice in CHOICES:
        if choice[0] == builder:
            check_option(*choice)


@pytest.mark.slow
def test_odd_options_of_a_loop_are_refused_by_name(steps):
    def run(step=steps.train, **options):
        tj.run(step, steps.state, [good()], progress=False, **options)

    def evaluate(evaluate=steps.evaluate, **options):
        tj.evaluate(evaluate, steps.state, [good()], **options)

    drawn = [
        *[(run, name, x) for name in LOOP for x in NUMBERS.values()],
        *[(evaluate, "prefetch", x) for x in NUMBERS.values()],
        *[(run, "steps", x) for x in some(NUMBERS).values()],
        *[(run, "step", x) for x in (None, 3, "step", tj.run, steps.evaluate)],
        *[(evaluate, "evaluate", x) for x in (None, 3, "step", metric_fn)],
    ]
    for call, name, value in drawn:
        refuse(functools.partial(call, **{name: value}), f"{name}=")


ANYTHING = [None, "x", b"x", -1, 1.5, float("nan"), [], {}, [None], object(), {1}, int]
ANYTHING += [np.ones((2, 2), np.float32), np.array(["a", "b"]), np.array([{}], object)]
ONE = tj.TrainState.create(np.float32(1), optax.sgd(1.0))
TEXTS = ["x", b"x", np.array(["a", "b"]), np.array([{}], object)]
# fmt: off
ENTRIES = {
    "target": (tj.Absent, without(dict(enumerate(ANYTHING)), 1)),
    "mode": (lambda x: tj.EarlyStopping("loss", 1, mode=x),
        without(dict(enumerate(ANYTHING)), 0)),
    "axis": (lambda x: tj.Weighted.mean(np.ones(2), axis=x),
        without(dict(enumerate(ANYTHING)), 0)),
    "loss_fn": (tj.value_and_grad, dict(enumerate(ANYTHING))),
    "optimizer": (lambda x: tj.TrainState.create(1.0, x), dict(enumerate(ANYTHING))),
    "state": (tj.check_mirrored,
        dict(enumerate(x for x in ANYTHING if not isinstance(x, list | dict)))),
    "mean": (lambda x: tj.metrics.mean(x), dict(enumerate([*TEXTS, object(), {1}]))),
    "Weighted.mean: weight": (lambda x: tj.Weighted.mean(np.ones(2), x),
        {"ragged": [[1.0], [2.0, 3.0]], "text": "x"}),
    "weight": (lambda x: tj.metrics.mean(np.ones(2), weight=x),
        dict(enumerate([*TEXTS, object(), {1}]))),
    "rng": (lambda x: tj.TrainState.create(np.float32(1), optax.sgd(1.0), rng=x),
        without(dict(enumerate(ANYTHING)), 0)),
    "trainable": (
        lambda x: tj.apply_gradients(optax.sgd(1.0), ONE, ONE.params, trainable=x),
        dict(enumerate(["x", -1, 1.5, ["x"], object(), {1}]))),
    "optimizer=": (lambda x: tj.apply_gradients(x, ONE, ONE.params),
        dict(enumerate(ANYTHING))),
    "thresholds": (lambda x: tj.metrics.auc(np.ones(2), np.ones(2), thresholds=x),
        dict(enumerate([*TEXTS, object(), {1}, {}]))),
    "Weighted.sum": (lambda x: tj.Weighted(x, 1.0), dict(enumerate(TEXTS))),
    "Weighted.weight": (lambda x: tj.Weighted(1.0, x), dict(enumerate(TEXTS))),
}
# fmt: on


@pytest.mark.parametrize("argument", ENTRIES)
def test_anything_odd_is_refused_at_the_boundary_by_name(argument):
    call, values = ENTRIES[argument]
    for value in values.values():
        refuse(functools.partial(call, value), argument)


# Options that are not the same wherever they stand: the defaults of each.
TRAINS = "build_step build_train_step"
READS = "build_eval_step build_predict_step"
MODEL = "replicate_model_fn"  # as in TensorFlow
UNLIKE = {
    # A program of any length is compared; a benchmark goes on with the next one.
    "timeout_s": {"1800.0": "bench", "None": "same_on_devices same_resumed"},
    "remainder": {"'error'": TRAINS, "'pad'": f"{READS} {MODEL}"},
    "max_programs": {"1": TRAINS, "None": f"{READS} {MODEL}"},
    "donate": {"True": TRAINS, "False": MODEL},
    "loss_reduction": {
        "None": "assert_replicates build_train_step of_loss value_and_grad",
        "LossReduction.SUM_BY_NONZERO_WEIGHTS": MODEL},
    "epochs": {"1": "batches", "None": "train_and_evaluate"},
    # Of several meanings.
    "keep": {"0.0": "DiLoCo", "3": "Checkpointer"},
    # `prove` counts them as it counts devices, and a tower is told their number.
    "micro_batches": {"1": "Tower build_step build_train_step", "None": "prove"},
    "reduction": {"LossReduction.SUM_BY_NONZERO_WEIGHTS": "compute_weighted_loss",
        "Reduction.NONE": "MirroredVar"},
    "devices": {"(1, 2, 4)": "same_on_devices", "1": "same_resumed",
        "None": f"Mirrored MirroredStrategy prove {MODEL}"},
    "rtol": {"0.0001": "bench", "1e-05": "assert_same", "0.0": "same_resumed",
        "None": "assert_replicates same_for same_on_devices"},
    "steps": {"(3, 4)": "same_resumed", "None": "run sweep train_and_evaluate"},
    "towers": {"(1, 2, 3, 4, 8)": "assert_replicates",
        "None": "Mirrored MirroredStrategy launch"},
}  # fmt: skip


# What a user gets unasked: who changes one, changes what programs do that are written.
UNASKED = {
    "prefetch": 2, "prefetch_on_device": 2,
    "in_flight": 2, "drop_remainder": False, "permuted": True, "padding": True,
    "per_example": False, "bits": False, "lazy": False, "first": 1,
    # Of stopping and of files.
    "min_delta": 0.0, "min_steps": 0, "replace": False,
    "max_elements": 64, "iterations": 0,
    # Of a loss scale.
    "start": 2.0**15, "double_every": 2000,
    # How long processes wait for one another, in seconds, and their exit code.
    "exit_code": 75, "grace_s": 5.0, "recoverable": False,
    "initialization_timeout_s": 300, "shutdown_timeout_s": 300,
    "hang_timeout_s": math.inf, "step_timeout_s": math.inf,
    # What is sent, in bytes and in parts.
    "pack_below_bytes": 2**18, "fragments": 1, "overlap": 0,
    # Of measures: the thresholds of TensorFlow, a sweep of timings.
    "num_thresholds": 200, "rounds": 11, "seconds_per_round": 0.25,
    "retry_failed": False,
}  # fmt: skip


def test_an_option_has_one_default_wherever_it_stands():
    modules = tj, contrib, tj.cluster, tj.collectives, tj.estimator, tj.metrics, tj.tf1
    modules += tj.testing, tj.tools, tj.towers
    found = collections.defaultdict(lambda: collections.defaultdict(set))
    values = [getattr(module, name) for module in modules for name in dir(module)]
    for value in values:
        own = str(getattr(value, "__module__", "")).startswith("towerjax.")
        is_class = own and inspect.isclass(value)
        if own and not (is_class and issubclass(value, Exception | enum.Enum)):
            for x in inspect.signature(value).parameters.values():
                if x.default is not x.empty:
                    found[x.name][repr(x.default)].add(value.__name__)
    several = {
        name: {default: " ".join(sorted(of)) for default, of in x.items()}
        for name, x in found.items()
        if len(x) > 1
    }
    assert several == UNLIKE
    numbers = re.compile("True|False|inf|-?[0-9.]+(e[-+]?[0-9]+)?")
    shown = {name: x for name, [x, *more] in found.items() if not more}
    shown = {name: x for name, x in shown.items() if numbers.fullmatch(x)}
    assert shown == {name: repr(x) for name, x in UNASKED.items()}
