"""A namespace shows its public names, and says where a name that it lacks is now."""

import functools
import inspect
import json
import re
import types
from pathlib import Path

import pytest
from checkout import ROOT, TESTS

import towerjax as tj

SPACES = """
tf1 estimator towers metrics collectives loop testing tools contrib cluster sparse
layers
""".split()
FORMER = {
    "": """
    Best BestEvaluation Check CheckpointRecord ClassificationOutput CrossTowerOps
    DistributedDataset ExampleCount ExampleReport ExamplesError Exported Hardware
    Hierarchical IndexedRows InputContext Layout Link LossReduction MirroredVar Mode
    ModelSpec MultiStepContext OpsChoice Packed Plan PlanRow PredictOutput
    ReduceToOneDevice RegressionOutput ReplicatedModel RunSummary Shared StepReport
    TowerOptimizer TowerStatistics VariablePlacement bench check_examples
    choose_cross_tower_ops compute_weighted_loss evaluate_all export_model
    load_exported load_safetensors measure_hardware plan predict read_local
    replicate_model_fn restored_values save_safetensors saved_values shared
    sparse_value_and_grad sync train_and_evaluate update_with_rows
    """,
    "tf1": "replicate_model_fn TowerOptimizer LossReduction ModelSpec Mode",
    "estimator": "Exported export_model load_exported MirroredStrategy",
    "towers": "MultiStepContext",
    "metrics": "ExampleCount ExampleReport ExamplesError check_examples",
    "collectives": """
    ChecksDevices Compressed KeepsState Sums ops_of sum_rows_over_towers
    """,
    "loop": "BestEvaluation WandB load_safetensors save_safetensors",
    "tools": "Hardware Link Plan PlanRow SideBySide measure_hardware plan",
    "contrib": "Compressed TowerStatistics",
    "sparse": """
    is_rows map_values num_rows reduce_rows reduce_stacked_rows reduce_stacked_tree
    reduce_tree_over_towers rows_of sparse_value_and_grad
    """,
}
"""The names that were public in a namespace before, as its history shows."""
FORMER_KEYWORDS = """
Mirrored.local OneDevice.state OneDevice.cross_tower_ops TensorBoard.flush_s
assert_replicates.rng bench.compare_with bench.json bench.out bench.path bench.peer
bench.quiet bench.trial_timeout_s build_step.check build_train_step.check
build_train_step.example_ids build_train_step.statistics build_train_step.sync
choose_cross_tower_ops.links initialize.cluster_spec initialize.collective_timeout_s
initialize.exit_on_exception initialize.task_id initialize.task_type launch.regrow_s
run.keep_every run.steps_per_call run.timing run.trial sweep.path sweep.retry_failed
sweep.timing sweep.trial_timeout_s
""".split()
"""Keywords of public functions that went, or have another name."""


def resolve(chain):
    return functools.reduce(getattr, chain.split("."), tj)


def note_of(owner, name):
    """The note in the error for a name that an object lacks."""
    with pytest.raises(AttributeError) as caught:
        getattr(owner, name)
    [note] = caught.value.__notes__
    return note


def check_that_names_exist(note):
    """Each name and page of towerjax that a note names is there."""
    for chain in re.findall(r"\btj((?:\.[A-Za-z_]\w*)+)", note):
        resolve(chain[1:])
    for path in re.findall(r"/main/(docs/\S+\.md)", note):
        assert (Path(ROOT) / path).exists(), path


@pytest.mark.parametrize("space", SPACES)
def test_a_namespace_shows_its_public_names_alone(space):
    names = dir(getattr(tj, space))
    assert names and not {"TYPE_CHECKING", "NoReturn"} & {*names}
    for name in names:
        value = resolve(f"{space}.{name}")
        is_space = isinstance(value, types.ModuleType)
        assert not is_space or name in ("estimator", "testing", "sparse")


@pytest.mark.parametrize(
    "space, name", [(x, name) for x in FORMER for name in FORMER[x].split()]
)
def test_a_former_name_says_what_to_write(space, name):
    note = note_of(getattr(tj, space) if space else tj, name)
    assert "tj." in note or "/docs/" in note
    check_that_names_exist(note)


def test_a_name_that_moved_is_given_in_full():
    assert note_of(tj, "TowerOptimizer") == "Write tj.estimator.TowerOptimizer."
    assert note_of(tj.tf1, "read_local") == "Write tj.towers.read_local."
    assert note_of(tj.estimator, "Mirrored") == "Write tj.Mirrored."
    assert note_of(tj, "Wieghted") == "Did you mean tj.Weighted?"


def test_a_private_name_has_no_note():
    with pytest.raises(AttributeError, match="no attribute '__path_of__'") as caught:
        tj.tf1.__path_of__  # noqa: B018
    assert not hasattr(caught.value, "__notes__")


def call_of(name):
    """The public function or class of this name."""
    if name == "initialize" or name == "launch":
        return getattr(tj.cluster, name)
    spaces = tj, tj.tools, tj.testing, tj.collectives, tj.loop
    return next(getattr(x, name) for x in spaces if name in dir(x))


@pytest.mark.parametrize("keyword", FORMER_KEYWORDS)
def test_a_former_keyword_says_what_to_write(keyword):
    owner, _, name = keyword.partition(".")
    fn = call_of(owner)
    assert name not in inspect.signature(fn).parameters
    required = [
        x.name
        for x in inspect.signature(fn).parameters.values()
        if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD
    ]
    with pytest.raises(TypeError, match=f"argument '{name}'") as caught:
        fn(*[None] * len(required), **{name: None})
    [note] = caught.value.__notes__
    check_that_names_exist(note)
    for written in re.findall(r"(\w+)=", re.sub(r"\(.*\)", "", note)):
        assert written in inspect.signature(fn).parameters, written


def names_of_tensorflow():
    """The names that the pages on TensorFlow's two systems tell of."""
    pages = json.loads((TESTS / "names_of_tensorflow.json").read_text())
    rows = [
        row for tables in pages.values() for table in tables.values() for row in table
    ]
    spans = [span for row in rows for span in re.findall(r"`(.+?)`", row)]
    names = [re.match(r"(?:\w+\.)*([A-Za-z_]\w*)(?=[(.:]|$)", span) for span in spans]
    return sorted({match[1] for match in names if match})


STRATEGY = tj.tf1.MirroredStrategy(("cpu:0",))
OWNERS = [tj, *[getattr(tj, x) for x in SPACES]]
OWNERS += [STRATEGY, tj.Tower, tj.tf1.MultiStepContext, tj.estimator.TowerOptimizer]
OWNERS += [tj.estimator.ReplicatedModel, tj.towers.InputContext, tj.towers.MirroredVar]
OWNERS += [tj.Reduction, tj.estimator.LossReduction, tj.estimator.Mode]


def test_each_name_of_tensorflow_is_here_or_says_what_to_write():
    fields = {x for owner in OWNERS for x in getattr(owner, "__annotations__", ())}
    fields |= {*tj.estimator.ModelSpec.__dataclass_fields__}
    names = names_of_tensorflow()
    assert len(names) > 200
    silent = []
    for name in names:
        if name in fields or any(name in dir(owner) for owner in OWNERS):
            continue
        notes = []
        for owner in (tj.tf1, STRATEGY):
            try:
                getattr(owner, name)
            except AttributeError as error:
                notes += getattr(error, "__notes__", [])
        if not notes:
            silent.append(name)
        for note in notes:
            check_that_names_exist(note)
    assert not silent
