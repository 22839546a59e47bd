"""The page that follows a batch: a call goes by its stations, in its order."""

import ast
import collections
import pathlib
import re
import sys

import numpy as np
import optax
import pytest

import towerjax as tj

ROOT = pathlib.Path(tj.__file__).parent
PAGE = ROOT.parent / "docs" / "how_it_works.md"
FIRST_CALL_ALONE = "trace prove lower compile_on_devices".split()


def stations():
    """``[(name, file)]`` of the page's table."""
    rows = re.findall(r"^\| \d+ \| `(.+?)` \| `(.+?)` \|", PAGE.read_text(), re.M)
    assert len(rows) == 10
    return rows


def calls_of(fn):
    """``(file, name)`` of each call in towerjax, in order."""
    calls = []

    def profile(frame, event, _):
        code = frame.f_code
        # A comprehension is no call since Python 3.12.
        is_call = event == "call" and not code.co_name.endswith("comp>")
        if is_call and code.co_filename.startswith(f"{ROOT}/"):
            file = code.co_filename.removeprefix(f"{ROOT}/")
            calls.append((file, code.co_qualname))

    sys.setprofile(profile)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return calls


@pytest.fixture(scope="module")
def calls():
    def loss_fn(params, batch, tower):
        errors = batch["x"] @ params["w"] - batch["y"]
        return tj.Weighted.mean(errors**2, tower.weight)

    strategy = tj.Mirrored(("cpu:0",), towers=2)
    # Proving it is not one of the page's stations.
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, audit=False)
    states = [step.init({"w": np.zeros(3, np.float32)})]
    batch = {"x": np.ones((4, 3), np.float32), "y": np.ones(4, np.float32)}

    def call():
        states.append(step(states[-1], batch)[0])

    first = calls_of(call)
    call()
    return first, calls_of(call)


@pytest.mark.slow
@pytest.mark.parametrize("which", ["first", "second"])
def test_a_call_goes_by_the_stations_in_their_order(calls, which):
    found = calls[which == "second"]
    wanted = [(file, name) for name, file in stations()]
    if which == "second":
        wanted = [x for x in wanted if x[1] not in FIRST_CALL_ALONE]
    assert [x for x in dict.fromkeys(found) if x in wanted] == wanted


def test_no_station_of_a_first_call_calls_another():
    text = {}
    for name in FIRST_CALL_ALONE[:3]:
        [file] = [file for found, file in stations() if found == name]
        body = (ROOT / file).read_text().partition(f"\ndef {name}(")[2]
        text[name] = body.partition("\ndef ")[0]
    for name, body in text.items():
        others = [x for x in FIRST_CALL_ALONE if x != name]
        assert not re.search(rf"(?<![.\w])({'|'.join(others)})\(", body), name


CONCEPTS = PAGE


# Classes that there were beside the twelve, and what they do now is one of them.
GONE = """Called Caller CompiledStep Engine Findings InferenceStep MembersStep
    ModelEngine ModelPasses ModelStep ModelTrainStep PassArgs PassResult Proving
    Recipe Run Runner TrainStep""".split()


@pytest.mark.slow
def test_each_noun_of_the_source_is_one_class_in_its_file():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?\.py)` \|", CONCEPTS.read_text(), re.M)
    assert len(rows) == 12
    owners = collections.defaultdict(list)
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                owners[node.name.strip("_")].append(path.relative_to(ROOT).as_posix())
    assert {name: owners[name] for name, _ in rows} == {x: [y] for x, y in rows}
    assert not owners.keys() & {*GONE}


def test_files_that_the_page_names_are_there():
    files = re.findall(r"`([a-z_]+(?:/[a-z_]+)+\.py)`", PAGE.read_text())
    assert len({*files}) >= 15
    for file in files:
        assert (ROOT / file).exists(), file


def test_a_name_before_its_file_is_there():
    pairs = re.findall(r"`(\w+)`\s\(`([a-z_/]+\.py)`", PAGE.read_text())
    assert len(pairs) >= 11
    for name, file in pairs:
        text = (ROOT / file).read_text()
        assert re.search(rf"^(def|class) {name}\b", text, re.M), (name, file)


def test_a_first_call_takes_one_derivative_outside_the_tower(calls):
    device = "step/passes/on_device.py", "on_device.<locals>.run"
    derivative = "step/passes/derivative.py", "gradient_of"
    towers = "lowering/tower_axis.py", "over_local_towers"
    order = [device, derivative, towers]
    # What a device runs is traced twice: as one tower a device, and as it is.
    assert [x for x in calls[0] if x in order] == 2 * order
    assert ("make/gradient.py", "value_and_grad") not in calls[0]


LAYOUTS = {
    "one tower": {"towers": 1},
    "together": {"towers": 4, "devices": 2},
    "in turn": {"towers": 4, "devices": 2, "tower_loop": "scan"},
    "same bits": {
        "towers": 4,
        "devices": 2,
        "tower_loop": "scan",
        "cross_tower_ops": tj.PinnedTree(),
    },
    "sharded": {"towers": 4, "devices": 4, "state": "sharded"},
    "several devices": {"towers": 2, "devices": 4, "within": {"model": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_few_frames_of_ours_lie_between_a_call_and_the_loss(layout, micro_batches):
    """Someone who stops a debugger in the loss reads them all; lower this number."""
    frames = []

    def loss_fn(params, batch, tower):
        frame = sys._getframe(1)
        while frame.f_code.co_qualname != "Step.__call__":
            file = frame.f_code.co_filename
            if file.startswith(f"{ROOT}/"):
                frames.append((file.removeprefix(f"{ROOT}/"), frame.f_code.co_name))
            frame = frame.f_back
        return tj.Weighted.mean((batch @ params) ** 2, tower.weight)

    options = {**LAYOUTS[layout]}
    devices = [f"cpu:{i}" for i in range(options.pop("devices", 1))]
    step = tj.build_train_step(
        loss_fn,
        optax.sgd(0.1),
        tj.Mirrored(devices, **options),
        micro_batches=micro_batches,
        audit=False,  # a proof traces the loss, too
    )
    step(step.init(np.ones(4, np.float32)), np.ones((16, 4), np.float32))
    assert len(frames) <= 20, frames
    assert ("step/passes/on_device.py", "run") in frames
    runs = [file for file, name in frames if name == "run"]
    assert len(runs) == len({*runs}), frames


def test_how_many_calls_a_step_takes(calls):
    """Of Python, in towerjax."""
    first, second = calls
    assert len(second) <= 27, second
    assert len(first) <= 1_900
    files = {file for file, _ in first}
    assert len(files) <= 59, sorted(files)
