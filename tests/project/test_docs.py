"""The pages under docs/: programs run, names exist, tables are whole and name tests."""

import dataclasses
import functools
import inspect
import json
import re
import runpy
import sys
import time
import warnings

import forked
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reads
import rewritten_losses as rewritten
from checkout import ROOT

import towerjax as tj

DOCS = ROOT / "docs"
TEXTS = {
    path.relative_to(DOCS).as_posix(): path.read_text()
    for path in sorted(DOCS.rglob("*.md"))
}
BLOCK = re.compile(r"^```(.*?)\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
PROGRAM = re.compile(
    r"^```python run( launch|(?: more)?(?: if \w+)?)\n(.*?)^```\n"
    r"(?:\n```text\n(.*?)^```\n)?",
    re.DOTALL | re.MULTILINE,
)
# Of each name of TensorFlow's on two pages, by section: the tests that show it.
NAMES = json.loads((ROOT / "tests" / "names_of_tensorflow.json").read_text())
TEST = re.compile(r"(tests/[\w/]+\.py)(?:::(\w+)(?:\[(.*?)\])?)?")


def programs():
    """``(page, which of its programs, how to run it, text, output)``.

    In two processes, too: "launch"; below the one before: "more"; where a package is
    installed: "if torch", or "more if torch".
    """
    for page, text in TEXTS.items():
        before = "", ""
        for number, (how, *found) in enumerate(PROGRAM.findall(text)):
            if how.startswith(" more"):
                found = [a + b for a, b in zip(before, found, strict=True)]
            before = before if " if " in how else found  # of what may be missing
            yield page, number, how.strip(), *found


@functools.cache
def whole_programs():
    """Those below which no more follows: they hold, and print, all that came before."""
    found = list(programs())
    nexts = [(page, how) for page, _, how, *_ in found[1:]]
    pairs = zip(found, [*nexts, None], strict=True)
    return {(p[0], p[1]): p[2:] for p, then in pairs if then != (p[0], "more")}


def python(folder, program, compiled="as by users"):
    """What a program prints, as ``train.py`` in a folder of its own."""
    (folder / "train.py").write_text(program)
    silent = {"TF_ENABLE_ONEDNN_OPTS": "0"}  # TensorFlow tells on stderr that it has it
    return forked.printed(folder / "train.py", compiled=compiled, **silent)


@pytest.mark.slow
def test_a_loop_that_is_started_again_has_its_evaluations(tmp_path):
    """It then ends at once: its evaluations have reached the goal."""
    page = "how_to/own_loop.md"
    program = next(text for name, _, _, text, _ in programs() if name == page)
    program = program.partition("batch = next(batches)\n")[0]
    saved = f"Checkpointer({str(tmp_path / 'saved')!r}, "
    program = program.replace("Checkpointer(folder.name, ", saved)
    assert saved in program
    first = python(tmp_path, program)
    assert "at step 16" in first and python(tmp_path, program).endswith(first)


def read_by_program(page, number):
    how, program, output = whole_programs()[page, number]
    return [how, program, output, *reads.package(program)]


@pytest.mark.slow
@pytest.mark.reads(texts=read_by_program)
@pytest.mark.parametrize("page, number", whole_programs(), ids=str)
def test_programs_run(page, number, tmp_path):
    """Each prints what its page shows."""
    how, program, output = whole_programs()[page, number]
    if "if " in how:
        pytest.importorskip(how.split()[-1])
    assert output, "a program that runs shows what it prints, in a block of text"
    # As by users where bits are told, or digits of which the last depends on them.
    tells_bits = re.search(r"bits|hash|\.\d{6}", page + program + output)
    compiled = "as by users" if tells_bits else "unoptimized"
    assert python(tmp_path, program, compiled) == output
    if page == "quick_start.md":  # started again, all is done and nothing is an error
        done = output.replace(
            "step 20, of which this run did 20", "step 50, of which this"
        )
        again = python(tmp_path, program, compiled)
        assert again == re.sub(r"this( run did 30)?\n", "this run did 0\n", done)


@pytest.mark.slow
def test_the_program_of_from_jit_goes_on_where_it_was_killed(tmp_path):
    """Killed at step 10 of 12, and started twice more; the last has nothing to do."""
    program, output = whole_programs()["from_jit.md", 2][1:]
    dies = "tj.loop.WithState(lambda *_: os.kill(os.getpid(), 9), every=10)"
    killed = "import os\n" + program.replace(
        '"progress": False', f'"progress": False, "hooks": [{dies}]'
    )
    (tmp_path / "killed.py").write_text(killed)
    forked.printed(tmp_path / "killed.py", compiled="unoptimized", code=-9)
    (saved,) = tj.Checkpointer(tmp_path / "run").steps[-1:]  # 4, or 8 as well
    rows, *losses = output.splitlines(keepends=True)
    left = "".join(losses[(saved - 12) // 4 :])
    assert python(tmp_path, program, "unoptimized") == rows + left
    assert python(tmp_path, program, "unoptimized") == rows


def test_no_output_shows_a_digit_that_depends_on_the_processor():
    """A float32 has 7.2 digits, and each processor rounds sums in its own order."""
    outputs = {(p[0], p[1]): p[4] for p in programs()}
    for where, output in outputs.items():
        for text in re.findall(r"(?<![\w.])\d*\.\d+", output):
            assert len(text.replace(".", "").lstrip("0")) <= 6, (where, text)


@pytest.mark.slow
def test_a_program_prints_the_same_in_two_processes(tmp_path, capfd, monkeypatch):
    [(program, output)] = [p[3:] for p in programs() if p[2] == "launch"]
    (tmp_path / "train.py").write_text(program)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    command = [sys.executable, "-W", "error", str(tmp_path / "train.py")]
    assert tj.cluster.launch(command, processes=2, devices_per_process=4) == 0
    # Gloo, JAX's transport on CPUs, prints of each connection; its threads tear lines.
    texts = r"\s|\[Gloo\]|Rank|\d|is connected to|peer ranks\.|"
    texts += "Expected number of connected peer ranks is :"
    lines = capfd.readouterr().out.splitlines(keepends=True)
    said = [x for x in lines if not re.fullmatch(rf"\[\d\]({texts})*", x)]
    assert "".join(said) == f"[0] {output}"


def test_pmap_and_towerjax_print_the_same_losses():
    before, both = [p[4].split("\n") for p in programs() if p[0] == "from_pmap.md"]
    assert both[:2] == 2 * before[:1] and len(before[0].split()) == 8
    assert both[2] == "28 of 28 losses are the same to 1e-6"


# Tables.


def tables(text):
    """Of each table its rows, as lists of cells; the head and its line come first."""
    text = BLOCK.sub("", text)
    rows = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            # A cell may hold an escaped bar, in code.
            cells = re.split(r"(?<!\\)\|", line.strip())
            assert cells[0] == cells[-1] == "", line
            rows.append([cell.strip() for cell in cells[1:-1]])
        elif rows:
            yield rows
            rows = []


def no_cell_is_empty(page):
    for head, _, *rows in tables(TEXTS[page]):
        assert rows
        for row in rows:
            assert len(row) == len(head) and all(row), row


@functools.cache
def functions_of(path):
    return {*re.findall(r"^def (\w+)", (ROOT / path).read_text(), re.MULTILINE)}


@pytest.mark.slow
@pytest.mark.parametrize("page", NAMES)
def test_each_name_of_the_original_has_a_test(page):
    """The rows of a section's tables are its names in the file, with their tests."""
    rows = {}
    for section in re.split(r"^##+ ", TEXTS[page], flags=re.MULTILINE)[1:]:
        heading, _, text = section.partition("\n")
        for head, _, *of_names in tables(text):
            if head[0] != "a tower returns":  # of no names, and of one test
                rows.setdefault(heading, []).extend(row[0] for row in of_names)
    assert rows == {heading: [*names] for heading, names in NAMES[page].items()}
    for name, tests in [pair for of in NAMES[page].values() for pair in of.items()]:
        assert tests, name
        for test in tests:
            path, function, case = TEST.fullmatch(f"tests/{test}").groups()
            assert function, test
            assert_exists(path, function, case)


@functools.cache
def cases():
    files = (ROOT / "tests" / "conformance").glob("*.json")
    return {case["id"] for file in files for case in json.loads(file.read_text())}


def every_test_that_is_named_exists(page):
    for path, name, case in TEST.findall(TEXTS[page]):
        assert_exists(path, name, case)


def assert_exists(path, name, case):
    assert (ROOT / path).exists(), path
    assert not name or name in functions_of(path), f"{path}::{name}"
    assert not case or (case in cases() and is_checked(path, case)), case


def is_checked(path, case):
    """Does a test file name this case, or a prefix of it?"""
    text = (ROOT / path).read_text()
    prefixes = re.findall(r'startswith\("(.*?)"\)', text)
    return f'"{case}"' in text or any(case.startswith(p) for p in prefixes)


# Names.


def said(text):
    """What a page says of towerjax: not the programs before, nor the first column."""
    text = BLOCK.sub(lambda m: m[2] if m[1].startswith("python run") else "", text)
    return re.sub(r"^\|.*?(?<!\\)\|", "|", text, flags=re.MULTILINE)


def attributes(kind):
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    return {*dir(kind), *(field.name for field in fields)}


STEP = inspect.signature(tj.build_eval_step).return_annotation.__origin__
OBJECTS = {
    "R": attributes(tj.Reduction),
    "choice": attributes(tj.collectives.OpsChoice),
    "context": attributes(tj.towers.InputContext),
    "ctx": set(dir(tj.tf1.MultiStepContext(None))),
    "history": attributes(tj.History),
    "model": attributes(tj.estimator.ReplicatedModel) | {"strategy"},
    "optimizer": attributes(tj.estimator.TowerOptimizer),
    "spec": attributes(tj.estimator.ModelSpec),
    "state": attributes(tj.TrainState),
    "step": attributes(STEP),
    "tower": attributes(tj.Tower),
    "variables": attributes(tj.TrainState),
}


def strategy_on(page):
    """What `strategy` is on a page: it has TensorFlow's verbs where these are told."""
    has_verbs = page == "from_tensorflow1.md" or page in NAMES
    return tj.tf1.MirroredStrategy if has_verbs else tj.Mirrored


def every_name_exists(page):
    text = said(TEXTS[page])
    for chain in re.findall(r"\btj((?:\.[A-Za-z_]\w*)+)", text):
        functools.reduce(getattr, chain.split(".")[1:], tj)
    objects = OBJECTS | {"strategy": attributes(strategy_on(page))}
    for name, attribute in re.findall(r"(?<![\w./])([A-Za-z]+)\.([a-z]\w*)", text):
        if name in objects:
            assert attribute in objects[name], f"{name}.{attribute}"


def every_keyword_exists(page):
    """In calls such as tj.Mirrored(towers=8) and tower.all_gather(x, axis=0)."""
    text = said(TEXTS[page])
    calls = re.findall(
        r"\b(tj|strategy|tower|ctx|optimizer)\.([\w.]+)\(([^()]*)\)", text
    )
    owners = {"tj": tj, "strategy": strategy_on(page), "tower": tj.Tower}
    for said_of, name, arguments in calls:
        owner = owners.get(said_of, tj.tf1.MultiStepContext)
        if said_of == "optimizer":  # any of optax's, or ours with more
            owner = tj.estimator.TowerOptimizer(optax.sgd(0.1))
        called = functools.reduce(getattr, name.split("."), owner)
        parameters = dict(inspect.signature(called).parameters)
        if parameters.pop("options", None):  # those of `run`, handed on
            parameters |= inspect.signature(tj.run).parameters
        for keyword in re.findall(r"(\w+)=(?!=)", arguments):
            assert keyword in parameters, f"{name}({keyword}=)"


def paths_lead_somewhere(page):
    for path in re.findall(r"`((?:examples|notebooks)/\S+?)`", TEXTS[page]):
        assert (ROOT / path).exists(), path


def modules_that_are_named_exist_and_define_what_is_named(page):
    for path, name in re.findall(r"`(towerjax/\S+\.py)`(?:, `([\w.]+)`)?", TEXTS[page]):
        text = (ROOT / path).read_text()
        assert not name or f"def {name.split('.')[-1]}(" in text, f"{path}, {name}"


def pages_are_of_no_machine_and_not_wide(page):
    assert not re.search(r"(?<![\w.])/(tmp|work|home|root|Users|usr)/", TEXTS[page])
    for line in TEXTS[page].splitlines():
        wide = line.startswith("|") or re.match(r"\[.*\]: https://", line)
        assert wide or len(line) <= 90, line


def the_first_sentence_says_for_whom_it_is(page):
    if page == "README.md" or page.startswith("reference/"):
        return
    prose = BLOCK.sub("", TEXTS[page])
    first = next(x for x in prose.split("\n\n") if x.strip() and x[0] != "#")
    assert re.match(r"For (those|losses) ", first.lstrip()), first


LAWS = (
    no_cell_is_empty,
    the_first_sentence_says_for_whom_it_is,
    every_test_that_is_named_exists,
    every_name_exists,
    every_keyword_exists,
    paths_lead_somewhere,
    modules_that_are_named_exist_and_define_what_is_named,
    pages_are_of_no_machine_and_not_wide,
)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_each_page_keeps_a_law(law):
    broken = {}
    for page in TEXTS:
        try:
            law(page)
        except (AssertionError, AttributeError) as error:
            broken[page] = error
    assert not broken


# What the table says and no other test shows.


def mirrored(devices, **options):
    names = tuple(f"cpu:{i}" for i in range(devices))
    return tj.tf1.MirroredStrategy(names, **options)


def test_parameters_lie_on_the_worker_devices():
    strategy = mirrored(4)
    assert strategy.parameter_devices == strategy.worker_devices
    v = strategy.create_var("v", 1.0)
    assert v.value.devices() == set(jax.devices("cpu")[:4])


@pytest.mark.parametrize("towers", [1, 4])
def test_a_tower_knows_its_strategy(towers):
    strategy = mirrored(1, towers=towers)
    seen = []

    def tower_fn(tower):
        seen.append((tower.strategy, tower.num_towers))
        assert tower.strategy.is_single_tower == (tower.num_towers == 1)

    strategy.call_for_each_tower(tower_fn)
    assert set(seen) == {(strategy, towers)}


@pytest.mark.slow
def test_configure_joins_the_cluster(tmp_path):
    program = f"""
import towerjax as tj
strategy = tj.tf1.MirroredStrategy(num_gpus=0)
spec = {{"worker": ["127.0.0.1:{forked.free_port()}"]}}
same = strategy.configure(cluster_spec=spec, task_type="worker", task_id=0)
print(same == strategy, tj.cluster.initialize().how)
"""
    assert python(tmp_path, program) == "True explicit arguments\n"


@pytest.mark.slow
def test_precision_is_a_ratio_of_counts():
    predicted = np.array([1, 1, 0, 1, 0, 1], bool)
    true = np.array([1, 0, 0, 1, 1, 1], bool)

    def metric_fn(params, batch, tower):
        counted = batch["predicted"] * tower.weight
        hits = counted * batch["true"]
        return {"precision": tj.Weighted(hits.sum(), counted.sum())}

    evaluate = tj.build_eval_step(metric_fn, mirrored(4))
    batches = tj.batches({"predicted": predicted, "true": true}, 5)
    precision = tj.evaluate(evaluate, np.float32(0), lambda: batches)["precision"]
    assert precision == (predicted & true).sum() / predicted.sum()


def test_a_tower_optimizer_may_be_made_by_a_function():
    state = tj.estimator.TowerOptimizer(lambda: optax.adam(0.1)).init({"w": np.ones(3)})
    expected = optax.adam(0.1).init({"w": np.ones(3)})
    assert jax.tree.structure(state.inner) == jax.tree.structure(expected)
    assert state.inner[0].mu["w"].tolist() == [0.0, 0.0, 0.0]


def as_tensorflow_1(name, lr, w, slots, g, step):
    """One step of an optimizer of ``tf.train``, by its kernel's formula."""
    a, b = slots
    if name == "Momentum":
        a = 0.9 * a + g
        return w - lr * (g + 0.9 * a), (a, b)
    if name == "Adagrad":
        a = a + g**2
        return w - lr * g / np.sqrt(a), (a, b)
    if name == "Adadelta":
        a = 0.95 * a + 0.05 * g**2
        moved = np.sqrt(b + 1e-8) / np.sqrt(a + 1e-8) * g
        return w - lr * moved, (a, 0.95 * b + 0.05 * moved**2)
    if name == "RMSProp":
        a = 0.9 * a + 0.1 * g**2
        return w - lr * g / np.sqrt(a + 1e-10), (a, b)
    if name == "Adam":
        a = 0.9 * a + 0.1 * g
        b = 0.999 * b + 0.001 * g**2
        lr = lr * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        return w - lr * a / (np.sqrt(b) + 1e-8), (a, b)
    # Ftrl, l1=0.1, l2=0.2
    old = a
    a = a + g**2
    b = b + g - (np.sqrt(a) - np.sqrt(old)) / lr * w
    above = (np.sign(b) * 0.1 - b) / (np.sqrt(a) / lr + 2 * 0.2)
    return np.where(np.abs(b) > 0.1, above, 0.0), (a, b)


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("name", "Momentum Adagrad Adadelta RMSProp Adam Ftrl".split())
def test_optimizers_of_tensorflow_1(name):
    page = (DOCS / "from_tensorflow1.md").read_text()
    lr = 0.3
    names = {"optax": optax, "lr": lr, "m": 0.9}
    names["ftrl"] = runpy.run_path(str(ROOT / "examples" / "ftrl.py"))["ftrl"]
    row = re.search(rf"^\| `{name}Optimizer\(.*?\| `(optax.*?)`", page, re.MULTILINE)
    written = row[1] if name != "Ftrl" else "ftrl(lr, l1=0.1, l2=0.2)"
    optimizer = eval(written, names)
    first = {"Adagrad": 0.1, "RMSProp": 1.0, "Ftrl": 0.1}.get(name, 0.0)
    w = np.array([0.5, -1.0, 0.01])
    slots = (np.full(3, first), np.zeros(3))
    params = jnp.asarray(w, jnp.float32)
    state = optimizer.init(params)
    rng = np.random.default_rng(0)
    for step in range(1, 6):
        g = rng.normal(size=3)
        w, slots = as_tensorflow_1(name, lr, w, slots, g, step)
        updates, state = optimizer.update(jnp.float32(g), state, params)
        params = optax.apply_updates(params, updates)
        # Float32 holds 1 - 0.999**step to five digits.
        np.testing.assert_allclose(params, w, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_each_gradient_is_clipped_by_its_own_norm():
    page = (DOCS / "reference/replicate_model_fn.md").read_text()
    written = re.search(r"^clip = (optax\.stateless.*?)^```", page, re.DOTALL | re.M)[1]
    clip = eval(written, {"optax": optax, "jax": jax, "jnp": jnp})
    optimizer = tj.estimator.TowerOptimizer(optax.chain(clip, optax.sgd(1.0)))
    start = {"long": np.ones((2, 2), np.float32), "short": np.float32(1)}

    def model_fn(variables, features, labels, mode, tower):
        def loss_fn(w):  # gradients of norms 10 and 2
            values = features * (w["long"] * np.float32([[1, 7], [5, 5]])).sum()
            return tj.Weighted.mean(-values - 2 * w["short"] * features, tower.weight)

        loss, train_op = optimizer.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=train_op)

    for towers in (1, 3):
        model = tj.estimator.replicate_model_fn(
            model_fn, devices=mirrored(1, towers=towers)
        )
        variables = tj.TrainState.create(start, optimizer)
        after = model(variables, np.ones(6, np.float32)).train_op.params
        long = 1 + np.array([[1, 7], [5, 5]]) * 3 / 10
        np.testing.assert_allclose(after["long"], long, rtol=1e-6)
        np.testing.assert_allclose(after["short"], 3.0, rtol=1e-6)  # shorter than 3


@pytest.mark.slow
@pytest.mark.parametrize("towers", [2, 6])
def test_recall_at_k_divides_by_all_labels(towers):
    """Rows have one to seven labels, so that a mean of the rows' recalls differs."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(23, 10)).astype(np.float32)
    labels = rng.permuted(np.arange(10) < rng.integers(1, 8, (23, 1)), axis=1)
    best = np.argsort(-scores, axis=1)[:, :3]
    hits = np.take_along_axis(labels, best, axis=1).sum(1)
    expected = hits.sum() / labels.sum(), hits.sum() / (3 * 23)
    assert abs((hits / labels.sum(1)).mean() - expected[0]) > 0.01

    def model_fn(variables, features, labels, mode, tower):
        w = tower.weight
        found = jax.lax.top_k(features, 3)[1]
        hits = jnp.take_along_axis(labels, found, axis=1).sum(axis=1)
        recall = tj.Weighted(w @ hits, w @ labels.sum(axis=1))
        precision = tj.Weighted(w @ hits, 3 * w.sum())
        metrics = {"recall": recall, "precision": precision}
        return tj.estimator.ModelSpec(mode, loss=recall, eval_metrics=metrics)

    strategy = mirrored(2, towers=towers)
    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy)
    spec = model(np.float32(1), scores, labels, tj.estimator.Mode.EVAL)
    found = [float(spec.eval_metrics[name].value) for name in ("recall", "precision")]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_params_are_a_plain_tree_for_export():
    def loss_fn(params, batch, tower):
        return tj.Weighted.mean((batch @ params["w"]) ** 2, tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), mirrored(4))
    state = step.init({"w": np.ones(3, np.float32)})
    params = jax.device_get(state.params)
    x = np.ones((2, 3), np.float32)
    exported = jax.export.export(jax.jit(lambda params, x: x @ params["w"]))(params, x)
    assert np.asarray(exported.call(params, x)).tolist() == [3.0, 3.0]


@pytest.mark.slow
@pytest.mark.parametrize("library", ["wandb", "mlflow"])
def test_curves_reach_a_library_without_a_network(library, tmp_path, monkeypatch):
    """The page's program and the page's lines, where the library is installed."""
    module = pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    blocks = [text for _, text in BLOCK.findall(TEXTS["how_to/wandb_and_mlflow.md"])]
    [program] = [text for text in blocks if "def show" in text]
    [lines] = [text for text in blocks if text.startswith(f"with {library}")]
    names = {"__name__": "page", library: module}
    exec(program, names)
    names["state"], names["data"] = names["step"].init(np.ones(3)), names["data"].at(0)
    with warnings.catch_warnings(action="ignore"):  # of the library
        if library == "mlflow":
            module.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
        exec(lines, names)
    if library == "mlflow":
        found = module.last_active_run().data.metrics
        assert found["train/loss"] == pytest.approx(7.9524, rel=1e-4)
        return
    [kept] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    end_s = time.monotonic() + 300  # a process of the library's own writes it
    while b"train/loss" not in kept.read_bytes():
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_both_sides_of_from_jit_have_as_many_lines_as_it_says():
    page = TEXTS["from_jit.md"]
    told = re.findall(r"^## .*: (\d+) lines$", page, re.MULTILINE)
    _, *sides = [text for _, text, _ in PROGRAM.findall(page)]
    counts = [sum(bool(line.strip()) for line in x.splitlines()) for x in sides]
    assert [int(x) for x in told] == counts and 2 * counts[1] < counts[0]


def reasons_of(loss_fn, remainder, local=None):
    """Why a step of 4 towers is not proved equal to one."""
    shape = jax.ShapeDtypeStruct
    batch = {"x": shape((16, 3), jnp.float32), "k": shape((16,), jnp.int32)}
    strategy = tj.Mirrored(towers=4)
    how = {"remainder": remainder}
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **how)
    state = step.init({"w": np.ones(3, np.float32)}, local=local)
    return "\n".join(step.check(state, batch).unproved.values())


class Unproved:
    """Losses with the reasons that no program of the table's page shows."""

    def added(params, batch, tower):
        losses = batch["x"] @ params["w"]
        return tj.Weighted(losses.sum(), batch["x"].sum() + 1e-8)

    def guarded(params, batch, tower):
        losses = batch["x"] @ params["w"]
        return tj.Weighted(losses.sum(), jnp.maximum(tower.weight.sum(), 1))

    def finite(params, batch, tower):
        weight = tower.weight * (1 + jnp.abs(batch["x"][:, 0]))
        mean = jnp.nan_to_num(batch["x"] @ params["w"] @ weight / weight.sum())
        return tj.Weighted(mean * weight.sum(), weight.sum())

    def chosen(params, batch, tower):
        losses = batch["x"] @ params["w"]
        losses = jnp.where((batch["x"] > 0).any(), losses, 0)
        return tj.Weighted.mean(losses, tower.weight)

    def compared(params, batch, tower):
        mean = jnp.nan_to_num((batch["x"] @ params["w"]).mean())
        return tj.Weighted(mean * len(batch["x"]), len(batch["x"]))

    def drawn(params, batch, tower):
        kept = jax.random.bernoulli(tower.rng, 0.5, (3,))
        return tj.Weighted.mean((batch["x"] * kept[None]) @ params["w"], tower.weight)

    def closed_over(params, batch, tower):
        losses = batch["x"] @ params["w"] * np.arange(len(batch["x"]), dtype=np.float32)
        return tj.Weighted.mean(losses, tower.weight)

    def called(params, batch, tower):
        like = jax.ShapeDtypeStruct(batch["k"].shape, jnp.int32)
        k = jax.pure_callback(np.abs, like, batch["k"], vmap_method="expand_dims")
        return tj.Weighted.mean(batch["x"] @ params["w"] * k, tower.weight)

    def best(params, batch, tower):
        scores = batch["x"] @ params["w"]
        return tj.Weighted.mean(scores - scores[jnp.argmax(scores)], tower.weight)

    def key_as_number(params, batch, tower):
        noise = jax.random.key_data(tower.rng)[0] / 2.0**32
        return tj.Weighted.mean(batch["x"] @ params["w"] + noise, tower.weight)

    def merged(params, batch, tower):
        loss = tj.Weighted.mean(batch["x"] @ params["w"], tower.weight)
        return tj.TowerOutput(loss, {"least": Least(batch["x"].min())})

    def shifted(params, batch, tower):
        scores = batch["x"] @ params["w"]
        return tj.Weighted.mean(jnp.exp(scores - scores.max()), tower.weight)

    def gathered(params, batch, tower):
        x, weight = tower.all_gather(
            (batch["x"] * params["w"][None], tower.weight), axis=0
        )
        scores = jnp.where(weight[None] > 0, batch["x"] @ x.T, -jnp.inf)
        own = tower.id * len(batch["x"]) + jnp.arange(len(batch["x"]))
        losses = optax.softmax_cross_entropy_with_integer_labels(scores, own)
        return tj.Weighted.mean(losses, tower.weight)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Least:
    """A metric with a merge that no rule knows."""

    x: jax.Array

    def merge(self, other):
        return Least(jnp.where(self.x < other.x, self.x, other.x))

    def compute(self):
        return self.x


def of_own_mean(params, batch, tower):
    mean = tower.local["mean"]
    losses = batch["x"] @ params["w"] - mean
    loss = tj.Weighted.mean(losses, tower.weight)
    return tj.TowerOutput(loss, local={"mean": 0.9 * mean + batch["x"].mean()})


@pytest.mark.slow
def test_each_reason_of_the_table_is_one_that_a_step_gives():
    _, section = TEXTS["proof.md"].split("\n## When a right loss stays unproved\n")
    [[_, _, *rows]] = tables(section)
    told = {x for row in rows for x in re.findall("`(.*?)`", row[0])}
    fns = [fn for name, fn in vars(Unproved).items() if name[0] != "_"]
    given = [reasons_of(fn, how) for fn in fns for how in ("error", "pad")]
    local = {"mean": tj.TowerLocal(np.float32(0), tj.Reduction.MEAN)}
    given.append(reasons_of(of_own_mean, "error", local))
    for name, (before, after) in {**rewritten.PAIRS, **rewritten.METRICS}.items():
        given.append(rewritten.reason(name, before))
        assert given[-1] and rewritten.reason(name, after) is None, name
    printed = re.findall("^```text\n(.*?)^```", section, re.S | re.M)
    shown = "\n".join(given + printed)
    assert len(told) > 15
    assert [x for x in told if x not in shown] == ["tower.all_gather"]


def test_the_diff_of_the_readme_turns_one_program_of_from_pmap_into_the_other():
    before, after = [p[1] for p in PROGRAM.findall(TEXTS["from_pmap.md"])]
    readme = (ROOT / "README.md").read_text()
    lines = re.search(r"^```diff\n(.*?)^```", readme, re.S | re.M)[1].splitlines()
    gone = [x[1:] for x in lines if x[0] == "-"]
    come = [x[1:] for x in lines if x[0] == "+"]
    assert (len(gone), len(come)) == (9, 5) and len(lines) == 14
    assert set(gone) <= {*before.splitlines()} and set(come) <= {*after.splitlines()}
    left = [x for x in before.splitlines() if x not in gone]
    new = [x for x in after.splitlines() if x not in come]
    assert [x for x in new if x and x not in left] == [
        "import towerjax as tj",
        "before = losses",
        "same = [abs(a / b - 1) < 1e-6 for a, b in zip(losses, before, strict=True)]",
        'print(sum(same), "of", len(same), "losses are the same to 1e-6")',
    ]
