"""Public namespaces: the names they show, and where a name that they lack is now."""

import difflib
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from towerjax.types.notes import advice_on_name
from towerjax.types.version import page

_SPACES = """
cluster collectives contrib estimator layers loop metrics sparse testing tf1 tools
towers
""".split()
_MODULES = {"layers": ["sparse"], "tf1": ["estimator"], "tools": ["testing"]}
_NAMES_OF_STRATEGIES = """
AllReduceCrossTowerOps AutoShardPolicy CentralStorageStrategy CollectiveAllReduce
CollectiveAllReduceStrategy CommunicationOptions CoreMirroredStrategy CrossDeviceOps
DistributeConfig DistributedValues HierarchicalCopyAllReduce IndexedSlices
InputReplicationMode KubernetesClusterResolver MapOutput MirroredVariable Monitor
MultiWorkerAllReduce MultiWorkerMirroredStrategy NcclAllReduce
ONLY_FIRST_REPLICA ParameterServerStrategy PerDevice PerReplica ReduceOp
ReductionToOneDevice ReductionToOneDeviceCrossTowerOps ReplicaLocalVariable
SlurmClusterResolver StandardInputStep StandardSingleLossStep Step
TFConfigClusterResolver TPUStrategy TowerContext TowerLocalVariable UpdateContext
VariableAggregation VariableSynchronization choose_the_best
experimental_set_strategy get_cross_tower_context get_distribution_strategy
get_loss_reduction get_replica_context get_strategy get_tower_context
get_update_device has_distribution_strategy has_strategy in_cross_replica_context
regroup require_tower_context run_standard_tensorflow_server select_device
tower_local_var_scope
"""
_NAMES_OF_ESTIMATORS = """
BestExporter DNNEstimator Estimator EstimatorSpec EvalSpec FinalExporter
InMemoryEvaluatorHook LatestExporter ModeKeys RNNClassifier RunConfig
Scaffold ServingInputReceiver StepsExporter SyncReplicasOptimizer TrainSpec
VariableDistributionMode add_metrics clip_gradients_by_norm export_savedmodel
forward_features make_early_stopping_hook read_eval_metrics stop_if_higher_hook
stop_if_lower_hook stop_if_no_decrease_hook stop_if_no_increase_hook
"""

_OF_TENSORFLOW = "What to write for each name of TensorFlow: "


def furnish(space: ModuleType) -> ModuleType:
    """Give a public module a ``__dir__``, and errors for missing names with advice.

    Public modules inside it get both, too.
    """
    name = space.__name__
    modules = _MODULES.get(name.rpartition(".")[2], [])
    for module in modules:
        if isinstance(inner := vars(space).get(module), ModuleType):
            furnish(inner)

    def names() -> list[str]:
        return sorted(
            {x for x, y in vars(space).items() if _is_public(x, y)} | {*modules}
        )

    setattr(space, "__dir__", names)  # noqa: B010
    setattr(space, "__getattr__", later_in_module(name))  # noqa: B010
    return space


class Package(ModuleType):
    """A package's module, which calls `furnish` for each namespace that is imported.

    Python sets a submodule as an attribute of its package, whoever imports it, so
    ``__setattr__`` sees each of them.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_space = name in _SPACES and isinstance(value, ModuleType)
        super().__setattr__(name, furnish(value) if is_space else value)


def later_in_module(module: str, **places: str) -> Callable[[str], Any]:
    """Make a module's ``__getattr__`` that imports names when first read.

    Args:
      module: The module's ``__name__``.
      **places: For each name its place, ``module`` or ``module:name``.
    """

    def get(name: str) -> Any:
        if name in places:
            return pkgutil.resolve_name(places[name])
        error = AttributeError(f"module {module!r} has no attribute {name!r}")
        error.name = name
        if name[0] != "_" and (note := _note_on(name)):
            error.add_note(note)
        raise error

    return get


def _is_public(name: str, value: Any) -> bool:
    """Return whether a module's value is one of its public names."""
    if name[0] == "_" or isinstance(value, ModuleType):
        return False
    return str(getattr(value, "__module__", "")).startswith("towerjax")


def _note_on(name: str) -> str:
    """Advise on a name that a namespace lacks: what to write in its place."""
    if known := advice_on_name(name):
        return known
    if place := next(_places_of(name), None):
        return f"Write {place}."
    if name in _NAMES_OF_STRATEGIES.split():
        return _OF_TENSORFLOW + page("reference/mirrored_strategy")
    if name in _NAMES_OF_ESTIMATORS.split():
        return _OF_TENSORFLOW + page("reference/replicate_model_fn")
    near = difflib.get_close_matches(name, dir(sys.modules["towerjax"]), n=1)
    return f"Did you mean tj.{near[0]}?" if near else ""


def _places_of(name: str) -> Iterator[str]:
    """Yield the public names, such as ``tj.tools.bench``, that end in ``name``."""
    root = sys.modules["towerjax"]
    if name in dir(root):
        yield f"tj.{name}"
    for space in _SPACES:
        if name in dir(getattr(root, space)):
            yield f"tj.{space}.{name}"
