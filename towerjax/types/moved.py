"""Old names and keywords, and those of TensorFlow 1: what to write instead."""

from towerjax.types.version import page

_TF1 = f"What to write for each name of TensorFlow: {page('mirrored_strategy')}"
_ESTIMATOR = f"What to write for each name of TensorFlow: {page('replicate_model_fn')}"
_EACH_EXAMPLE = (
    f"To count examples see {page('how_to/uneven_data', 'Count each example once')}"
)
_ABSENT = f"For devices that are not here see {page('reports')}"
_SAFETENSORS = "Write tj.tools.{0}(path, ...), with a path that ends in .safetensors."
_ROWS = "For the gradient of some rows of a table write tj.sparse.take(table, ids)."

RENAMED = {
    "BestEvaluation": "Write checkpointer=tj.Checkpointer(folder, best='loss').",
    "Check": "Write audit=True in tj.build_train_step, or step.check(state, batch).",
    "ChecksDevices": "An op of your own implements tj.collectives.CrossTowerOps.",
    "Compressed": "It is an example now:"
    f" {page('cross_tower_ops', 'Compress what is sent')}",
    "ExampleCount": _EACH_EXAMPLE,
    "ExampleReport": _EACH_EXAMPLE,
    "ExamplesError": _EACH_EXAMPLE,
    "Exported": f"See {page('how_to/serving')}",
    "Hardware": _ABSENT,
    "KeepsState": "An op of your own implements tj.collectives.CrossTowerOps.",
    "Link": _ABSENT,
    "Plan": _ABSENT,
    "PlanRow": _ABSENT,
    "Shared": "Write tj.Whole(value) for a leaf of a batch that is not split.",
    "SideBySide": "tj.tools.bench(build, grid) returns tj.tools.Timings.",
    "Sums": "An op of your own implements tj.collectives.CrossTowerOps.",
    "TowerStatistics": f"It is an example now: {page('how_to/batch_size')}",
    "WandB": f"Write tj.loop.Curves(function): {page('how_to/wandb_and_mlflow')}",
    "batch_norm": "Write from towerjax.layers.batch_norm import linen, or import nnx.",
    "check_examples": _EACH_EXAMPLE,
    "evaluate_all": "Write tj.evaluate(step, state, batches) for each evaluation.",
    "export_model": f"See {page('how_to/serving')}",
    "load_exported": f"See {page('how_to/serving')}",
    "load_safetensors": _SAFETENSORS.format("load_parameters"),
    "measure_hardware": _ABSENT,
    "ops_of": "Pass the op itself: tj.Mirrored(cross_tower_ops=tj.AllReduce()).",
    "plan": _ABSENT,
    "reduce_rows": "Write tower.reduce(tj.Reduction.SUM, rows).",
    "reduce_stacked_rows": "Write strategy.reduce(tj.Reduction.SUM, values).",
    "reduce_stacked_tree": "Write strategy.reduce(tj.Reduction.SUM, values).",
    "reduce_tree_over_towers": "Write tower.reduce(tj.Reduction.SUM, tree).",
    "rows_of": _ROWS,
    "is_rows": "Write isinstance(x, tj.sparse.IndexedRows).",
    "map_values": "Write tj.sparse.IndexedRows(fn(rows.values), rows.indices,"
    " rows.dense_shape).",
    "num_rows": "Write rows.dense_shape[0] of a tj.sparse.IndexedRows.",
    "save_safetensors": _SAFETENSORS.format("save_parameters"),
    "shared": "Write tj.Whole(value) in a batch, or tj.penalty(value) in a loss.",
    "sparse_value_and_grad": _ROWS,
    "sum_rows_over_towers": "Write tower.reduce(tj.Reduction.SUM, rows).",
    "sync": "Write tj.build_train_step(..., extend=tj.contrib.LocalSGD(sync_every=8)).",
}
"""What to write, by names that were public before and are in no namespace now."""

KEYWORDS = {
    "Mirrored.local": "It is called tower_loop: tj.Mirrored(tower_loop='scan').",
    "OneDevice.state": "One device has no shards. Write tj.Mirrored(state='sharded').",
    "OneDevice.cross_tower_ops": "One device adds nothing. Write tj.Mirrored(...).",
    "TensorBoard.flush_s": "It writes to the file every 10 s. Leave flush_s out.",
    "assert_replicates.rng": "Draws are the audit's own. Leave rng out.",
    "bench.compare_with": "Write peers={'jit': build_by_hand}.",
    "bench.json": "Write results='timings.jsonl'.",
    "bench.out": "Write results='timings.jsonl'.",
    "bench.path": "Write results='timings.jsonl'.",
    "bench.peer": "Write peers={'jit': build_by_hand}.",
    "bench.quiet": "Write progress=False.",
    "bench.trial_timeout_s": "Write timeout_s=1800.",
    "build_step.check": "It is called audit: audit=True or False.",
    "build_train_step.check": "It is called audit: audit=True or False.",
    "build_train_step.example_ids": _EACH_EXAMPLE,
    "build_train_step.statistics": f"It is an example: {page('how_to/batch_size')}",
    "build_train_step.sync": "Write extend=tj.contrib.LocalSGD(sync_every=8).",
    "choose_cross_tower_ops.links": "The links are not measured. Leave links out.",
    "initialize.cluster_spec": "Write coordinator=, num_processes= and process_id=.",
    "initialize.collective_timeout_s": "A dead process ends the job. Leave it out.",
    "initialize.exit_on_exception": "An exception ends the job. Leave it out.",
    "initialize.task_id": "Write coordinator=, num_processes= and process_id=.",
    "initialize.task_type": "Write coordinator=, num_processes= and process_id=.",
    "launch.regrow_s": "A job is not regrown. Write restarts= and towers=.",
    "run.keep_every": "Write checkpointer=tj.Checkpointer(folder, every=100, keep=3).",
    "run.steps_per_call": "For several steps in one program write"
    " jax.lax.scan(step.fn, state, batches) with stacked batches.",
    "run.timing": "history.summary has the times. Leave timing out.",
    "run.trial": "Write hooks=[hook], each called as hook(number, metrics).",
    "sweep.path": "Write results='trials.jsonl'.",
    "sweep.retry_failed": "tj.tools.bench has it; a sweep trains all members.",
    "sweep.timing": "To time steps write tj.tools.bench(build, grid).",
    "sweep.trial_timeout_s": "To time steps write tj.tools.bench(..., timeout_s=1800).",
}
"""What to write, by ``function.keyword``, for keywords that are not there any more."""

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

OF_TENSORFLOW = dict.fromkeys(_NAMES_OF_STRATEGIES.split(), _TF1)
OF_TENSORFLOW |= dict.fromkeys(_NAMES_OF_ESTIMATORS.split(), _ESTIMATOR)
"""What to write, by the names that TensorFlow 1 exported and towerjax has not."""
