"""Which bugs are seeded? The registry's B01 to B40, and more where wrong is silent."""

from .mutant import Mutant


def _m(id: str, bug: str, where: str, old: str, new: str, *tests: str) -> Mutant:
    killed_by = tuple(f"tests/{test}" for test in tests)
    return Mutant(id, bug, f"towerjax.{where}", old, new, killed_by)


_ONE_TOWER = "test_one_tower.py::test_towers_equal_one_tower"
_MICRO_BATCHES = "test_one_tower.py::test_micro_batches_are_sums_over_weights"
_ONE_GRADIENT = "test_compiled.py::test_the_optimizer_sees_one_whole_gradient"
_NOISE = "test_compiled.py::test_rng_depends_on_seed_step_tower_and_not_on_devices"
_OPS = "test_collectives.py::test_each_op_is_the_plain_sum"
_VERDICT = "test_bad_input.py::test_nan_on_one_tower_gives_one_verdict"
_REFUSED = "test_analysis.py::test_dependent_output_is_refused"
_HANGS = "test_analysis.py::test_collective_that_not_every_tower_reaches"
_GRID = "test_analysis.py::test_reductions_that_leave_a_side_of_a_grid_are_refused"
_TOWER_OPTIMIZER = (
    "test_tower_optimizer.py::test_towers_update_once_of_the_one_gradient"
)
_IN_TURN = "test_replicate_steps.py::test_towers_in_turn_meet_in_every_mode"
_AUDIT = "test_audit.py::test_what_is_wrong_is_found_and_named"
_EXACT = "test_one_tower.py::test_evaluation_and_prediction_are_exact_for_any_size"

# What a tower gives to the one reduction of a step.
_GIVEN = "added, folded, mirrored = split_metrics(metrics)"

REGISTRY = (
    _m(
        "B01",
        "mean of the towers' means instead of sum / total weight",
        "pipeline:Pipeline._towers",
        _GIVEN,
        "grads = jax.tree.map(lambda g: g * Weighted(1.0, total.weight).value, grads)\n"
        "        total = Weighted(total.value, jnp.sign(total.weight))\n"
        f"        {_GIVEN}",
        f"{_ONE_TOWER}[3-3-shard_map-weighted-ragged]",
    ),
    _m(
        "B02",
        "a sum where the mean was meant",
        "pipeline:Pipeline._update",
        "Weighted(1.0, total.weight).value",
        "jnp.ones_like(total.weight)",
        f"{_ONE_TOWER}[3-3-shard_map-weighted-divisible]",
    ),
    _m(
        "B03",
        "divided by the weight twice",
        "pipeline:Pipeline._update",
        "g * scale.astype(g.dtype)",
        "g * scale.astype(g.dtype) ** 2",
        f"{_ONE_TOWER}[3-3-shard_map-weighted-divisible]",
    ),
    _m(
        "B04",
        "a reduced gradient is reduced again",
        "pipeline:Pipeline.on_device",
        "total, grads, states, added, due = sums.tree()",
        "total, grads, states, added, due = sums.tree()\n"
        "        grads = lax.psum(grads, axes.names)",
        f"{_ONE_TOWER}[3-3-shard_map-sum-divisible]",
    ),
    _m(
        "B05",
        "one leaf is never reduced",
        "collectives.all_reduce:AllReduce.sum_over_towers",
        "buffers = lax.psum(buffers, DEVICE_AXIS)",
        "buffers = [*lax.psum(buffers[:-1], DEVICE_AXIS), buffers[-1]]",
        f"{_OPS}[3-3-AllReduce(pack_below_bytes=0)]",
    ),
    _m(
        "B06",
        "clipped before the reduce",
        "gradient:TowerLoss._gradient_of_part",
        "metrics = check_metrics(",
        "norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(grads)))\n"
        "    grads = jax.tree.map(lambda g: g / jnp.maximum(1, norm), grads)\n"
        "    metrics = check_metrics(",
        f"{_ONE_TOWER}[3-3-shard_map-weighted-divisible]",
    ),
    _m(
        "B07",
        "the norm counts every tower, so clipping bites too hard",
        "update:apply_update",
        "optimizer.update(grads, opt_state, params, value=loss)",
        "optimizer.update(\n"
        "        jax.tree.map(lambda g: g * 2, grads), opt_state, params, value=loss)\n"
        "    updates = jax.tree.map(lambda u: u / 2, updates)",
        f"{_ONE_GRADIENT}[clip]",
    ),
    _m(
        "B08",
        "the threshold of one gradient is used on the sum of the towers'",
        "estimator.optimizer:TowerOptimizer.__new__",
        "out, after = update_with_rows(\n"
        "            inner, grads, state.inner, params, lazy=lazy, **extra_args\n"
        "        )",
        "grads = map_values(lambda g: g * 2, grads)\n"
        "        out, after = update_with_rows(\n"
        "            inner, grads, state.inner, params, lazy=lazy, **extra_args\n"
        "        )\n"
        "        out = map_values(lambda u: u / 2, out)",
        f"{_TOWER_OPTIMIZER}[2-2-clip]",
    ),
    _m(
        "B09",
        "divided by the rows of all micro-batches, empty ones included",
        "gradient:TowerLoss.gradient",
        "return grads, loss, join_micro_batches(metrics), local",
        "loss = Weighted(loss.sum, jnp.full_like(loss.weight, size))\n"
        "    return grads, loss, join_micro_batches(metrics), local",
        f"{_MICRO_BATCHES}[21-2-2-vmap-weighted]",
    ),
    _m(
        "B10",
        "gradients of micro-batches averaged, not weighted",
        "gradient:TowerLoss.gradient",
        "return (jax.tree.map(jnp.add, total, grads), local), (*kept, seen)",
        "loss, *kept = kept\n"
        "        part_of_one = Weighted(1.0, loss.weight).value\n"
        "        grads = jax.tree.map(lambda g: g * part_of_one, grads)\n"
        "        loss = Weighted(loss.value, jnp.sign(loss.weight))\n"
        "        kept = [loss, *kept]\n"
        "        return (jax.tree.map(jnp.add, total, grads), local), (*kept, seen)",
        f"{_MICRO_BATCHES}[21-2-2-vmap-weighted]",
    ),
    _m(
        "B11",
        "reduced inside the accumulation loop: right, and A times the traffic",
        "gradient:TowerLoss.gradient",
        "return (jax.tree.map(jnp.add, total, grads), local), (*kept, seen)",
        "grads = lax.pmean(grads, inputs.axes.names)\n"
        "        return (jax.tree.map(jnp.add, total, grads), local), (*kept, seen)",
        "test_compiled.py::test_one_all_reduce_for_fifty_gradients[shard_map-4]",
    ),
    _m(
        "B12",
        "the smaller last batch is left out of an evaluation",
        "loop.evaluate:evaluate_all",
        "running.append(evaluate(state, placed))",
        "running.append(evaluate(state, placed)) if not placed.padded else None",
        "test_run.py::test_evaluation_is_exact_however_the_data_is_cut[16]",
    ),
    _m(
        "B13",
        "a row that pads counts",
        "shard:row_weights",
        "(here < num_valid)",
        "(here < num_valid + 1)",
        f"{_ONE_TOWER}[3-3-shard_map-weighted-ragged]",
    ),
    _m(
        "B14",
        "rows of weight 0 enter the statistics of batch norm",
        "batch_norm.normalize:_weights",
        "rows = tower.weight\n",
        "rows = tower.weight * 0 + 1\n",
        "test_batch_norm.py::test_training_is_that_of_the_whole_batch[linen-3-3-how3]",
    ),
    _m(
        "B15",
        "mean of the towers' variances instead of the variance of all rows",
        "batch_norm.normalize:_moments",
        "squares = weight * (x - _spread(mean, x, axes)) ** 2",
        "own = _ratio((weight * x).sum(over), count)\n"
        "    squares = weight * (x - _spread(own, x, axes)) ** 2",
        "test_batch_norm.py::test_training_is_that_of_the_whole_batch[linen-3-3-how3]",
    ),
    _m(
        "B16",
        "tower 0's statistics are read, though declared MEAN",
        "tower_local:_read",
        "if reduction is Reduction.ONLY_FIRST_TOWER:",
        "if reduction is not Reduction.SUM:",
        f"{_ONE_TOWER}[3-3-shard_map-weighted-divisible]",
    ),
    _m(
        "B17",
        "metrics are averaged over towers instead of merged",
        "pipeline:Pipeline._towers",
        _GIVEN,
        "metrics = {name: Weighted(x.value, jnp.float32(1))\n"
        "            if isinstance(x, Weighted) else x\n"
        "            for name, x in metrics.items()}\n"
        f"        {_GIVEN}",
        f"{_ONE_TOWER}[3-3-shard_map-weighted-ragged]",
    ),
    _m(
        "B18",
        "the mean of integers is an integer, so it is floored",
        "reduce:reduced_dtype",
        "reduction is Reduction.ONLY_FIRST_TOWER",
        "reduction is not Reduction.SUM",
        "test_merge.py::test_mean_and_first[int32-3-3]",
    ),
    _m(
        "B19",
        "the same key on every tower",
        "tower:Tower.rng",
        "jax.random.fold_in(jax.random.fold_in(key, self.step), self.id)",
        "jax.random.fold_in(key, self.step)",
        _NOISE,
    ),
    _m(
        "B20",
        "the same key at every step",
        "tower:Tower.rng",
        "jax.random.fold_in(jax.random.fold_in(key, self.step), self.id)",
        "jax.random.fold_in(key, self.id)",
        _NOISE,
    ),
    _m(
        "B21",
        "each device has other initial parameters",
        "state:init_state",
        "return place(state, placement, STATE_LAYOUT)",
        "state = place(state, placement, STATE_LAYOUT)\n"
        "    make = jax.make_array_from_single_device_arrays\n"
        "    params = jax.tree.map(lambda x: make(\n"
        "        x.shape, x.sharding, [jax.device_put(np.asarray(x) + i, device)\n"
        "        for i, device in enumerate(placement.jax_devices)]), state.params)\n"
        "    return TrainState(\n"
        "        state.step, params, state.opt_state, state.local, state.rng)",
        f"{_ONE_TOWER}[3-3-shard_map-weighted-divisible]",
    ),
    _m(
        "B22",
        "the schedule advances twice a step",
        "update:apply_update",
        "updates, next_state =",
        "_, opt_state = optimizer.update(grads, opt_state, params, value=loss)\n"
        "    updates, next_state =",
        f"{_ONE_GRADIENT}[adam]",
    ),
    _m(
        "B23",
        "every tower counts the step",
        "pipeline:Pipeline.on_device",
        'clock["step"] + 1',
        'clock["step"] + axes.num_towers',
        f"{_ONE_TOWER}[3-3-shard_map-weighted-divisible]",
    ),
    _m(
        "B24",
        "the verdict on NaN is tower 0's",
        "pipeline:Pipeline.on_device",
        "jnp.isfinite(loss) if finite is None",
        "jnp.isfinite(lax.all_gather(towers[0][0].sum, axes.names)[0])"
        " if finite is None",
        f"{_VERDICT}[1-2]",
    ),
    _m(
        "B25",
        "a tower with NaN is left out and the others' weight is kept",
        "pipeline:Pipeline._towers",
        _GIVEN,
        "good = jnp.isfinite(total.sum)\n"
        "        grads = jax.tree.map(lambda g: jnp.where(good, g, 0), grads)\n"
        "        total = Weighted(jnp.where(good, total.sum, 0), total.weight)\n"
        f"        {_GIVEN}",
        f"{_VERDICT}[1-2]",
    ),
    _m(
        "B26",
        "a tower skips its update alone",
        "pipeline:Pipeline.on_device",
        "jnp.isfinite(loss) if finite is None",
        "jnp.isfinite(towers[0][0].sum) if finite is None",
        f"{_VERDICT}[1-2]",
    ),
    _m(
        "B27",
        "features and labels are split in different order",
        "input.placer:Placer.place",
        "arrays = place_rows(batch, self.placement, Layout.PER_TOWER)",
        "leaves, treedef = jax.tree.flatten(batch)\n"
        "    leaves[-1] = np.roll(leaves[-1], 1, axis=0)\n"
        "    batch = treedef.unflatten(leaves)\n"
        "    arrays = place_rows(batch, self.placement, Layout.PER_TOWER)",
        f"{_ONE_TOWER}[3-3-shard_map-weighted-divisible]",
    ),
    _m(
        "B28",
        "a row is lost where two towers' parts meet",
        "shard:counts_of_towers",
        "np.clip(left, 0, rows)",
        "np.clip(left, 0, rows - 1)",
        f"{_ONE_TOWER}[3-3-shard_map-weighted-divisible]",
    ),
    _m(
        "B29",
        "the towers' predictions are joined in another order",
        "inference:InferenceStep.__call__",
        "result = on_every_process(result, self.strategy.placement)",
        "result = jax.tree.map(lambda x: jnp.concatenate(\n"
        "        jnp.split(x, self.strategy.num_towers)[::-1]), result)",
        f"{_EXACT}[24-4-4]",
    ),
    _m(
        "B30",
        "ONLY_FIRST_TOWER returns each tower's own value",
        "reduce:reduce_over_towers",
        "return _first_towers(x, tower_id, axes.names) if axes.names else x",
        "return x",
        "test_merge.py::test_mean_and_first[float32-3-3]",
    ),
    _m(
        "B31",
        "the last of an odd number of towers is left out",
        "reduce:add_pairwise",
        "rows = jnp.concatenate([sums, rows[paired:]]) if paired < len(rows) else sums",
        "rows = sums",
        f"{_OPS}[5-5-PinnedTree()]",
    ),
    _m(
        "B32",
        "packed leaves come back in another order",
        "collectives.packing:Packing.pack",
        "for x in group]",
        "for x in group[::-1]]",
        f"{_OPS}[3-3-AllReduce()]",
    ),
    _m(
        "B33",
        "leaves of several dtypes share one buffer",
        "collectives.packing:Packing.plan",
        "shared.setdefault(leaf.dtype,",
        'shared.setdefault(np.dtype("float32"),',
        f"{_OPS}[3-3-AllReduce()]",
    ),
    _m(
        "B34",
        "rows of one index overwrite each other",
        "sparse.duplicates:sum_duplicates",
        "summed.at[slots].add(",
        "summed.at[slots].set(",
        "test_sparse_update.py::test_rows_by_index",
    ),
    _m(
        "B35",
        "the optimizer's state is one step old",
        "pipeline:Pipeline._update",
        '"opt_state": opt_state',
        '"opt_state": carry["opt_state"]',
        f"{_ONE_GRADIENT}[adam]",
    ),
    _m(
        "B36",
        "prefetch repeats a batch",
        "input.feed:_Feeder._fill",
        "self._ready.put((self._place(element), None, False))",
        "self._ready.put((self._place(element), None, False))\n"
        "            self._ready.put((self._place(element), None, False))",
        "test_feed.py::test_order_is_kept[1]",
    ),
    _m(
        "B37",
        "a state that goes on has another key",
        "cross_tower.saving:_restored_leaf",
        "return cast_exactly(rows, dtype)",
        "if jnp.issubdtype(dtype, jax.dtypes.prng_key):\n"
        "        return jax.random.split(rows, 1)[0]\n"
        "    return cast_exactly(rows, dtype)",
        "test_variables.py::test_a_train_state_moves_to_another_number_of_towers",
    ),
    _m(
        "B38",
        "the packed reduce never packs (there is no compressed one)",
        "collectives.packed:Packed._plan",
        "self.max_group or math.inf",
        "self.max_group or 1",
        "test_cross_tower_ops.py::test_what_an_op_sends"
        "[Packed()-[('all-reduce', ['f32[103]'], [])]]",
    ),
    _m(
        "B39",
        "the plain all-reduce instead of the fixed tree",
        "collectives.pinned_tree:_add_in_tower_order",
        "share = -(-size // axes.num_devices)",
        "return lax.psum(rows.sum(axis=0), DEVICE_AXIS)",
        "test_pinned_tree.py::"
        "test_adam_steps_have_the_same_bits_on_one_device_and_on_8",
        "test_compiled.py::test_pinned_tree_moves_its_parts_once",
    ),
    _m(
        "B40",
        "a SUM over towers is restored to each tower undivided",
        "cross_tower.saving:_restored_leaf",
        "shares(like, new, strategy.num_towers) if local",
        "jnp.stack([new] * strategy.num_towers) if local",
        "test_variables.py::test_saved_on_four_towers_and_restored_on_others[4-2]",
    ),
)

PROOF = (
    _m(
        "P01",
        "proof: a reduction over some axes is one over all",
        "proof.collective:_reduced",
        "if not left:",
        "if not left or left:",
        "test_analysis.py::test_reduction_over_one_of_two_axes_is_refused[psum]",
    ),
    _m(
        "P02",
        "proof: a sum in groups of towers is one over all",
        "proof.collective:communicated",
        "if name in REDUCTIONS and (groups is None or over):",
        "if name in REDUCTIONS:",
        "test_analysis.py::test_sum_over_unequal_groups_of_equal_values_is_refused",
    ),
    _m(
        "P03",
        "proof: one side of a grid of towers is all of it",
        "proof.grid:without_coordinate",
        "return left | {over._replace(within=not over.within)}",
        "return left",
        f"{_GRID}[steps0-8]",
    ),
    _m(
        "P04",
        "proof: the predicate of a cond does not count",
        "proof.analysis:_cond",
        "zip(*outs, strict=True)], ins[0], context)",
        "zip(*outs, strict=True)], FIXED, context)",
        f"{_REFUSED}[cond_on_tower-batch['x']-cond_on_tower-1]",
    ),
    _m(
        "P05",
        "proof: the bound of a while does not count",
        "proof.analysis:_while",
        "return _chosen(eqn, outs, predicate, context)",
        "return _chosen(eqn, outs, FIXED, context)",
        f"{_REFUSED}[while_bound-batch['x']-None-1]",
    ),
    _m(
        "P06",
        "proof: a loop's body is walked once",
        "proof.analysis:_fixed_point",
        "if _grown(more) == _grown(marks):",
        "if _grown(more) == _grown(marks) or outs:",
        f"{_REFUSED}[scan_shifts_carry-batch['x']-scan_shifts_carry-1]",
    ),
    _m(
        "P07",
        "proof: tower.id is the same everywhere",
        "proof.analysis:_originate",
        "if axes else FIXED",
        "if axes and not context.towers else FIXED",
        f"{_REFUSED}[tower_id-tower.id-tower_id-1]",
    ),
    _m(
        "P08",
        "proof: only the first operand counts",
        "proof.analysis:_compute",
        "mark = merged(ins)",
        "mark = merged(ins[:1])",
        f"{_REFUSED}[custom_vjp_value-batch['x']-loss_of-1]",
        f"{_REFUSED}[forgotten_reduction-batch['x']-forgotten_reduction-1]",
    ),
    _m(
        "P09",
        "proof: what is written into a reference is forgotten",
        "proof.analysis:_opaque",
        "whole = _compute(eqn, outs, context)[0]",
        "whole = FIXED",
        f"{_REFUSED}[ref_holds_tower-batch['x']-None-1]",
        f"{_REFUSED}[ref_written_in_scan-batch['x']-None-1]",
    ),
    _m(
        "P10",
        "proof: a permutation that leaves towers out is a full one",
        "proof.equation:is_full",
        "== num_towers(eqn)",
        "<= num_towers(eqn)",
        f"{_REFUSED}[partial_permutation-ppermute-None-1]",
    ),
    _m(
        "P11",
        "proof: a collective under a tower's own cond may be",
        "proof.analysis:_cond",
        "predicate=ins[0]",
        "predicate=FIXED",
        f"{_HANGS}[sum_under_cond-psum-cond-1]",
    ),
    _m(
        "P12",
        "proof: a collective in a tower's own while may be",
        "proof.analysis:_while",
        "trips=None, predicate=predicate",
        "trips=None, predicate=FIXED",
        f"{_HANGS}[sum_under_while-psum-while-1]",
    ),
    _m(
        "P13",
        "proof: rows that pad may count",
        "program:_unmasked",
        "if rows and not count",
        "if rows and not rows",
        "test_bad_input.py::test_padding_that_nothing_masks_is_refused",
    ),
    _m(
        "P14",
        "proof: only the first leaf declared MIRRORED is looked at",
        "proof.mirrored:prove_mirrored",
        "if name is not None and d is not None",
        "if name == names[0] and d is not None",
        "test_analysis.py::test_one_bad_leaf_of_many_is_the_only_one_named",
    ),
    _m(
        "P15",
        "proof: a sum of what is already the same on all towers may be",
        "proof.collective:_summed",
        "scale = scale.times(Scale(low=1.0, high=1.0))",
        "scale = scale.times(Scale(high=1.0))",
        "test_proof_refused.py::test_a_sum_of_what_is_the_same_is_refused[sum_of_norm]",
    ),
)

MODELS = (
    _m(
        "M01",
        "TowerOptimizer applies its updates twice",
        "estimator.optimizer:TowerOptimizer.apply_gradients",
        "next_params = optax.apply_updates(params, updates)",
        "next_params = optax.apply_updates(params, updates)\n"
        "    next_params = optax.apply_updates(next_params, updates)",
        "test_replicate.py::test_a_size_of_each_kind_equals_numpy[divisible]",
    ),
    _m(
        "M02",
        "TowerOptimizer's state does not move",
        "estimator.optimizer:TowerOptimizer.__new__",
        "dataclasses.replace(state, inner=after)",
        "state",
        f"{_TOWER_OPTIMIZER}[2-2-momentum]",
    ),
    _m(
        "M03",
        "LossReduction.SUM is divided by the number of towers",
        "estimator.losses:TowersOfStep.one",
        "self.reduction is LossReduction.SUM and",
        "False and",
        "test_replicate.py::test_towers_equal_numpy"
        "[shard_map-8-4-clip each tower-SUM-None]",
    ),
    _m(
        "M04",
        "SUM_BY_NONZERO_WEIGHTS counts rows of weight 0",
        "estimator.losses:compute_weighted_loss",
        "rows = rows * (_spread(weights, losses) != 0)",
        "rows = rows * 1",
        "test_replicate.py::test_towers_equal_numpy"
        "[shard_map-8-4-clip each tower-SUM_BY_NONZERO_WEIGHTS-None]",
    ),
    _m(
        "M05",
        "SUM_OVER_BATCH_SIZE counts the rows that pad",
        "estimator.losses:compute_weighted_loss",
        "rows = _spread(valid, losses)",
        "rows = _spread(valid, losses) * 0 + 1",
        "test_replicate.py::test_a_size_of_each_kind_equals_numpy[padded]",
    ),
    _m(
        "M06",
        "towers in turn use a stand-in for what they meet about",
        "estimator.in_turn:_Rounds.of",
        "rounds[leaf] = number + 1",
        "rounds[leaf] = 0",
        f"{_IN_TURN}[4-1-Mode.TRAIN]",
    ),
    _m(
        "M07",
        "towers in turn are not added over devices",
        "estimator.in_turn:_outcomes",
        "sums = sum_over_towers(ops, [x.added for x in ready], axes).tree()",
        "sums = [x.added for x in ready]",
        f"{_IN_TURN}[2-2-Mode.TRAIN]",
    ),
    _m(
        "M08",
        "an exported model loses its tower-local values",
        "estimator.export:_as_one_tower",
        "value=read_local(x)",
        "value=jax.tree.map(jnp.zeros_like, read_local(x))",
        "test_export.py::test_a_state_is_exported_as_one_tower_reads_it",
    ),
    _m(
        "M09",
        "an exported model loses one of its outputs",
        "estimator.export:_outputs",
        "dict(outputs) if",
        "dict(list(outputs.items())[:1]) if",
        "test_export.py::test_what_is_exported_is_loaded",
    ),
    _m(
        "M10",
        "data is gone through once too often",
        "estimator.data:Passes.__iter__",
        "left - 1",
        "left",
        "test_train_and_evaluate.py::test_how_long[list-4-3-4]",
        "test_train_and_evaluate.py::test_how_long[list-2-None-2]",
    ),
    _m(
        "M11",
        "labels are taken for features in a prediction",
        "estimator.data:as_batch",
        "if labels is None or not with_labels:",
        "if labels is None:",
        "test_train_and_evaluate.py::test_without_labels_there_are_none",
        "test_train_and_evaluate.py::"
        "test_predictions_are_in_order_and_without_padding[pairs-2-2]",
    ),
    _m(
        "M12",
        "predictions come out of order",
        "estimator.predict:_outputs",
        "if len(running) == in_flight:\n"
        "                yield jax.device_get(running.popleft())",
        "if len(running) == in_flight:\n"
        "                yield jax.device_get(running.pop())",
        "test_train_and_evaluate.py::"
        "test_predictions_are_in_order_and_without_padding[pairs-2-2]",
    ),
    _m(
        "M13",
        "an error of the data ends predictions in silence",
        "estimator.predict:_outputs",
        "raise failure",
        "return",
        "test_train_and_evaluate.py::test_predictions_before_an_error_come_first[2]",
    ),
    _m(
        "M14",
        "on_nonfinite does not reach the step",
        "estimator.train:train_and_evaluate",
        'if on_nonfinite != "raise" else {}',
        "if not on_nonfinite else {}",
        "test_train_and_evaluate.py::"
        "test_a_loss_that_is_not_finite_is_skipped_where_that_is_said",
    ),
    _m(
        "M15",
        "the model's hooks are not called",
        "estimator.train:train_and_evaluate",
        "hooks=(model_hooks, *hooks)",
        "hooks=tuple(hooks)",
        "test_train_and_evaluate.py::test_options_reach_the_loop",
    ),
    _m(
        "M16",
        "towers train from the aggregate of their local values",
        "estimator.pipeline:ModelPass._local",
        "if self.mode is Mode.TRAIN or not nodes:",
        "if not nodes:",
        "test_replicate.py::test_a_size_of_each_kind_equals_numpy[divisible]",
    ),
)

STATE = (
    _m(
        "S01",
        "a refused step changes what is no function of the gradient",
        "update:accept_or_keep",
        "return lax.select(accepted, jnp.asarray(walk.read(var), old.dtype), old)",
        "return jnp.asarray(walk.read(var), old.dtype)",
        "test_compiled.py::test_a_refused_step_leaves_each_leaf_as_it_was",
    ),
    _m(
        "S02",
        "a refused step changes the parameters",
        "update:accept_or_keep",
        "walk.values[var] = lax.select(accepted, walk.values[var], olds[var])",
        "pass",
        f"{_VERDICT}[1-2]",
    ),
    _m(
        "S03",
        "a batch without examples changes the parameters",
        "pipeline:Pipeline.on_device",
        "accepted = accepted & (total.weight != 0)",
        "accepted = accepted & (total.weight == total.weight)",
        "test_bad_input.py::test_no_examples_change_nothing_whatever_the_losses_are",
    ),
    _m(
        "S04",
        "guard='gradients' looks at the loss alone",
        "collectives.packing:Packing.leading",
        "for slot in self.slots[:num_leaves]:",
        "for slot in self.slots[:2]:",
        "test_bad_input.py::test_a_gradient_that_is_not_finite_is_refused_when_guarded",
    ),
    _m(
        "S05",
        "early stopping takes more for better",
        "loop.stopping:_sign",
        'option.mode == "min"',
        'option.mode != "min"',
        "test_stopping.py::test_patience_of_any_values_is_as_counted_by_hand",
    ),
    _m(
        "S06",
        "early stopping does not start anew after an improvement",
        "loop.stopping:Watch._count",
        "self._lowest, self._without = (cost, number), 0",
        "self._lowest = (cost, number)",
        "test_stopping.py::test_patience_of_any_values_is_as_counted_by_hand",
    ),
    _m(
        "S07",
        "the restored best state shares memory with the kept one",
        "loop.stopping:_restored",
        "on_devices if is_host else _copied_on_devices(on_devices)",
        "on_devices",
        "test_stopping.py::test_a_run_goes_on_from_the_restored_best[devices]",
    ),
    _m(
        "S08",
        "the last state is kept as the best",
        "loop.stopping:Watch._keep",
        "if not _sign(option) * value < best:",
        "if value != value:",
        "test_stopping.py::test_the_best_state_is_that_of_its_step_bit_for_bit"
        "[shard_map-devices]",
    ),
    _m(
        "S09",
        "a run that goes on counts from 0",
        "loop.running:Loop.__init__",
        "HistoryLog(int(state.step))",
        "HistoryLog(0)",
        "test_run.py::test_step_numbers_go_on_where_the_state_stopped",
    ),
    _m(
        "S11",
        "two devices' copies of a leaf are not compared",
        "checking:Copies.differing",
        "prints: Any = self.prints",
        "prints: Any = self.prints[:, :1]",
        "test_desync.py::test_one_bit_on_one_device_is_named[shard_map]",
    ),
    _m(
        "S12",
        "a padded row counts as an example that was seen",
        "example_cells:count_rows",
        "is_example = (weight > 0) & (",
        "is_example = (weight >= 0) & (",
        "test_example_count.py::test_each_example_counts_once[4 towers on 2]",
    ),
    _m(
        "S10",
        "init shares the caller's arrays, which donation deletes",
        "placement:place",
        "copied = jax.tree.map(_own_copy, tree)",
        "copied = tree",
        "test_compiled.py::test_init_copies_so_donation_spares_the_callers_arrays",
    ),
)

INPUT = (
    _m(
        "I01",
        "a step's counts are those of the first batch",
        "input.placer:Placer._placed_counts",
        "key = counts.tobytes()",
        'key = b""',
        f"{_ONE_TOWER}[3-3-shard_map-weighted-ragged]",
    ),
    _m(
        "I02",
        "the last call of several steps repeats its last batch",
        "input.placer:Placer._several",
        "self._number(len(counts))",
        "self._number(steps)",
        "test_run.py::test_any_steps_per_call_equals_gradient_descent[0-4]",
    ),
    _m(
        "I03",
        "a tower's sparse rows all lie on its first example",
        "input.sparse_rows:_dealt",
        "indices[own] - t * size",
        "indices[own] * 0",
        "test_sparse.py::test_rows_of_a_batch_go_to_the_towers_of_their_examples",
    ),
    _m(
        "I04",
        "a tower gets the sparse rows of others",
        "input.sparse_rows:_dealt",
        "values[own]",
        "values[:count]",
        "test_sparse.py::test_rows_of_a_batch_go_to_the_towers_of_their_examples",
    ),
    _m(
        "I05",
        "two processes get the same part of the data",
        "input.distribute:DistributedDataset.__init__",
        "here = jax.process_index() if processes > 1 else 0",
        "here = 0",
        "test_distribute.py::test_each_process_is_told_which_part_is_its_own",
    ),
    _m(
        "I06",
        "the towers' elements change places",
        "input.distribute:_Elements.build",
        "padded = [pad_rows(element, rows) for element, _ in taken]",
        "padded = [pad_rows(element, rows) for element, _ in taken][::-1]",
        "test_distribute.py::test_each_tower_takes_an_element[3-1]",
    ),
    _m(
        "I07",
        "an epoch is shuffled as the one before",
        "input.cut:Batches._order",
        "default_rng((seed, epoch))",
        "default_rng((seed, 0))",
        "test_feed.py::"
        "test_a_seed_shuffles_each_epoch_anew_and_each_example_comes_once",
    ),
    _m(
        "I08",
        "a loader's buffer is not copied before it is written again",
        "input.feed:in_groups",
        "jax.tree.map(own_copy, batch)",
        "jax.tree.map(np.asarray, batch)",
        "test_feed.py::test_groups_own_their_rows_when_the_loader_reuses_its_buffer",
    ),
)

OTHER = (
    _m(
        "O01",
        "the last of an odd number of devices is left out",
        "collectives.one_device:_added_at",
        "senders = range(reach, num_devices, 2 * reach)",
        "senders = range(reach, num_devices - 1, 2 * reach)",
        "test_cross_tower_ops.py::test_no_tower_of_an_odd_number_is_left_out[5]",
        "test_cross_tower_ops.py::test_every_op_is_the_sum_in_float64[8-8-shard_map]",
    ),
    _m(
        "O02",
        "a hierarchical sum stays inside its groups",
        "collectives.hierarchical:_sum_in_two",
        "if groups is not None:",
        "if groups is not None and not size:",
        "test_cross_tower_ops.py::test_every_op_is_the_sum_in_float64[8-8-shard_map]",
    ),
    _m(
        "O03",
        "the last pack loses the remainder",
        "collectives.packed:pack_sizes",
        "[total - size * (num_packs - 1)]",
        "[size]",
        "test_cross_tower_ops.py::test_the_last_pack_has_the_remainder[10-3-sizes0]",
    ),
    _m(
        "O04",
        "IndexedRows of towers are averaged where they were to be added",
        "sparse.over_towers:_divided",
        "if reduction is Reduction.MEAN:",
        "if reduction is not None:",
        "test_sparse.py::test_inside_a_tower_rows_join_too[3-3-shard_map-Reduction.SUM]",
    ),
    _m(
        "O05",
        "batches of an evaluation are averaged",
        "loop.evaluate:_add_metrics",
        "metric = add_batch(totals.get(name), on_host(metric))",
        "metric = on_host(metric)",
        "test_run.py::test_evaluation_is_exact_however_the_data_is_cut[16]",
    ),
    _m(
        "O06",
        "a tower's micro-batches have one key",
        "tower:Tower.rng",
        "return jax.random.fold_in(key, self._micro_batch)",
        "return key",
        "test_compiled.py::test_micro_batches_draw_their_own_noise",
    ),
)

TESTING = (
    _m(
        "T01",
        "assert_replicates is blind to a leaf",
        "testing.replicates:_audit",
        "compared = tuple(sorted(one.leaves.keys() - random))",
        "compared = tuple(sorted(one.leaves.keys() - random))[-1:]",
        "test_audit.py::test_the_numbers_of_a_finding_are_those_of_numpy",
    ),
    _m(
        "T02",
        "assert_replicates does not see plain metrics that differ",
        "testing.replicates:_is_bad",
        "or any(name in x.unequal for _, x in runs)",
        "or False",
        "test_audit.py::test_a_value_that_is_right_on_the_first_tower_alone_is_found",
    ),
    _m(
        "T03",
        "assert_replicates splits without padding",
        "testing.dealing:splits_of",
        "rows = -(-examples // num_towers) + 1",
        "rows = -(-examples // num_towers)",
        "test_audit.py::"
        "test_padding_that_counts_is_found_where_the_towers_divide_the_batch",
    ),
    _m(
        "T04",
        "assert_replicates takes a clipped gradient for a mean of means",
        "testing.causes:Experiments._clipped",
        'if not leaf.startswith("gradient")',
        'if leaf.startswith("gradient")',
        f"{_AUDIT}[clipped]",
    ),
    _m(
        "T05",
        "assert_same leaves the last leaf out",
        "testing.compare:assert_same",
        "for name in left:\n",
        "for name in list(left)[:-1]:\n",
        "test_testing.py::test_differences_are_told_leaf_by_leaf",
    ),
    _m(
        "T06",
        "assert_same does not see NaN",
        "testing.compare:_wrong",
        "~same & (~finite |",
        "~same & finite & (~finite |",
        "test_testing.py::test_trees_that_are_not_alike_are_told",
    ),
    _m(
        "T07",
        "the oracle of one tower has all towers",
        "testing.oracle:_one_device",
        "return OneDevice(strategy.placement.devices[0])",
        "return strategy",
        "test_testing.py::test_the_oracle_shows_what_is_wrong",
    ),
    _m(
        "T08",
        "the audit reads a MEAN on the first tower alone",
        "testing.audited:Audited._read",
        "rows.mean(axis=0)",
        "rows[0]",
        f"{_AUDIT}[moving mean]",
        f"{_AUDIT}[count as mean]",
    ),
    _m(
        "T09",
        "the command's exit status does not tell of a finding",
        "testing.command:_audit",
        "return NOT_SO",
        "return OK",
        "test_audit.py::test_the_command_says_what_is_wrong",
    ),
)

_RESUMED = "test_checkpoint.py::test_a_stopped_run_goes_on_to_the_bit_on_other_devices"

CHECKPOINTS = (
    _m(
        "C01",
        "a checkpoint that was not finished counts",
        "checkpoint.folder:saved_steps",
        "_WHOLE.fullmatch(path.name)",
        "_WHOLE.match(path.name)",
        "test_checkpoint.py::test_what_a_killed_process_left_does_not_count",
    ),
    _m(
        "C02",
        "a file that was changed is loaded",
        "checkpoint.manifest:check_manifest",
        "_sum_of(folder / name)[1] != digest",
        "_sum_of(folder / name)[0] != size",
        "test_checkpoint.py::test_every_file_that_is_damaged_is_named",
    ),
    _m(
        "C03",
        "a resumed run begins its data anew",
        "loop.saving:Saving._move",
        'if self._options.batches == "anew":',
        'if self._options.batches != "count":',
        f"{_RESUMED}[3]",
    ),
    _m(
        "C04",
        "random keys are not restored",
        "checkpoint.leaves:_like",
        "return jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))",
        "return x",
        f"{_RESUMED}[3]",
    ),
    _m(
        "C05",
        "each of other towers gets the whole SUM",
        "cross_tower.saving:_restored_leaf",
        "shares(like, new, strategy.num_towers)",
        "jnp.broadcast_to(new, (strategy.num_towers, *new.shape))",
        "test_checkpoint.py::test_other_towers_deal_out_what_was_there",
    ),
    _m(
        "C06",
        "a resumed run does all of its steps again",
        "checkpoint.saver:left_of",
        "left = start + steps - record.step",
        "left = steps",
        f"{_RESUMED}[3]",
    ),
    _m(
        "C07",
        "how far a batch was padded is forgotten",
        "loop.saving:Saving.resume",
        "self._step.expect_batch_rows(record.batch_rows)",
        "self._step.expect_batch_rows(())",
        "test_checkpoint.py::"
        "test_one_that_goes_on_at_the_ragged_batch_needs_one_program",
    ),
    _m(
        "C08",
        "the best checkpoint is removed with the old ones",
        "checkpoint.saver:Saver._remove_old",
        "if number != best:",
        "if number != steps[-1]:",
        "test_checkpoint.py::test_the_newest_and_the_best_stay[min-values0-kept0]",
    ),
    _m(
        "C09",
        "early stopping counts from 0 in a resumed run",
        "loop.saving:Saving.save",
        "stopping=stopping",
        "stopping={}",
        "test_checkpoint.py::test_early_stopping_counts_on",
    ),
    _m(
        "C10",
        "another model's checkpoint is restored as far as names agree",
        "checkpoint.leaves:check_same_model",
        "old[name].whole != leaf.whole",
        "old[name].reduction != leaf.reduction",
        "test_checkpoint.py::test_another_model_is_refused_before_training",
    ),
    _m(
        "C11",
        "a distributed data set goes on with smaller batches",
        "input.passes:ResumablePass.set_state",
        'self._begin(state["rows"])',
        "self._begin(0)",
        "test_distribute.py::test_a_pass_says_where_it_is_and_goes_on_there[batch]",
    ),
    _m(
        "C12",
        "the arrays of a safetensors file change places",
        "checkpoint.safetensors:_write",
        "for name in order:\n        file.write",
        "for name in sorted(order):\n        file.write",
        "test_safetensors.py::test_the_library_of_the_format_reads_it",
    ),
)

FIGURES = (
    _m(
        "F01",
        "a report counts donated buffers twice",
        "report.memory:Memory.total",
        "- self.aliased ",
        "",
        "test_report.py::test_memory_counts_what_is_taken_over_once",
    ),
    _m(
        "F02",
        "a ring sends one part too many",
        "report.link_model:_ring",
        "(members - 1) * (link",
        "members * (link",
        "test_plan.py::test_rings_by_hand",
    ),
    _m(
        "F03",
        "a benchmark times calls that are not done",
        "bench.protocol:_timed",
        "jax.block_until_ready(out)",
        "pass",
        "test_bench.py::test_a_call_is_awaited",
    ),
    _m(
        "F04",
        "the ends of a ratio's interval are those of equal luck",
        "bench.protocol:Interval.over",
        "self.low / other.high, self.high / other.low",
        "self.low / other.low, self.high / other.high",
        "test_project.py::test_examples_in_docstrings_run[towerjax.bench.protocol]",
    ),
)

MUTANTS = REGISTRY + PROOF + MODELS + STATE + INPUT + OTHER + TESTING
MUTANTS += CHECKPOINTS + FIGURES
