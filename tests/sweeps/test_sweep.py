"""Sweeps of training: each member is what it is alone, whatever trains beside it."""

import functools
import inspect
import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj
from towerjax.sweeps import grid as of_grid
from towerjax.sweeps.grid import RecordFile, configs_of
from towerjax.sweeps.train import Member, Sweep, _evaluated, traced_names

GRID = {"rate": [0.05, 0.2], "seed": range(2)}
ROWS = np.random.default_rng(0).normal(size=(22, 3)).astype(np.float32)
DATA = {"x": ROWS, "y": ROWS @ np.float32([1, -2, 3])}
BATCHES = tj.batches(DATA, 8, epochs=2, seed=1)  # of 8, 8 and 6 rows
COMPILED = "/jax/core/compile/backend_compile_duration"


def build(rate, seed, width=2):
    """Keys, tower-local variables and mirrored ones, on as many devices as towers."""

    def loss_fn(params, batch, tower):
        noise = jax.random.key_data(tower.rng)[0] / 2.0**32  # a draw compiles long
        hidden = jnp.tanh(batch["x"] @ params["in"])
        errors = hidden @ params["out"] + tower.extra - batch["y"] - noise
        loss = tj.Weighted.mean(errors**2, tower.weight)
        loss += rate * tj.penalty((params["out"] ** 2).sum())
        mean = tj.Weighted.mean(batch["y"], tower.weight)
        seen = {"rows": tower.local["rows"] + tower.weight.sum()}
        return tj.TowerOutput(loss, {"mean": mean}, local=seen, extra=mean)

    # A tower's noise is one number of its own key.
    how = {"remainder": "pad", "audit": False}
    optimizer = optax.sgd(rate, momentum=0.9)
    step = tj.build_train_step(loss_fn, optimizer, tj.Mirrored(towers=4), **how)
    key = jax.random.key(seed)
    drawn = np.random.default_rng(1).normal(size=(3, width)).astype(np.float32)
    params = {"in": drawn * (1 + seed), "out": np.ones(width, np.float32)}
    rows = {"rows": tj.TowerLocal(0.0, tj.Reduction.SUM)}
    return step, step.init(params, rng=key, local=rows, extra=0.0)


def evaluated(state, **config):
    rows = tj.towers.read_local(state.local["rows"])
    return {"out": state.params["out"], "rows": rows, "rate": config["rate"]}


@pytest.fixture(scope="module", autouse=True)
def four_devices():
    """The first four of those that there are."""
    assert len(jax.devices()) >= 4


class Compiled:
    """Which programs compile meanwhile."""

    def __init__(self):
        self.names = []
        jax.monitoring.register_event_duration_secs_listener(self.note)

    def note(self, event, duration, fun_name="", **_):
        if event == COMPILED:
            self.names.append(fun_name)

    def steps(self):
        found = self.names
        self.names = []
        return sum(name in ("jit(step)", "jit(steps)") for name in found)


@pytest.fixture(scope="module")
def compiled():
    return Compiled()


@pytest.fixture(scope="module")
def swept(compiled):
    """The sweep by ``vmap``, or one after another; each compiled."""

    @functools.cache
    def swept(order):
        compiled.steps()
        options = {"order": order, "evaluate": evaluated, "progress": False}
        found = tj.sweep(build, GRID, BATCHES, **options)
        assert compiled.steps() == 1, f"{order} compiled more than one program"
        return found

    return swept


@pytest.fixture(scope="module")
def alone():
    """The last member, trained as everybody trains one."""
    step, state = build(0.2, 1)
    data = tj.batches(DATA, 8, epochs=2, seed=1)
    state, history = tj.run(step, state, data, progress=False)
    return state, history


# If members get equal numbers, their metrics say so, and not only a warning.
@pytest.mark.filterwarnings("ignore:tj.sweep")
@pytest.mark.slow
@pytest.mark.parametrize("order", ["together", "in_turn"])
def test_a_member_is_what_it_is_alone(swept, alone, order):
    state, history = alone
    member = swept(order).members[-1]
    assert member.config == {"rate": 0.2, "seed": 1} and member.order == order
    for name in ("loss", "mean"):
        expected = history.metrics[name]
        np.testing.assert_allclose(member.metrics[name], expected, rtol=2e-5, atol=1e-6)
    found = member.evaluation
    np.testing.assert_allclose(found["out"], state.params["out"], atol=2e-6)
    assert found["rows"] == 2 * 22 and found["rate"] == 0.2


@pytest.mark.slow
def test_members_differ_and_both_orders_agree(swept):
    together = swept("together").members
    in_turn = swept("in_turn").members
    assert len({float(member.metrics["loss"][-1]) for member in together}) == 4
    for one, other in zip(together, in_turn, strict=True):
        assert one.config == other.config
        a = one.metrics["loss"]
        b = other.metrics["loss"]
        np.testing.assert_allclose(a, b, rtol=2e-5)


# A step without towers on several devices: quick to compile.


def loss_of(factor):
    def loss_fn(w, batch, tower):
        errors = batch["x"] @ w - batch["y"]
        return factor * tj.Weighted.mean(errors**2, tower.weight)

    return loss_fn


def small(rate, seed=0):
    step = tj.build_train_step(loss_of(1.0), optax.sgd(rate), tj.OneDevice("cpu:0"))
    return step, step.init(np.float32([0.5, 1, -0.25]) * (1 + seed))


FEW = [{"x": ROWS[:8], "y": DATA["y"][:8]}, {"x": ROWS[8:16], "y": DATA["y"][8:16]}]


def quiet(build, grid, batches=FEW, **options):
    return tj.sweep(build, grid, batches, progress=False, **options)


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("order", ["in_turn", "together"])
def test_a_number_that_build_does_not_use_is_told(order):
    """The batches are not cut by it, and each row would have the same losses."""

    def build(rate, batch_size):
        return small(rate)

    grid = {"rate": [0.1, 0.2], "batch_size": [4, 8]}
    batches = FEW * 3
    told = r"batch_size made no difference.*static=\['batch_size'\] and a function"
    with pytest.warns(UserWarning, match=told) as warned:
        found = quiet(build, grid, batches, order=order)
    assert len(warned) == 1 and len(found.members) == 4
    quiet(build, {"rate": [0.1, 0.2], "batch_size": [4]}, batches, order=order)
    quiet(build, grid, FEW[:2], order=order)  # too few steps to tell


@pytest.mark.slow
def test_a_killed_sweep_goes_on_with_the_members_that_are_missing(tmp_path):
    path = tmp_path / "sweep.jsonl"
    seen = []

    def evaluate(state, **config):
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(config)
        return {"w": state.params}

    options = {"order": "in_turn", "results": path}
    with pytest.raises(KeyboardInterrupt):
        quiet(small, GRID, evaluate=evaluate, **options)
    with path.open("ab") as file:
        file.write(b'{"config": {"ra')  # torn by the kill
    asked = []

    def goes_on(state, **config):
        asked.append(config)
        return {"w": state.params}

    found = quiet(small, GRID, evaluate=goes_on, **options)
    assert asked == [{"rate": 0.2, "seed": 0}, {"rate": 0.2, "seed": 1}]
    assert seen + asked == found.configs
    again = quiet(small, GRID, evaluate=goes_on, **options)
    # The third twice: its training without an evaluation, and both.
    assert len(asked) == 2 and len(path.read_text().splitlines()) == 5
    for one, other in zip(found.members, again.members, strict=True):
        np.testing.assert_array_equal(one.metrics["loss"], other.metrics["loss"])
        np.testing.assert_array_equal(one.evaluation["w"], other.evaluation["w"])


@pytest.mark.slow
@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt()])
@pytest.mark.parametrize("order", ["together", "in_turn"])
def test_an_evaluation_that_fails_loses_no_training(tmp_path, compiled, error, order):
    path = tmp_path / "sweep.jsonl"

    def evaluate(state, **config):
        if config == {"rate": 0.05, "seed": 1}:
            raise error
        return {"w": state.params}

    options = {"order": order, "results": path}
    with pytest.raises(type(error)) as raised:
        quiet(small, GRID, evaluate=evaluate, **options)
    found = raised.value
    lines = path.read_text().splitlines()
    # Together all were trained; an interrupt ends the evaluations at once.
    left = 3 if order == "together" and isinstance(error, KeyboardInterrupt) else 1
    trained = 4 if order == "together" else 2
    assert len(found.sweep.members) == len(lines) == trained
    assert len(found.states) == left
    notes = "".join(found.__notes__)
    assert "no evaluation of {'rate': 0.05, 'seed': 1}" in notes
    assert "error.states" in notes and "error.sweep" in notes
    compiled.steps()
    again = quiet(small, found.sweep.configs, evaluate=None, **options)
    assert compiled.steps() == 0  # all are trained
    for config, state in found.states:
        step, start = small(**config)
        state_alone, history = tj.run(step, start, FEW, progress=False)
        np.testing.assert_allclose(state.params, state_alone.params, rtol=1e-5)
        member = again.members[again.configs.index(config)]
        losses = member.metrics["loss"], history.metrics["loss"]
        np.testing.assert_allclose(*losses, rtol=1e-5)
        assert member.evaluation == {}
    whole = quiet(small, GRID, evaluate=lambda state, **_: {"done": 1}, **options)
    done = [member.evaluation.get("done") for member in whole.members]
    assert done.count(1) == left + 4 - trained


@pytest.mark.slow
def test_a_training_that_fails_names_its_members_and_keeps_the_others(tmp_path):
    def build(rate, rows):
        return small(rate)

    def batches(rows):
        return FEW if rows == "good" else [*FEW, {"x": ROWS[:8]}]

    grid = {"rate": [0.1, 0.2], "rows": ["good", "bad"]}
    with pytest.raises(ValueError, match=r"batch.*y") as raised:
        quiet(build, grid, batches, order="in_turn")
    error = raised.value
    names = [config["rows"] for config in error.sweep.configs]
    assert names == ["good", "good"]
    told = "This is the training of {'rate': 0.1, 'rows': 'bad'}."
    assert told in error.__notes__


@pytest.mark.slow
def test_a_disk_that_is_full_loses_no_member(tmp_path, monkeypatch):
    def full(file, record):
        raise OSError("full")

    monkeypatch.setattr(of_grid, "append_line", full)
    with pytest.raises(OSError, match="full") as raised:
        quiet(small, {"rate": [0.1]}, results=tmp_path / "sweep.jsonl")
    (member,) = raised.value.sweep.members
    assert len(member.metrics["loss"]) == len(FEW)


@pytest.mark.slow
def test_an_error_of_evaluate_is_not_taken_for_one_of_build():
    def evaluate(state, **config):
        raise RuntimeError("Tracer, says the user")

    with pytest.raises(RuntimeError, match="says the user"):
        quiet(small, {"rate": [0.1]}, evaluate=evaluate)


def test_a_file_of_another_sweep_is_refused_before_anything_runs(tmp_path):
    path = tmp_path / "sweep.jsonl"
    about = {"build": "mine.build", "steps": 5, "names": ["rate"]}
    record = {"order": "alone", "seconds": 0.1, "metrics": {}, "evaluation": {}}
    file = RecordFile(path, {"sweep": about})
    file.add({"config": {"rate": 0.1}, **record})
    text = r"sweep.jsonl' holds results with the sweep .*mine.build.* has .*small"
    with pytest.raises(ValueError, match=text):
        quiet(small, {"rate": [0.1]}, results=path)
    path.write_text("notes\n")
    with pytest.raises(ValueError, match="Line 1 of .* is not a line of a sweep"):
        quiet(small, {"rate": [0.1]}, results=path)
    assert path.read_text() == "notes\n"


FORGED = {
    "metrics": [None, 3, {"loss": {}}, {"loss": [[1], [1, 2]]}, {"loss": ["x"]}],
    "evaluation": [3, {"loss": "x"}, {"loss": [[1], 2]}],
    "seconds": [None, "1s"],
    "order": [3],
}


@pytest.mark.slow
def test_forged_results_are_refused_in_words(tmp_path):
    path = tmp_path / "found.jsonl"
    quiet(small, {"rate": [0.1]}, results=path)
    good = json.loads(path.read_text())
    forged = [{**good, name: x} for name, values in FORGED.items() for x in values]
    forged += [{k: x for k, x in good.items() if k != name} for name in FORGED]
    for record in forged:
        path.write_text(json.dumps(record) + "\n")
        with pytest.raises(ValueError, match="Line 1 of .* is not a line of a sweep"):
            quiet(small, {"rate": [0.1]}, results=path)
    path.write_text(json.dumps({**good, "sweep": "\x1b[2J"}) + "\n")
    with pytest.raises(ValueError, match=re.escape("the sweep \\x1b[2J, but")):
        quiet(small, {"rate": [0.1]}, results=path)
    path.write_text(json.dumps(good))  # a file of settings of another program
    with pytest.raises(ValueError, match="ends with a whole object and no newline"):
        quiet(small, {"rate": [0.1]}, results=path)
    assert json.loads(path.read_text()) == good


def test_configurations_are_one_where_the_file_has_one():
    values = [False, 0, 0.0, np.nan, float("nan"), 0]
    uses = [repr(c["use"]) for c in configs_of({"use": values})]
    assert uses == ["False", "0", "0.0", "nan"]


@pytest.mark.parametrize("returned", [None, {"v": {"a": 1}}])
def test_an_evaluation_of_something_else_is_refused(returned):
    text = re.escape(f"evaluate returned {returned} for {{'rate': 0.1}}; it returns {{")
    with pytest.raises(ValueError, match=text):
        _evaluated(lambda state, **_: returned, None, {"rate": 0.1})


@pytest.mark.slow
def test_a_member_that_diverges_does_not_hold_the_others_up(tmp_path):
    """Nor a configuration that is not finite, which is a member once."""
    path = tmp_path / "sweep.jsonl"
    rates = [0.1, 1e38, np.inf, np.nan]
    options = {"order": "together", "results": path}
    found = quiet(small, {"rate": rates}, FEW * 3, **options)
    good, bad, *_ = found.members
    assert np.isfinite(good.metrics["loss"]).all()
    assert not np.isfinite(bad.metrics["loss"][-1])
    assert found.best("loss") is good and found.best("loss", mode="max") is good
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN is no JSON
    again = quiet(small, {"rate": rates}, FEW * 3, **options)
    np.testing.assert_array_equal([c["rate"] for c in again.configs], rates)
    np.testing.assert_array_equal(again.members[1].metrics["loss"], bad.metrics["loss"])
    assert len(path.read_text().splitlines()) == 4


@pytest.mark.slow
def test_what_is_no_number_is_a_program_of_its_own(compiled):
    sizes = []

    def by_name(rate, loss, batch):
        factor = {"once": 1.0, "twice": 2.0}[loss]
        optimizer = optax.sgd(rate)
        strategy = tj.OneDevice("cpu:0")
        step = tj.build_train_step(loss_of(factor), optimizer, strategy)
        return step, step.init(jnp.zeros(3))

    def batches(loss, batch):
        sizes.append((loss, batch))
        return tj.batches(DATA, batch, drop_remainder=True)

    grid = {"loss": ["once", "twice"], "rate": [0.1], "batch": [4]}
    compiled.steps()
    found = quiet(by_name, grid, batches, static=["batch"], order="in_turn", steps=2)
    assert compiled.steps() == 2 and set(sizes) == {("once", 4), ("twice", 4)}
    assert {member.order for member in found.members} == {"alone"}
    first = [float(member.metrics["loss"][0]) for member in found.members]
    expected = (DATA["y"][:4] ** 2).mean() * np.array([1, 2])
    np.testing.assert_allclose(first, expected, rtol=1e-5)


def test_a_number_has_one_dtype_whichever_values_are_left_to_train():
    configs = [{"rate": 0.1, "seed": 1}, {"rate": 1, "seed": 2}]
    assert traced_names(configs, []) == {"rate": np.float32, "seed": np.int32}


def refused_by_width(rate, width):
    return small(rate)[0], np.zeros(width)


def refused_by_control_flow(rate):
    return small(0.1 if rate > 0.1 else rate)


def refused_by_state(rate):
    return small(rate)[0], 1


def refused_by_the_proof(rate):
    def loss_fn(w, batch, tower):
        return tj.TowerOutput(loss_of(rate)(w, batch, tower), {"own": tower.id})

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
    return step, step.init(np.float32([0.5, 1, -0.25]))


def refused_by_numpy(rate, seed):
    return small(rate, np.random.default_rng(seed))


@pytest.mark.parametrize("build, grid, options, text", [
    (small, {}, {}, "grid must be"),
    (small, {"rate": []}, {}, "grid must be .* but has 0"),
    (small, [{"rate": 1.0}, {"seed": 1}], {}, "same.*names, but has 2 with .*rate"),
    (small, {"rate": 0.1}, {}, r"grid\['rate'\]=0.1 must be a list: write"),
    (small, {"rate": [optax.adam]}, {}, "rate=.* is a function.* Write a text"),
    (small, {"seed": [2**31]}, {}, r"grid\['seed'\] is .* holds 2147483648, "),
    (small, {"rate": [0.1]}, {"static": ["widht"]}, "static='widht' must be"),
    (small, {"rate": [0.1]}, {"static": "rate"}, r"static=\['rate'\]"),
    (small, {"rate": [0.1]}, {"order": "both"}, "order='both' must be one of"),
    (small, {"rate": [0.1]}, {"batches": iter(FEW)}, "list_iterator, which can be"),
    (refused_by_width, {"rate": [0.1], "width": [2]}, {}, r"static=\[...\] numbers"),
    (refused_by_control_flow, {"rate": [0.1]}, {}, "traces rate, so build gets arrays"),
    (refused_by_the_proof, {"rate": [0.1]}, {}, r"metrics\['own'\]"),
    (refused_by_numpy, {"rate": [0.1], "seed": [1]}, {}, "jax.random.key.seed"),
    (refused_by_state, {"rate": [0.1]}, {}, "is an int, not a"),
    (small, {"raet": [0.1]}, {}, "'raet'. Write 'rate' in place of 'raet'.$"),
    (small, {"rate": [0.1], "sede": [1]}, {}, "Write 'seed' in place of 'sede'.$"),
    (7, {"rate": [0.1]}, {}, "build=7 is not a function"),
    (small, {"rate": [0.1]}, {"evaluate": 7}, "evaluate=7 is not a function"),
    (small, {"rate": [0.1]}, {"evaluate": lambda state: {}},
        r"called as evaluate\(state, \*\*config\): .*'rate'"),
])  # fmt: skip
def test_what_cannot_be_swept_is_refused(build, grid, options, text):
    with pytest.raises(ValueError, match=text):
        quiet(build, grid, **options)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ValueError, match="is for one process"):
        quiet(small, {"rate": [0.1]})


@pytest.mark.slow
def test_a_sweep_is_a_table(swept, monkeypatch):
    found = swept("together")
    rows = found.rows()
    assert [row["seed"] for row in rows] == [0, 1, 0, 1]
    assert list(rows[0])[:3] == ["rate", "seed", "loss"]
    assert "out" not in rows[0] and rows[0]["rows"] == 44  # an array is no cell
    assert len(str(found).splitlines()) == 6
    assert "4 members" in str(found) and "together" in str(found)
    monkeypatch.setitem(sys.modules, "pandas", None)
    missing = r"the package pandas, which is not installed .*pip install '\.\[pandas\]'"
    with pytest.raises(ValueError, match=missing):
        found.to_pandas()
    monkeypatch.setitem(sys.modules, "pandas", types.SimpleNamespace(DataFrame=list))
    assert found.to_pandas() == rows


def test_members_may_have_different_metrics():
    config = {"model": "a", "seed": 0}
    curve = {"loss": np.array([2.0, 1.0])}
    norm = {"norm": np.array([3.0, 4.0])}
    one = Member(config, curve, {"v": 5.0}, "alone", 0.5)
    other = Member({**config, "model": "b"}, {**curve, **norm}, {}, "alone", 0.5)
    found = Sweep((one, other))
    (table,) = found.tables()
    assert table.head == ("model", "seed", "loss", "v", "norm", "order", "seconds")
    assert [row[3:5] for row in table.rows] == [("5", ""), ("", "4")]
    assert found.best("v", mode="max").config["model"] == "a"
    assert found.best("norm", mode="min").config["model"] == "b"
    assert list(found.curves("norm")) == ["model=b"]
    with pytest.raises(ValueError, match="'v' does not tell .* Write mode='min' or"):
        found.best("v")


def test_the_best_accuracy_is_the_greatest_without_a_mode():
    members = [Member({}, {}, {"accuracy": x}, "alone", 0.5) for x in (0.078, 0.907)]
    assert Sweep((*members,)).best("accuracy") is members[1]


@pytest.mark.slow
def test_the_best_is_of_the_evaluation_and_else_of_the_last_step(swept):
    found = swept("together")
    losses = [member.metrics["loss"][-1] for member in found.members]
    assert found.best("loss") is found.members[int(np.argmin(losses))]
    assert found.best("rate", mode="max").config["rate"] == 0.2
    with pytest.raises(ValueError, match="metric='acc' must be one of 'loss'"):
        found.best("acc")


@pytest.mark.slow
def test_curves_are_stacked_over_seeds(swept):
    found = swept("together")
    curves = found.curves("loss")
    assert list(curves) == ["rate=0.05", "rate=0.2"]
    first = np.stack([member.metrics["loss"] for member in found.members[:2]])
    np.testing.assert_array_equal(curves["rate=0.05"], first)
    assert len(found.curves(over=["rate", "seed"])) == 1
    with pytest.raises(ValueError, match="over='sed' must be one of 'rate', 'seed'"):
        found.curves(over="sed")


def of_losses(configs, losses):
    pairs = zip(configs, losses, strict=True)
    return Sweep(tuple(Member(c, {"loss": x}, {}, "alone", 0.5) for c, x in pairs))


@pytest.mark.slow
def test_curves_are_a_picture_with_bands():
    pytest.importorskip("matplotlib")
    configs = configs_of({"rate": [1, 2], "seed": range(3)})
    losses = np.random.default_rng(0).normal(size=(6, 5))
    (panel,) = of_losses(configs, losses).plot().axes
    labels = [text.get_text() for text in panel.get_legend().get_texts()]
    assert labels == ["rate=1, mean of 3", "rate=2, mean of 3"]
    drawn = panel.lines, panel.collections, losses.reshape(2, 3, 5)
    for line, band, rows in zip(*drawn, strict=True):
        assert line.get_xdata().tolist() == [1, 2, 3, 4, 5]
        np.testing.assert_allclose(line.get_ydata(), rows.mean(0))
        corners = band.get_paths()[0].vertices
        for step in range(5):
            found = corners[corners[:, 0] == step + 1, 1]
            own = rows[:, step]
            assert {found.min(), found.max()} == {own.min(), own.max()}
    assert panel.get_ylabel() == "loss"


@pytest.mark.slow
def test_pictures_of_a_grid_without_seeds_and_of_arrays(monkeypatch):
    pytest.importorskip("matplotlib")
    configs = configs_of({"rate": [1, 2]})
    (panel,) = of_losses(configs, np.ones((2, 5))).plot().axes
    assert len(panel.lines) == 2
    (panel,) = of_losses(configs, np.ones((2, 5))).plot(over="rate").axes
    assert [line.get_label() for line in panel.lines] == ["loss, mean of 2"]
    with pytest.raises(ValueError, match=r"metric='loss' is an array \(3,\) in each"):
        of_losses(configs, np.ones((2, 5, 3))).plot()
    with pytest.raises(ValueError, match="metric='acc' must be one of 'loss'"):
        of_losses(configs, np.ones((2, 5))).plot("acc")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    missing = r"plot\(\) needs the package matplotlib.* .*pip install '\.\[plot\]' in a"
    with pytest.raises(ValueError, match=missing):
        of_losses(configs, np.ones((2, 5))).plot()


@pytest.mark.parametrize("progress", [True, False])
def test_what_is_begun_is_counted_where_it_is_asked_for(capfd, progress):
    with of_grid.counted(progress, "member", 1, 3) as (show, _):
        show(1, "rate=0.1")
    shown = "".join(capfd.readouterr())
    assert ("member 2/3  rate=0.1" in shown) == progress


def test_no_progress_is_promised_that_is_refused():
    """The names of metrics, which `run` takes, are of a training that is not shown."""
    for fn in (tj.sweep, tj.tools.bench):
        (told,) = re.findall(r"progress: (.*?)\n\n", inspect.getdoc(fn), re.S)
        assert "run" not in told and re.findall("None|True|False", told) == [
            "None", "True", "False",
        ]  # fmt: skip


def test_what_is_no_progress_is_refused():
    with pytest.raises(ValueError, match="progress='yes' must be one of"):
        with of_grid.counted("yes", "member", 0, 1):
            pass
