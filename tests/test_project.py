"""The habits of the project: names, imports, docstrings, sizes."""

import ast
import doctest
import importlib
import inspect
import pathlib
import pkgutil
import re
import subprocess
import sys

import pytest

import towerjax as tj

ROOT = pathlib.Path(tj.__file__).parent
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(ROOT)], "towerjax."))
PUBLIC = """AllReduce Best BestEvaluation Check CheckpointError CheckpointRecord
Checkpointer ClassificationOutput CrossTowerOps DesyncError DistributedDataset
EarlyStopping ExampleCount ExampleReport ExamplesError Exported Hardware Hierarchical
History IndexedRows InputContext JsonLines Layout Link LossReduction Mirrored
MirroredVar Mode ModelSpec MultiStepContext NonFiniteError OneDevice OpsChoice Packed
PerTower PinnedTree Plan PlanRow PredictOutput ReduceToOneDevice Reduction
RegressionOutput ReplicatedModel ReplicationError RunSummary StepReport TensorBoard
Tower TowerLocal TowerOptimizer TowerOutput TrainState VariablePlacement Weighted
__version__ batches bench build_eval_step build_predict_step build_train_step
check_examples check_mirrored choose_cross_tower_ops cluster compute_weighted_loss
evaluate evaluate_all export_model load_exported load_safetensors measure_hardware
metrics plan predict read_local replicate_model_fn restored_values run save_safetensors
saved_values sparse_value_and_grad testing train_and_evaluate
update_with_rows""".split()

# Each layer may import the ones before it, and its own names to the left of it.
LAYERS = """
    version shell.codes shell.numbers shell.command shell
    devices html_form types variables named
    proof proof.grid proof.origin proof.equation proof.scale proof.found proof.marks
    proof.collective proof.analysis proof.mirrored
    processes
    cluster.watchdog cluster.spec cluster.ports cluster.forward cluster.launcher
    cluster.find cluster.start cluster cluster.command
    placement reduce executors shard desync nonfinite checking
    example_cells example_count
    sparse.duplicates sparse.rows sparse.over_towers sparse.lookup sparse.gradient
    sparse.row_wise sparse.probe sparse.update sparse
    merge tower
    batch_norm batch_norm.options batch_norm.normalize batch_norm.linen batch_norm.nnx
    metrics.foreign metrics.state metrics.rows metrics.means metrics.binary
    metrics.classes metrics.thresholds metrics.host metrics
    outputs gradient
    input input.sparse_rows input.cut input.feed input.sources input.placer
    input.passes input.ledger input.distribute
    collectives.packing collectives.base collectives.all_reduce collectives.pinned_tree
    collectives.packed collectives.one_device collectives.hierarchical
    collectives.choose collectives.written collectives metrics.over_towers
    update tower_local state
    cross_tower cross_tower.destinations cross_tower.travel cross_tower.values
    cross_tower.batch cross_tower.regroup cross_tower.one_by_one cross_tower.constants
    cross_tower.assign cross_tower.whereabouts cross_tower.saving cross_tower.call
    cross_tower.variable_methods cross_tower.methods
    cross_tower.multi_step cross_tower.job
    strategies
    in_flight program
    report report.plain report.tables report.shown report.formulas report.hlo
    report.compiled_flops report.communication report.memory report.dispatch
    report.step_report
    pipeline compiled_step step inference
    report.traced_work report.hardware report.link_model report.measured
    report.plan_report report.plan report.command
    estimator estimator.in_turn estimator.losses estimator.optimizer estimator.spec
    estimator.arguments estimator.rows estimator.pipeline estimator.whereabouts
    estimator.options estimator.steps estimator.replicate estimator.export
    loop loop.interrupt loop.progress loop.steps
    checkpoint checkpoint.errors checkpoint.safetensors checkpoint.manifest
    checkpoint.folder checkpoint.leaves
    checkpoint.files checkpoint.record checkpoint.options checkpoint.saver
    loop.faults loop.stopping loop.history
    loop.evaluate loop.keep loop.options loop.saving loop.records loop.json_lines
    loop.tensorboard
    loop.running loop.run loop.command
    estimator.data estimator.train estimator.evaluate estimator.predict
    testing.compare testing.oracle testing.findings testing.dealing testing.audited
    testing.causes testing.replicates testing testing.command
    bench.protocol bench.model bench.networks bench.models bench.grid bench.baseline
    bench.trials bench.machine bench.peers.same_work bench.peers.torch_ddp
    bench.peers.tensorflow_mirrored bench.peers.keras_parallel bench.peers
    bench.worker bench.results bench.compare bench.table bench.sweep bench.plots
    bench.report bench bench.command bench.overhead bench.checks
    bench.safety bench.catalogue bench.same_bits bench.pinned_cost
    doctor doctor.machine doctor.advice doctor.self_test doctor.command
    cli __main__
""".split()


def test_public_names_are_exactly_these():
    source = ast.parse((ROOT / "__init__.py").read_text())
    names = [
        alias.asname
        for node in source.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert sorted(names) == sorted(PUBLIC)
    for name in names:
        assert getattr(tj, name) is not None


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "towerjax":
                yield from (alias.name for alias in node.names)
            elif node.module.startswith("towerjax."):
                yield node.module.removeprefix("towerjax.")


def test_imports_run_one_way():
    known = {name.removeprefix("towerjax.") for name in MODULES}
    assert known == set(LAYERS), "a module is missing from LAYERS, or gone"
    for name in LAYERS:
        path = ROOT / (name.replace(".", "/") + ".py")
        path = path if path.exists() else path.with_suffix("") / "__init__.py"
        for imported in imports_of(path):
            assert LAYERS.index(imported) < LAYERS.index(name), f"{name}: {imported}"


def test_only_two_files_name_the_executors():
    words = re.compile(r"\b(shard_map|pmap|NamedSharding)\(|jax\.vmap\(")
    # The benchmarks name what they measure against.
    allowed = {"placement.py", "executors.py"}
    for path in ROOT.rglob("*.py"):
        found = words.search(path.read_text())
        is_allowed = path.name in allowed or "bench" in path.parts
        assert not found or is_allowed, f"{path.name}: {found[0]}"


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_short_and_says_what_it_answers(name):
    module = importlib.import_module(name)
    lines = pathlib.Path(module.__file__).read_text().splitlines()
    assert len(lines) <= 400
    assert len(module.__doc__.splitlines()[0]) <= 88


def functions_of(module):
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__ or name[0] == "_":
            continue
        if inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            for inner, method in vars(value).items():
                method = getattr(method, "__func__", method)
                if inner[0] != "_" and inspect.isfunction(method):
                    yield f"{name}.{inner}", method


def documented_arguments(doc):
    section = re.search(r"^ *Args:\n(.*?)(?:\n *\n|\Z)", doc, re.DOTALL | re.MULTILINE)
    if not section:
        return []
    lines = section[1].splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    heads = [line for line in lines if re.match(rf" {{{indent}}}[\w*]", line)]
    return [head.strip().split(":")[0].lstrip("*") for head in heads]


@pytest.mark.parametrize("name", MODULES)
def test_documented_arguments_are_the_signatures(name):
    for function_name, function in functions_of(importlib.import_module(name)):
        doc = inspect.getdoc(function)
        assert doc, f"{function_name} has no docstring"
        parameters = list(inspect.signature(function).parameters)
        parameters = [p for p in parameters if p not in ("self", "cls")]
        arguments = documented_arguments(doc)
        if arguments or len(doc.splitlines()) > 1:
            assert arguments == parameters, f"{name}.{function_name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_run(name):
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    result = doctest.testmod(module, optionflags=flags)
    assert result.failed == 0


def test_what_users_call_has_an_example():
    for name in PUBLIC:
        value = getattr(tj, name)
        if inspect.isfunction(value):
            assert ">>>" in value.__doc__, f"{name} shows no example"


def test_the_python_body_of_a_function_is_short():
    long = []
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                has_text = ast.get_docstring(node) and len(node.body) > 1
                first = node.body[1 if has_text else 0]
                lines = node.end_lineno - first.lineno + 1
                if lines > 40:
                    long.append(f"{path.name}: {node.name} has {lines} lines")
    assert long == []


def test_importing_towerjax_brings_nothing_heavy():
    program = (
        "import sys, jax, optax; before = set(sys.modules); import towerjax;"
        " print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    roots = set(done.stdout.split())
    assert "towerjax" in roots
    heavy = {"rich", "IPython", "matplotlib", "sklearn", "flax", "orbax"}
    assert not roots & (heavy | {"tensorboardX"})


def test_the_program_of_the_readme_runs(tmp_path):
    text = (ROOT.parent / "README.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    weights = re.search(
        r"\[([\d.]+) *, ([\d.]+) *, ([\d.]+) *\]", done.stdout.splitlines()[-1]
    )
    assert [round(float(x), 2) for x in weights.groups()] == [1.0, 2.0, 3.0]
