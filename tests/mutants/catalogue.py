"""The seeded bugs: the registry's B01 to B40, and more where wrong is silent."""

from .mutant import Mutant


def _m(id: str, bug: str, where: str, old: str, new: str, *tests: str) -> Mutant:
    killed_by = tuple(f"tests/{test}" for test in tests)
    return Mutant(id, bug, f"towerjax.{where}", old, new, killed_by)


_MAPPED = (
    "test_build_step.py::"
    "test_a_function_mapped_over_a_gradient_and_its_weight_is_refused"
)
_ONE_TOWER = "test_one_tower.py::test_towers_equal_one_tower"
_MICRO_BATCHES = "test_one_tower.py::test_micro_batches_are_sums_over_weights"
_ONE_AXIS = "test_one_axis.py::test_a_step_is_the_same_wherever_towers_lie"
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
_HABITS = "test_audit.py::test_a_habitual_wrong_loss_is_refused_before_anything_changes"
_AUDITED = "test_audit.py::test_a_right_loss_that_looks_like_a_wrong_one_passes"
_AUDIT = "test_audit.py::test_what_depends_on_the_split_is_found"
_PROCESSES_LOOK = (
    "test_bad_input.py"
    "::test_verdicts_are_not_waited_for_and_processes_look_at_the_same_calls"
)
_SHARED_SUM = "test_call.py::test_a_sum_of_what_all_towers_share_is_refused"
_EXACT = "test_one_tower.py::test_evaluation_and_prediction_are_exact_for_any_size"

_CODES = "test_compressed.py::test_sums_are_those_of_the_same_codes_in_float64"

# What a tower gives to the one reduction of a step: gradient and loss come first.
_GIVEN = 'sums = (pools["added"], pools["shown"])'

REGISTRY = (
    _m(
        "B01",
        "mean of the towers' means instead of sum / total weight",
        "step.one_pass:Pass._run_towers",
        _GIVEN,
        'pools["added"] = [type(x)(x.value, jnp.sign(x.weight))\n'
        '            for x in pools["added"]]\n'
        f"        {_GIVEN}",
        f"{_ONE_TOWER}[shard_map-3-3-weighted]",
    ),
    _m(
        "B02",
        "a sum where the mean was meant",
        "step.train:_mean_gradient",
        "dataclasses.replace(grads, sum=[grads.sum]).value[0]",
        "grads.sum",
        f"{_ONE_TOWER}[shard_map-3-3-weighted]",
    ),
    _m(
        "B03",
        "divided by the weight twice",
        "step.train:_mean_gradient",
        "return dataclasses.replace(grads, sum=[grads.sum]).value[0]",
        "once = dataclasses.replace(grads, sum=[grads.sum])\n"
        "    return dataclasses.replace(grads, sum=once.value).value[0]",
        f"{_ONE_TOWER}[shard_map-3-3-weighted]",
    ),
    _m(
        "B04",
        "a reduced gradient is reduced again",
        "step.one_pass:Pass.on_device",
        "added, shown = sums.tree()",
        "added, shown, due = sums.tree()\n        added = lax.psum(added, axes.names)",
        f"{_ONE_TOWER}[shard_map-8-4-sum]",
    ),
    _m(
        "B05",
        "one leaf is never reduced",
        "collectives.ops:_all_reduce",
        "return lax.psum(buffers, DEVICE_AXIS)",
        "return [*lax.psum(buffers[:-1], DEVICE_AXIS), buffers[-1]]",
        f"{_OPS}[3-3]",
    ),
    _m(
        "B06",
        "clipped before the reduce",
        "step.gradient:value_and_grad",
        "        if weight is None:\n            return given, Sum(grads)",
        "        norm = sum((g**2).sum() for g in jax.tree.leaves(grads)) ** 0.5\n"
        "        grads = jax.tree.map(lambda g: g * (1 + norm) ** -1, grads)\n"
        "        if weight is None:\n            return given, Sum(grads)",
        f"{_ONE_TOWER}[shard_map-3-3-weighted]",
    ),
    _m(
        "B07",
        "the norm counts every tower, so clipping bites too hard",
        "step.update:apply_update",
        "optimizer.update(grads, opt_state, params, **value)",
        "optimizer.update(\n"
        "        jax.tree.map(lambda g: g * 2, grads), opt_state, params, **value)\n"
        "    updates = jax.tree.map(lambda u: u / 2, updates)",
        _ONE_GRADIENT,
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
        f"{_TOWER_OPTIMIZER}[inside-4-2]",
    ),
    _m(
        "B09",
        "divided by the rows of all micro-batches, empty ones included",
        "step.one_pass:Pass._run_towers",
        _GIVEN,
        'pools["added"] = [type(x)(x.sum, jnp.full_like(x.weight, num_rows(own[0])))\n'
        '            for x in pools["added"]]\n'
        f"        {_GIVEN}",
        f"{_MICRO_BATCHES}[2-2-vmap-weighted]",
    ),
    _m(
        "B10",
        "gradients of micro-batches averaged, not weighted",
        "step.one_pass:_scan_micro_batches",
        "total = jax.tree.map(jnp.add, total, _addends(pools))",
        "added, *others = _addends(pools)\n"
        "        added = [type(x)(x.value, jnp.sign(x.weight)) for x in added]\n"
        "        added = added, *others\n"
        "        total = jax.tree.map(jnp.add, total, added)",
        f"{_MICRO_BATCHES}[2-2-vmap-weighted]",
    ),
    _m(
        "B11",
        "reduced inside the accumulation loop: right, and A times the traffic",
        "step.one_pass:_scan_micro_batches",
        "total = jax.tree.map(jnp.add, total, _addends(pools))",
        "added = lax.pmean(_addends(pools), 'towerjax_tower')\n"
        "        total = jax.tree.map(jnp.add, total, added)",
        "test_compiled.py::test_one_all_reduce_for_all_gradients",
    ),
    _m(
        "B12",
        "the smaller last batch is left out of an evaluation",
        "loop.evaluate:outputs_on_host",
        "running.append(step(state, placed))",
        "running.append(step(state, placed)) if not placed.padded else None",
        "test_run.py::test_evaluation_is_exact_however_the_data_is_cut[16]",
    ),
    _m(
        "B13",
        "a row that pads counts",
        "data.shard:row_weights",
        "is_valid = lax.lt(here, num_valid)",
        "is_valid = lax.le(here, num_valid)",
        f"{_ONE_TOWER}[shard_map-3-3-weighted]",
    ),
    _m(
        "B14",
        "rows of weight 0 enter the statistics of batch norm",
        "layers.batch_norm.moments:_weights",
        "rows = tower.weight\n",
        "rows = tower.weight * 0 + 1\n",
        "test_batch_norm.py::test_training_is_that_of_the_whole_batch[3-3-how1]",
    ),
    _m(
        "B15",
        "mean of the towers' variances instead of the variance of all rows",
        "layers.batch_norm.moments:_moments",
        "added(weight * (x - mean) ** 2)",
        "added(weight * (x - ratio(parts[1], parts[0])) ** 2)",
        "test_batch_norm.py::test_training_is_that_of_the_whole_batch[3-3-how1]",
    ),
    _m(
        "B16",
        "tower 0's statistics are read, though declared MEAN",
        "collectives.reduce:one_of",
        "if reduction is Reduction.ONLY_FIRST_TOWER:",
        "if reduction is not Reduction.SUM:",
        "test_one_tower.py::test_evaluation_reads_tower_local_values_by_their_reduction",
    ),
    _m(
        "B17",
        "metrics are averaged over towers instead of merged",
        "step.one_pass:Pass._run_towers",
        _GIVEN,
        'pools["shown"] = [type(x)(x.value, jnp.float32(1))\n'
        '            if hasattr(x, "weight") else x\n'
        '            for x in pools["shown"]]\n'
        f"        {_GIVEN}",
        f"{_ONE_TOWER}[shard_map-3-3-weighted]",
    ),
    _m(
        "B18",
        "the mean of integers is an integer, so it is floored",
        "collectives.reduce:reduced_dtype",
        "reduction is Reduction.ONLY_FIRST_TOWER",
        "reduction is not Reduction.SUM",
        "test_merge.py::test_mean_and_first[int32]",
    ),
    _m(
        "B19",
        "the same key on every tower",
        "towers.tower:Tower.rng",
        "jax.random.fold_in(jax.random.fold_in(key, self.step), self.id)",
        "jax.random.fold_in(key, self.step)",
        _NOISE,
    ),
    _m(
        "B20",
        "the same key at every step",
        "towers.tower:Tower.rng",
        "jax.random.fold_in(jax.random.fold_in(key, self.step), self.id)",
        "jax.random.fold_in(key, self.id)",
        _NOISE,
    ),
    _m(
        "B21",
        "each device has other initial parameters",
        "step.state:init_state",
        "return place(state, placement, state_layout(strategy))",
        "state = place(state, placement, state_layout(strategy))\n"
        "    make = jax.make_array_from_single_device_arrays\n"
        "    params = jax.tree.map(lambda x: make(\n"
        "        x.shape, x.sharding, [jax.device_put(np.asarray(x) + i, device)\n"
        "        for i, device in enumerate(placement.jax_devices)]), state.params)\n"
        "    return TrainState(\n"
        "        state.step, params, state.opt_state, state.local, state.rng)",
        f"{_ONE_TOWER}[shard_map-3-3-weighted]",
    ),
    _m(
        "B22",
        "the schedule advances twice a step",
        "step.update:apply_update",
        "updates, next_state =",
        "_, opt_state = optimizer.update(grads, opt_state, params, value=loss)\n"
        "    updates, next_state =",
        _ONE_GRADIENT,
    ),
    _m(
        "B23",
        "every tower counts the step",
        "step.engine:Engine.step",
        'kept["step"] + 1',
        'kept["step"] + batch[1].shape[0]',
        f"{_ONE_TOWER}[shard_map-3-3-weighted]",
    ),
    _m(
        "B24",
        "the verdict on NaN is tower 0's",
        "step.one_pass:Pass.on_device",
        "added, shown = sums.tree()",
        "added, shown = sums.tree()\n"
        "        first = lax.all_gather(towers[0][0][1].sum, axes.names)[0]\n"
        "        added[1] = dataclasses.replace(added[1], sum=first)",
        f"{_VERDICT}[raise]",
    ),
    _m(
        "B25",
        "a tower with NaN is left out and the others' weight is kept",
        "step.one_pass:Pass._run_towers",
        _GIVEN,
        'good = jnp.isfinite(pools["added"][1].sum)\n'
        '        pools["added"] = [type(x)(jax.tree.map(\n'
        "            lambda g: jnp.where(good, g, 0), x.sum), x.weight)\n"
        '            for x in pools["added"]]\n'
        f"        {_GIVEN}",
        f"{_VERDICT}[raise]",
    ),
    _m(
        "B26",
        "a tower skips its update alone",
        "step.one_pass:Pass.on_device",
        "added, shown = sums.tree()",
        "added, shown = sums.tree()\n"
        "        added[1] = dataclasses.replace(added[1], sum=towers[0][0][1].sum)",
        f"{_VERDICT}[raise]",
    ),
    _m(
        "B27",
        "features and labels are split in different order",
        "data.placer:Placer.place",
        "arrays = place_rows(rows, self.placement, Layout.PER_TOWER)",
        "leaves, treedef = jax.tree.flatten(rows)\n"
        "    leaves[-1] = np.roll(leaves[-1], 1, axis=0)\n"
        "    rows = treedef.unflatten(leaves)\n"
        "    arrays = place_rows(rows, self.placement, Layout.PER_TOWER)",
        f"{_ONE_TOWER}[shard_map-3-3-weighted]",
    ),
    _m(
        "B28",
        "a row is lost where two towers' parts meet",
        "data.shard:counts_of_towers",
        "np.clip(left, 0, rows)",
        "np.clip(left, 0, rows - 1)",
        f"{_ONE_TOWER}[shard_map-3-3-weighted]",
    ),
    _m(
        "B29",
        "the towers' predictions are joined in another order",
        "step.inference:InferenceStep.__call__",
        "on_every_process(own, self.strategy.placement)",
        "jax.tree.map(lambda x: jnp.concatenate(\n"
        "        jnp.split(x, self.strategy.num_towers)[::-1]), own)",
        _EXACT,
    ),
    _m(
        "B30",
        "ONLY_FIRST_TOWER returns each tower's own value",
        "collectives.reduce:reduce_over_towers",
        "return take_first(x, tower_id, axes.names) if axes.names else x",
        "return x",
        "test_merge.py::test_mean_and_first[float32]",
    ),
    _m(
        "B31",
        "the last of an odd number of towers is left out",
        "collectives.reduce:add_pairwise",
        "rows = jnp.concatenate([sums, rows[paired:]]) if paired < len(rows) else sums",
        "rows = sums",
        f"{_OPS}[3-3]",
    ),
    _m(
        "B32",
        "packed leaves come back in another order",
        "collectives.packing:Packing.pack",
        "for x in group]",
        "for x in group[::-1]]",
        f"{_OPS}[3-3]",
    ),
    _m(
        "B33",
        "leaves of several dtypes share one buffer",
        "collectives.packing:Packing.plan",
        "latest.get(leaf.dtype)",
        'latest.get(np.dtype("float32"))',
        f"{_OPS}[3-3]",
    ),
    _m(
        "B34",
        "rows of one index overwrite each other",
        "collectives.sparse_rows:sum_duplicates",
        "summed.at[slots].add(",
        "summed.at[slots].set(",
        "test_sparse_update.py::test_rows_by_index",
    ),
    _m(
        "B35",
        "the optimizer's state is one step old",
        "step.train:apply_gradients",
        "opt_state=opt_state)",
        "opt_state=state.opt_state)",
        _ONE_GRADIENT,
    ),
    _m(
        "B36",
        "prefetch repeats a batch",
        "data.feed:_fill",
        "feed.add(place(element))",
        "feed.add(place(element))\n                feed.add(place(element))",
        "test_feed.py::test_order_is_kept[1]",
    ),
    _m(
        "B37",
        "a state that goes on has another key",
        "towers.cross_tower.assign:restore_on",
        "value = place(value, placement, layout)",
        "if jnp.issubdtype(jnp.result_type(new), jax.dtypes.prng_key):\n"
        "            value = jax.random.split(value, 1)[0]\n"
        "        value = place(value, placement, layout)",
        "test_variables.py::test_a_train_state_moves_to_another_number_of_towers",
    ),
    _m(
        "B38",
        "the packed reduce never packs",
        "collectives.ops:Packed.sum_over_towers",
        "self.max_group or math.inf",
        "self.max_group or 1",
        "test_cross_tower_ops.py::test_what_an_op_sends"
        "[Packed()-[('all-reduce', ['f32[103]'], [])]]",
    ),
    _m(
        "B39",
        "the plain all-reduce instead of the fixed tree",
        "collectives.ops:_add_in_tower_order",
        "share = -(-size // axes.num_devices)",
        "return lax.psum(rows.sum(axis=0), DEVICE_AXIS)",
        "test_same_bits.py::test_the_tree_is_not_fused_into_the_update",
        "test_compiled.py::test_pinned_tree_moves_its_parts_once",
    ),
    _m(
        "B40",
        "a SUM over towers is restored to each tower undivided",
        "towers.cross_tower.assign:restore_on",
        "fit_copies(old, new, placement.num_towers)",
        "jnp.stack([jnp.asarray(new, old.value.dtype)] * placement.num_towers)",
        "test_variables.py::test_saved_on_four_towers_and_restored_on_others",
    ),
)

PROOF = (
    _m(
        "P01",
        "proof: a reduction over another axis is one over towers",
        "proof.marks:_reduce_mark",
        "if context.axis in named_axes(eqn):",
        "if named_axes(eqn):",
        "test_analysis.py::test_axis_that_is_not_a_tower_axis_does_not_count",
    ),
    _m(
        "P02",
        "proof: a sum in groups of towers is one over all",
        "proof.marks:apply_collective",
        "if name in REDUCTIONS and (given is None or over):",
        "if name in REDUCTIONS:",
        "test_analysis.py::test_sum_over_unequal_groups_of_equal_values_is_refused",
    ),
    _m(
        "P03",
        "proof: one side of a grid of towers is all of it",
        "proof.marks:without_coordinate",
        "return frozenset([over._replace(within=not over.within)])",
        "return NOTHING",
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
        "return _pick(eqn, outs, predicate, context)",
        "return _pick(eqn, outs, FIXED, context)",
        f"{_REFUSED}[while_bound-batch['x']-None-1]",
    ),
    _m(
        "P06",
        "proof: a loop's body is walked once",
        "proof.analysis:_fixed_point",
        "if _without_sites(more) == _without_sites(marks):",
        "if _without_sites(more) == _without_sites(marks) or outs:",
        f"{_REFUSED}[scan_shifts_carry-batch['x']-scan_shifts_carry-1]",
    ),
    _m(
        "P07",
        "proof: tower.id is the same everywhere",
        "proof.analysis:_originate",
        "if differs else FIXED",
        "if differs and not context.axis else FIXED",
        f"{_REFUSED}[tower_id-tower.id-tower_id-1]",
    ),
    _m(
        "P08",
        "proof: only the first operand counts",
        "proof.analysis:_compute",
        "mark = join(ins)",
        "mark = join(ins[:1])",
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
        "== size",
        "<= size",
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
        "step.proving:_unmasked",
        "in outputs if rows and not count",
        "in outputs if rows and not rows",
        "test_bad_input.py::test_padding_that_nothing_masks_is_refused",
    ),
    _m(
        "P14",
        "proof: only the first leaf declared MIRRORED is looked at",
        "proof.findings:prove_mirrored",
        "if name is not None and d is not None",
        "if name == names[0] and d is not None",
        "test_analysis.py::test_one_bad_leaf_of_many_is_the_only_one_named",
    ),
    _m(
        "P15",
        "proof: a sum of what is already the same on all towers may be",
        "proof.marks:_scale_of_sum",
        "scale = mark.scale.times(Scale(low=1.0, high=1.0))",
        "scale = mark.scale.times(Scale(high=1.0))",
        "test_proof_refused.py::test_a_sum_of_what_is_the_same_is_refused[sum_of_norm]",
    ),
    _m(
        "P16",
        "proof: a sum over one group of all towers is taken for one over a part",
        "proof.marks:_reduce_mark",
        "is_whole = over is None",
        'is_whole = not eqn.params.get("axis_index_groups")',
        "test_analysis.py::test_a_sum_of_equals_over_one_group_of_all_is_too_much",
    ),
    _m(
        "P17",
        "proof: jaxprs in objects, as a kernel's index maps, are not walked",
        "proof.equation:_parts",
        'names = [*getattr(value, "__dict__", ())]',
        "return []",
        "test_primitives.py::test_the_index_maps_of_a_kernel_are_walked[False-True-tower.id]",
    ),
    _m(
        "P18",
        "proof: a primitive that holds code is taken for a function of its operands",
        "proof.equation:is_hidden",
        "if eqn.primitive.name in _TRUSTED:",
        "if eqn.primitive.name:",
        "test_primitives.py::test_code_in_params_is_opened_or_distrusted[partial]",
    ),
    _m(
        "P19",
        "proof: code that nobody can look into meets nobody",
        "proof.analysis:_hidden",
        "note_hang(eqn, context)",
        "pass",
        "test_primitives.py::test_code_that_some_towers_reach_might_hang",
    ),
    _m(
        "P20",
        "processes may close over different arrays, of which a text is silent",
        "towers.executors:fingerprint_of_program",
        "digest.update(np.asarray(array).tobytes())",
        "pass",
        "test_processes.py::test_what_a_function_closes_over_is_compared[of_keys-True]",
    ),
    _m(
        "P21",
        "what is reduced over all towers is reduced over devices alone",
        "towers.tower_axis:_Lowering._rename_axis",
        "names if x == self.axes.tower_axis",
        "names[:1] if x == self.axes.tower_axis",
        f"{_ONE_AXIS}[6-2]",
    ),
    _m(
        "P22",
        "a rule for several towers runs in place of what was proved",
        "towers.tower_axis:_Lowering._lower_eqn",
        'eqn.primitive.name == "custom_vmap_call"',
        "False",
        f"{_ONE_AXIS}[6-2]",
    ),
    _m(
        "P23",
        "towers of one device all take the first one's part",
        "towers.tower_axis:_Lowering._emulate",
        "tower += lax.axis_index(LOCAL_AXIS).astype(jnp.int32)",
        "pass",
        "test_one_axis.py::test_every_collective_is_over_all_towers[6-2]",
    ),
    _m(
        "P26",
        "of two products that towers of a device add up, the first alone counts",
        "towers.vmap_sums:SumPlan._parts",
        "left += reversed(eqn.invars)",
        "left += eqn.invars[:1]",
        "test_one_axis.py::test_sums_of_products_are_one_product",
    ),
    _m(
        "P27",
        "a loop that looks at its sum is given that of all towers",
        "towers.vmap_sums:_carried_sums",
        "not isinstance(value, Var) or uses[value] != 1",
        "not isinstance(value, Var)",
        "test_one_axis.py::test_a_loop_that_looks_at_its_sum_is_each_towers_own",
    ),
    _m(
        "P28",
        "to what is there already the towers' rows are added once",
        "towers.vmap_sums:_fused_sum",
        'name == "scatter-add" and _are_zeros(given[0], made)',
        'name == "scatter-add"',
        "test_one_axis.py::test_sums_of_convolutions_and_of_rows_are_one",
    ),
    _m(
        "P24",
        "proof: a number that T happens to divide counts towers",
        "proof.analysis:analyse",
        "varying = varying_constants(jaxpr, of_more_towers())",
        "varying = None",
        "test_proof_refused.py::test_numbers_that_happen_to_be_those_of_towers_count_none[5]",
    ),
    _m(
        "P25",
        "proof: draws of rbg keys that depend on the devices are not seen",
        "proof.analysis:_draw",
        "any(m.along for m in ins[: 1 + derives])",
        "False",
        "test_bad_input.py::test_draws_that_depend_on_the_devices_are_refused[rbg-own]",
    ),
    _m(
        "P29",
        "proof: a gradient's weight that a function changed is a weight",
        "proof.marks:use_of_weight",
        "return found if kept and min(results) >= 32 else 2",
        "return found",
        f"{_MAPPED}[clip-weights]",
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
        "test_replicate.py::test_a_size_of_each_kind_equals_numpy",
    ),
    _m(
        "M02",
        "TowerOptimizer's state does not move",
        "estimator.optimizer:TowerOptimizer.__new__",
        "dataclasses.replace(state, inner=after)",
        "state",
        f"{_TOWER_OPTIMIZER}[inside-4-2]",
    ),
    _m(
        "M03",
        "LossReduction.SUM is divided by the number of towers",
        "estimator.losses:one_loss",
        "reduction is LossReduction.SUM and",
        "False and",
        "test_replicate.py::test_towers_equal_numpy"
        "[pmap-4-2-SUM-None-clip each tower-ops0]",
    ),
    _m(
        "M04",
        "SUM_BY_NONZERO_WEIGHTS counts rows of weight 0",
        "estimator.losses:compute_weighted_loss",
        "rows = jnp.where(weights != 0, rows, 0)",
        "rows = rows * 1",
        "test_replicate.py::test_a_size_of_each_kind_equals_numpy",
    ),
    _m(
        "M05",
        "SUM_OVER_BATCH_SIZE counts the rows that pad",
        "estimator.losses:compute_weighted_loss",
        "rows = _like_losses(valid, losses)",
        "rows = _like_losses(valid, losses) * 0 + 1",
        "test_replicate.py::test_a_size_of_each_kind_equals_numpy",
    ),
    _m(
        "M06",
        "what towers meet about comes to nothing",
        "estimator.split_program:SplitProgram._evaluate",
        "outcomes = jax.tree.leaves((loss, grads))",
        "outcomes = [0 * x for x in jax.tree.leaves((loss, grads))]",
        f"{_IN_TURN}[4-2-Mode.TRAIN]",
    ),
    _m(
        "M07",
        "gradients that towers hand out are one tower's, and not added",
        "estimator.split_program:_as_sums",
        "Sum(x)",
        "x",
        f"{_IN_TURN}[4-2-Mode.TRAIN]",
    ),
    _m(
        "M10",
        "data is gone through once too often",
        "estimator.train:_EpochsIterator.__next__",
        "left - 1",
        "left",
        "test_train_and_evaluate.py::test_how_long[list-4-3-4]",
        "test_train_and_evaluate.py::test_how_long[list-2-None-2]",
    ),
    _m(
        "M11",
        "labels are taken for features in a prediction",
        "estimator.train:as_batch",
        "if labels is None or not with_labels:",
        "if labels is None:",
        "test_train_and_evaluate.py::test_without_labels_there_are_none",
        "test_train_and_evaluate.py::"
        "test_predictions_are_in_order_and_without_padding[pairs-2-2]",
    ),
    _m(
        "M12",
        "predictions come out of order",
        "loop.evaluate:outputs_on_host",
        "if len(running) == in_flight:\n"
        "                    yield jax.device_get(running.popleft())",
        "if len(running) == in_flight:\n"
        "                    yield jax.device_get(running.pop())",
        "test_train_and_evaluate.py::"
        "test_predictions_are_in_order_and_without_padding[pairs-2-2]",
    ),
    _m(
        "M13",
        "an error of the data ends predictions in silence",
        "loop.evaluate:outputs_on_host",
        "raise failure",
        "return",
        "test_train_and_evaluate.py::test_predictions_before_an_error_come_first",
    ),
    _m(
        "M14",
        "on_nonfinite does not reach the step",
        "estimator.train:train_and_evaluate",
        "**given, **of_step",
        "**given",
        "test_train_and_evaluate.py::test_a_loss_that_is_not_finite_is_skipped"
        "_and_training_again_compiles_nothing",
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
        "estimator.model_engine:ModelEngine._engine",
        "self.options.micro_batches, self.mode is not Mode.TRAIN",
        "self.options.micro_batches, True",
        "test_replicate.py::test_a_size_of_each_kind_equals_numpy",
    ),
    _m(
        "M17",
        "rows of a table are those of one device's towers",
        "step.one_pass:_join_table_rows",
        "all_gather_rows(rows, axes)",
        "rows",
        "test_tower_optimizer.py::test_rows_of_a_table_are_updated_of_the_one_gradient",
    ),
    _m(
        "M18",
        "padding may count in what towers keep of their own",
        "step.one_pass:Pass.values_to_mask",
        "x if isinstance(x, TowerLocal) and self.of_state else None",
        "None",
        "test_replicate_bad_input.py"
        "::test_padding_that_nothing_masks_is_refused[local]",
    ),
    _m(
        "M19",
        "padding may count in rows that go on to the next pass",
        "step.one_pass:Pass.values_to_mask",
        "weighs if self.rows_used_later else None",
        "None",
        "test_build_step.py::test_rows_that_go_on_say_which_of_them_are_padding",
    ),
    _m(
        "M20",
        "padding may count where towers meet in their middle",
        "step.proving:_unmasked",
        "return found + list(dict.fromkeys(bad))",
        "return found",
        "test_merge.py::test_padding_does_not_count_where_towers_meet",
    ),
    _m(
        "M21",
        "padding may count in the gradient of a part of the loss",
        "proof.analysis:_checkpoint_name",
        "name == tags.ONE",
        "False",
        "test_bad_input.py"
        "::test_padding_that_the_other_part_of_a_loss_masks_is_refused[1]",
    ),
    _m(
        "M22",
        "padding may count in a psum of a layer, such as batch norm",
        "proof.analysis:_communicate",
        "not m.along or (what not in tags.TOWER_CALLS and is_flag(m))",
        "not m.along or what not in tags.TOWER_CALLS",
        "test_merge.py::test_padding_does_not_count_where_towers_meet",
    ),
    _m(
        "M23",
        "padding may count in rows that are permuted or exchanged",
        "proof.analysis:_communicate",
        "and name not in EXTREMES",
        'and (is_sum or "gather" in name)',
        "test_merge.py::test_padding_does_not_count_where_towers_meet",
    ),
    _m(
        "M24",
        "how many rows are real is taken to say which of the permuted ones are",
        "step.proving:_is_masked",
        'known if "gather" in call.name else sent',
        "known",
        "test_merge.py::test_padding_does_not_count_where_towers_meet"
        "[passes_rows_on-ppermute]",
    ),
)

STATE = (
    _m(
        "S01",
        "a refused step changes what is no function of the gradient",
        "step.update:accept_or_keep",
        "return lax.select(accepted, jnp.asarray(walk.read(var), old.dtype), old)",
        "return jnp.asarray(walk.read(var), old.dtype)",
        "test_compiled.py::test_a_refused_step_leaves_each_leaf_as_it_was",
    ),
    _m(
        "S02",
        "a refused step changes the parameters",
        "step.update:accept_or_keep",
        "walk.values[var] = lax.select(accepted, walk.values[var], olds[var])",
        "pass",
        f"{_VERDICT}[raise]",
    ),
    _m(
        "S13",
        "a refused step writes rows into a table",
        "step.update:guard_rows",
        "jnp.where(accepted, operands[1], -1)",
        "operands[1]",
        "test_row_updates.py::"
        "test_a_refused_step_among_others_leaves_table_and_momentum",
    ),
    _m(
        "S14",
        "a refused step leaves rows of one table in the place of another",
        "step.update:accept_or_keep",
        "left.get(var) is not olds[var]",
        "left.get(var) is None",
        "test_row_updates.py::test_tables_that_change_places_keep_theirs",
    ),
    _m(
        "S15",
        "a step that may be refused copies each table",
        "step.update:accept_or_keep",
        "if var in olds and left.get(var) is not olds[var]:",
        "if var in olds:",
        "test_row_updates.py::test_no_table_is_copied[2-1-options0]",
    ),
    _m(
        "S03",
        "a batch without examples changes the parameters",
        "step.engine:_evaluate_metrics",
        "has_examples = sum(jnp.sum(term.weight) for term in guarded) != 0",
        "has_examples = terms[0].weight == terms[0].weight",
        "test_bad_input.py::test_no_examples_change_nothing_whatever_the_losses_are",
    ),
    _m(
        "S04",
        "guard='gradients' looks at the loss alone",
        "collectives.packing:Packing.leading",
        "for slot in self.slots[:num_leaves]:",
        "for slot in self.slots[:0]:",
        "test_bad_input.py::test_a_gradient_that_is_not_finite_is_refused_when_guarded",
    ),
    _m(
        "S05",
        "early stopping takes more for better",
        "loop.stopping:sign_of",
        'mode == "min"',
        'mode != "min"',
        "test_stopping.py::test_patience_of_any_values_is_as_counted_by_hand",
    ),
    _m(
        "S06",
        "early stopping does not start anew after an improvement",
        "loop.stopping:_Count.add",
        '"lowest_after": number, "without": 0}',
        '"lowest_after": number}',
        "test_stopping.py::test_patience_of_any_values_is_as_counted_by_hand",
    ),
    _m(
        "S07",
        "the restored best state shares memory with the kept one",
        "loop.stopping:_restore_copy",
        "return jnp.copy(kept)",
        "return kept",
        "test_stopping.py::test_a_run_goes_on_from_the_restored_best[devices]",
    ),
    _m(
        "S08",
        "the last state is kept as the best",
        "loop.stopping:Watch.add",
        "best is not None and to_keep < self._lowest",
        "best is not None",
        "test_stopping.py::test_the_best_state_is_that_of_its_step_bit_for_bit"
        "[shard_map-devices]",
    ),
    _m(
        "S09",
        "a run that goes on counts from 0",
        "loop.loop:Loop.__init__",
        "HistoryLog(step_number(state))",
        "HistoryLog(0)",
        "test_run.py::test_step_numbers_go_on_where_the_state_stopped",
    ),
    _m(
        "S24",
        "a run evaluates its state, whatever it was told to",
        "loop.loop:Loop._state_to_evaluate",
        "if self._options.eval_params is None:",
        "if True:",
        "test_run.py::"
        "test_other_parameters_are_evaluated_and_the_best_state_is_the_state[False]",
    ),
    _m(
        "S25",
        "a hook sees the state of a later step",
        "loop.loop:Loop._dispatch",
        "if reaches_multiple(hook.every, before, after):",
        "if False:",
        "test_run.py::test_a_hook_sees_the_state_before_the_next_step_takes_it[1-3]",
    ),
    _m(
        "S11",
        "two devices' copies of a leaf are not compared",
        "step.faults:_fingerprints",
        "for x in arrays]",
        "for x in arrays[:1] * len(arrays)]",
        "test_desync.py::test_one_bit_on_one_device_is_named[shard_map]",
    ),
    _m(
        "C12",
        "a checkpoint of copies that differ is written",
        "loop.checkpoint.checkpointer:Saving.save",
        "check_mirrored(state)",
        "pass",
        "test_desync.py::test_a_checkpoint_of_copies_that_differ_is_not_written",
    ),
    _m(
        "S12",
        "a padded row counts as an example that was seen",
        "data.shard:counts_of_towers",
        "np.clip(left, 0, rows)",
        "np.clip(left + 1, 0, rows)",
        "test_example_count.py::test_each_example_counts_once[4 towers on 2-summed]",
    ),
    _m(
        "S10",
        "init shares the caller's arrays, which donation deletes",
        "mesh.placement:place_own",
        "jax.device_put(jax.tree.map(copy_to_host, tree), shardings)",
        "jax.device_put(tree, shardings)",
        "test_compiled.py::test_init_copies_so_donation_spares_the_callers_arrays",
    ),
    _m(
        "S21",
        "a verdict that has arrived is not looked at",
        "step.checking:Verdicts.check",
        "self._is_alone and pending",
        "False and pending",
        "test_bad_input.py::test_a_refused_step_that_has_run_is_told_by_the_next_call",
    ),
    _m(
        "S22",
        "each of several processes looks at verdicts when they reach it",
        "step.checking:Verdicts.check",
        "self._is_alone and pending",
        "pending",
        f"{_PROCESSES_LOOK}[2]",
    ),
    _m(
        "S27",
        "threads that call one step read its verdicts at once",
        "step.checking:Verdicts.check",
        "with self._reading:",
        "with threading.RLock():",
        "test_run.py::test_threads_train_side_by_side_and_lose_no_state[one]",
    ),
    _m(
        "S23",
        "a number that is written into a state is cut to the dtype there",
        "step.state_checks:_cast_number",
        "jnp.result_type(plain, dtype) != dtype",
        "False",
        "test_state.py::test_a_number_that_a_state_cannot_hold_is_refused",
    ),
    _m(
        "S26",
        "a program that takes all rows for examples is given padded ones",
        "step.program:Runner.program",
        "(program.is_full and batch.padded)",
        "(program.is_full and False)",
        "test_compiled.py::test_a_program_for_full_batches_reads_no_weights[1]",
    ),
)

INPUT = (
    _m(
        "I01",
        "a step's counts are those of the first batch",
        "data.placer:Placer._place_counts",
        "key = layout, counts.tobytes()",
        "key = layout",
        f"{_ONE_TOWER}[shard_map-3-3-weighted]",
    ),
    _m(
        "I02",
        "the last call of several steps repeats its last batch",
        "data.placer:Placer._stack",
        "np.array(len(counts), np.int32)",
        "np.array(steps, np.int32)",
        "test_run.py::test_any_steps_per_call_equals_gradient_descent[0-4]",
    ),
    _m(
        "I03",
        "a tower's sparse rows all lie on its first example",
        "data.sparse_rows:Entries.split",
        "indices[part, : len(entries), 0] -= part * size",
        "indices[part, : len(entries), 0] *= 0",
        "test_sparse.py::test_rows_of_a_batch_go_to_the_towers_of_their_examples",
    ),
    _m(
        "I04",
        "a tower gets the sparse rows of others",
        "data.sparse_rows:Entries.split",
        "self.values[entries]",
        "self.values[: len(entries)]",
        "test_sparse.py::test_rows_of_a_batch_go_to_the_towers_of_their_examples",
    ),
    _m(
        "I17",
        "a BCOO is split by its entries, not by its rows",
        "data.sparse_rows:Entries.split",
        "bounds = starts[np.minimum(np.arange(parts + 1) * size, self.shape[0])]",
        "bounds = np.linspace(0, len(order), parts + 1).astype(int)",
        "test_sparse_batches.py::test_the_example_of_four_rows",
    ),
    _m(
        "I05",
        "two processes get the same part of the data",
        "data.distribute:DistributedDataset.__init__",
        "here = jax.process_index() if processes > 1 else 0",
        "here = 0",
        "test_distribute.py::test_each_process_is_told_which_part_is_its_own",
    ),
    _m(
        "M25",
        "an update on a mesh of its own is not analysed",
        "proof.meshes:prove_update",
        'eqn.primitive.name == "shard_map"',
        'eqn.primitive.name == "none"',
        "test_proof_meshes.py::"
        "test_an_update_whose_copies_would_differ_is_refused[False-by_device-drift"
        " apart: result 0, of axis_index at]",
    ),
    _m(
        "M26",
        "what a mesh of the update's own splits counts as the same on all devices",
        "proof.meshes:_prove_mapped",
        'inputs = ["what in_specs split" if x else None for x in split]',
        "inputs = [None for x in split]",
        "test_proof_meshes.py::"
        "test_an_update_whose_copies_would_differ_is_refused[False-own_part_alone-drift"
        " apart: result 0, of what in_specs split at]",
    ),
    _m(
        "M27",
        "a mesh of a tower's own is only known on a device that is another",
        "proof.meshes:refuse_in_towers",
        "if on > 1 or x.size > 1",
        "if on > 1 and x.size > 1",
        "test_proof_meshes.py::"
        "test_what_towers_cannot_run_is_refused[shard_map, one device]",
    ),
    _m(
        "M28",
        "a gradient that its backward has added up is added up again",
        "proof.marks:_reduce_mark",
        "is_in_backward(eqn)",
        "not is_in_backward(eqn)",
        "test_proof_refused.py::test_a_gradient_that_its_backward_adds_up_is_refused"
        "[gradient_added_up_twice-options0]",
    ),
    _m(
        "M29",
        "a mean in the backward of a custom_vjp counts as a sum",
        "proof.marks:_counts_again",
        "max(mark.scale.sums, mark.scale.low) >= 1",
        "max(mark.scale.sums, mark.scale.low) >= 0",
        "test_proof_refused.py::"
        "test_what_a_backward_adds_up_by_right_trains_as_one_tower"
        "[gradient_of_a_mean-ops0]",
    ),
    _m(
        "I10",
        "a mean of each row with each row of the same tower",
        "step.proving:_prove_pass",
        "lints.refuse_squares(found.lints)",
        "lints.refuse_squares(())",
        "test_bad_input.py::test_labels_as_a_column_are_refused[1-4-options0-column]",
    ),
    _m(
        "I11",
        "features are taken for pairs of rows",
        "proof.lints:of_named",
        "dims[0].at > 0",
        "dims[0].at >= 0",
        "test_bad_input.py::"
        "test_as_many_features_as_rows_are_no_pairs_of_rows[1-features]",
    ),
    _m(
        "I18",
        "a denominator that counts padded rows passes",
        "step.proving:_counts_of_padding",
        "value % own == 0",
        "value % own > own",
        "test_bad_input.py::test_denominators_that_count_padding_are_refused",
    ),
    _m(
        "I19",
        "any constant beside a function of rows counts for padding",
        "step.proving:_counts_of_padding",
        "rows_of[i] not in (lints.NO_ROWS, lints.FUNCTION)",
        "rows_of[i] is not own",
        "test_bad_input.py::test_denominators_that_count_padding_are_refused",
    ),
    _m(
        "I20",
        "the mean of a tower's own rows meets them unseen",
        "proof.lints:_follow",
        "if gone == _PART else gone",
        "if gone == _PART else None",
        "test_lints.py::test_rows_that_meet_are_warned_of[advantages-options0]",
    ),
    _m(
        "I21",
        "rows of a tower are compared with each other unseen",
        "proof.lints:_two_together",
        "x._replace(is_other=True)",
        "x._replace(is_other=False)",
        "test_lints.py::test_rows_that_meet_are_warned_of[negatives-options0]",
    ),
    _m(
        "I22",
        "micro-batches have statistics of their own unseen",
        "step.proving:_prove_pass",
        "placement.num_towers * one.micro_batches > 1",
        "placement.num_towers > 1",
        "test_lints.py::test_rows_that_meet_are_warned_of[advantages-options1]",
    ),
    _m(
        "I23",
        "rows that are the inner part of a dim are taken for its outer part",
        "proof.lints:_reshape",
        "is_outer = [x.at for x in own] == old[: len(own)]",
        "is_outer = True",
        "test_lints.py::test_what_is_known_of_rows_is_so",
    ),
    _m(
        "I24",
        "a loop forgets where its rows met",
        "proof.lints:either",
        "x | y for x, y in sets",
        "x & y for x, y in sets",
        "test_lints.py::test_rows_that_meet_are_warned_of[over_time-options0]",
    ),
    _m(
        "I25",
        "the root of a tower's mean is taken for a sum",
        "proof.lints:dims_of_equation",
        "total = TOTAL if is_sum and FUNCTION not in ins else FUNCTION",
        "total = TOTAL",
        "test_lints.py::test_a_function_of_sums_is_no_sum[root_of_a_mean-True]",
    ),
    _m(
        "I26",
        "a ratio times its own denominator is taken for no sum",
        "proof.lints:warn_of_own_rows",
        "leaves not in weights",
        "leaves is not weights",
        "test_lints.py::test_a_function_of_sums_is_no_sum[times_its_weight-False]",
    ),
    _m(
        "I27",
        "any weight of rows makes a function of sums a sum",
        "proof.lints:warn_of_own_rows",
        "leaves not in weights",
        "not weights",
        "test_lints.py::test_a_function_of_sums_is_no_sum[dice_by_its_rows-True]",
    ),
    _m(
        "I28",
        "groups of rows from all over the tower meet unseen",
        "proof.lints:_follow",
        "x.rows * x.apart == of_all",
        "False",
        "test_lints.py::test_rows_that_meet_are_warned_of[deviation_at_once-options0]",
    ),
    _m(
        "I29",
        "groups of neighbouring rows are taken for those from all over the tower",
        "proof.lints:_follow",
        "x.rows * x.apart == of_all",
        "True",
        "test_lints.py::test_rows_that_stay_apart_are_not[of_neighbours-options0]",
    ),
    _m(
        "I30",
        "what a row passes on to the next in a loop is not seen",
        "proof.lints:stacked",
        '("passed", id(loop)) in rows.loops and line()',
        "False",
        "test_lints.py::test_rows_that_meet_are_warned_of[smoothed-options0]",
    ),
    _m(
        "I31",
        "what a loop passes on counts as what its rows pass on",
        "proof.lints:carried",
        'if (x, at) == ("row", id(loop))',
        "if at == id(loop)",
        "test_lints.py::test_rows_that_stay_apart_are_not[each_row_by_index-options0]",
    ),
    _m(
        "I32",
        "a cond between a sum and a ratio of sums hides the ratio",
        "proof.lints:either",
        "FUNCTION if {a, b} == {TOTAL, FUNCTION} else dims",
        "dims",
        "test_lints.py::test_a_function_of_sums_is_no_sum[of_positives_if_any-True]",
    ),
    _m(
        "I12",
        "batch statistics are trained",
        "step.update:_refuse_statistics",
        'or "BatchStat" in',
        'or "BatchStats" in',
        "test_bad_input.py::test_batch_statistics_are_no_parameters",
    ),
    _m(
        "I13",
        "micro-batches that call each other are not warned of",
        "step.one_pass:_check_micro_batch",
        " and x.name in tags.TOWER_CALLS",
        " and x.name not in tags.TOWER_CALLS",
        "test_bad_input.py::"
        "test_what_micro_batches_tell_each_other_alone_is_warned_of[of_reduced-2]",
    ),
    _m(
        "I06",
        "the towers' elements change places",
        "data.distribute:_Rounds.build",
        "trees = [shard.resize(tree, size) for tree in taken.trees]",
        "trees = [shard.resize(tree, size) for tree in taken.trees][::-1]",
        "test_distribute.py::test_each_tower_takes_an_element[3-1]",
    ),
    _m(
        "I07",
        "an epoch is shuffled as the one before",
        "data.feed:Batches._order",
        "default_rng((seed, epoch))",
        "default_rng((seed, 0))",
        "test_feed.py::"
        "test_a_seed_shuffles_each_epoch_anew_and_each_example_comes_once",
    ),
    _m(
        "I08",
        "a loader's buffer is not copied before it is written again",
        "data.ledger:Ledger._own",
        "jax.tree.map(own_copy, batch)",
        "dict(batch)",
        "test_feed.py::test_groups_own_their_rows_when_the_loader_reuses_its_buffer",
    ),
    _m(
        "I09",
        "what a masked array leaves out counts",
        "types.leaves:problem_of",
        "elif isinstance(leaf, np.ma.MaskedArray)",
        "elif isinstance(leaf, np.ma.core.MaskedConstant)",
        "test_bad_input.py::test_what_no_device_holds_is_refused_by_name[masked]",
    ),
)

OTHER = (
    _m(
        "O01",
        "the last of an odd number of devices is left out",
        "collectives.ops:_sum_at_root",
        "senders = range(reach, num_devices, 2 * reach)",
        "senders = range(reach, num_devices - 1, 2 * reach)",
        "test_cross_tower_ops.py::test_no_tower_of_an_odd_number_is_left_out",
        "test_cross_tower_ops.py::test_every_op_is_the_sum_in_float64[8-8-shard_map]",
    ),
    _m(
        "O02",
        "a hierarchical sum stays inside its groups",
        "collectives.ops:_sum_in_stages",
        "if groups is not None:",
        "if groups is not None and not size:",
        "test_cross_tower_ops.py::test_every_op_is_the_sum_in_float64[8-8-shard_map]",
    ),
    _m(
        "O03",
        "the last pack loses the remainder",
        "collectives.ops:pack_sizes",
        "[total - size * (num_packs - 1)]",
        "[size]",
        "test_cross_tower_ops.py::test_the_last_pack_has_the_remainder[10-3-sizes0]",
    ),
    _m(
        "O04",
        "IndexedRows of towers are averaged where they were to be added",
        "collectives.reduce:from_total",
        "if reduction is Reduction.MEAN:",
        "if reduction is not None:",
        "test_sparse.py::test_inside_a_tower_rows_join_too[3-3-shard_map]",
    ),
    _m(
        "O05",
        "batches of an evaluation are averaged",
        "loop.evaluate:_add_metrics",
        "add_batch(totals.get(name), metric)",
        "add_batch(None, metric)",
        "test_run.py::test_evaluation_is_exact_however_the_data_is_cut[16]",
    ),
    _m(
        "O06",
        "a tower's micro-batches have one key",
        "towers.tower:Tower.rng",
        "return jax.random.fold_in(key, self._micro_batch)",
        "return key",
        "test_compiled.py::test_micro_batches_draw_their_own_noise",
    ),
    _m(
        "O07",
        "the rows of a weight are clipped as if they were examples",
        "step.update:pass_loss",
        "if _OF_EXAMPLES in kinds:",
        "if False:",
        "test_proof_optax.py::test_what_takes_more_is_refused[dpsgd]",
    ),
    _m(
        "O08",
        "an update of another shape is broadcast",
        "step.update:apply_update",
        'if found := changes("params", params, shapes):',
        "if found := []:",
        "test_proof_optax.py::test_updates_of_another_shape_are_refused",
    ),
)


_MEANS = "test_means.py::test_a_sum_of_means_is_that_of_one_tower"

VALUES = (
    _m(
        "V11",
        "each micro-batch divides by its own weights",
        "step.engine:_run_pass",
        "run(one.for_weights, *args).merged",
        "jax.tree.map(lambda w: w / 3, run(one.for_weights, *args).merged)",
        f"{_MEANS}[4-2-scan-3]",
    ),
    _m(
        "V12",
        "what all towers share is counted by each micro-batch",
        "towers.tower:Tower.weights_of_all",
        "self._parts * self.num_towers",
        "self.num_towers",
        f"{_MEANS}[4-2-scan-3]",
    ),
    _m(
        "V13",
        "what all towers share is counted by each row",
        "metrics.weighted:one_mean",
        "term.sum + term.weight * loss.penalty",
        "term.sum + loss.penalty",
        "test_means.py::test_one_mean_and_what_is_shared_need_one_pass",
    ),
    _m(
        "V18",
        "a model function's means are divided by each tower's own weights",
        "estimator.optimizer:_differentiate_means",
        "if towers is not None and not towers.takes_scalars:",
        "if False:",
        "test_means.py::test_a_model_function_minimizes_a_sum_of_means",
    ),
    _m(
        "V19",
        "what all towers share is counted by each micro-batch of a model function",
        "estimator.losses:TowersOfStep.sum_weights",
        "return weights, self.num_parts",
        "return weights, self.tower.num_towers",
        "test_means.py::test_a_model_function_minimizes_a_sum_of_means",
    ),
    _m(
        "V14",
        "a gradient through the weights is left out without a word",
        "step.gradient:refuse_moving_weights",
        "if any(carries_gradient(weight, leaf) for weight, leaf in pairs):",
        "if any(weight is leaf for weight, leaf in pairs):",
        "test_means.py::test_weights_that_move_with_the_parameters_are_refused",
    ),
    _m(
        "V15",
        "a function that chooses by readable names freezes nothing",
        "step.update:trainable_flags",
        'readable = readable_leaves("", shapes)',
        'readable = named_leaves("", shapes)',
        "test_inputs_and_fixed.py::test_trainable_is_given_readable_names",
    ),
    _m(
        "V01",
        "a sum of means pools their rows",
        "metrics.weighted:Weighted.__add__",
        "return Means((self,)) + other",
        "return self.merge(other)",
        "test_metrics.py::test_a_sum_of_means_is_not_their_pool",
    ),
    _m(
        "V02",
        "gathered rows keep the indices of their towers",
        "collectives.reduce:_shift_indices",
        "indices + jnp.asarray(first, indices.dtype)",
        "indices",
        "test_sparse.py::"
        "test_rows_gathered_in_a_tower_are_rows_of_the_joined_array[3-3]",
    ),
    _m(
        "V03",
        "a list as long as there are towers is read as the towers' values",
        "towers.cross_tower.values:is_tuple",
        "type(values) is tuple",
        "isinstance(values, tuple | list)",
        "test_per_tower_trees.py::test_a_list_and_a_named_tuple_are_trees_whatever_their"
        "_length",
    ),
    _m(
        "V05",
        "a constant array that all towers assign counts for each of them",
        "towers.variables:assign_in_tower",
        "if variable.reduction is Reduction.SUM:",
        "if variable.reduction is None:",
        _SHARED_SUM,
    ),
    _m(
        "V16",
        "calls stay, so that what two of them compute is computed twice on one device",
        "mesh.private_jax:inline_and_merge",
        "_inline_in(block, functions)",
        "pass",
        "test_pinned_tree.py"
        "::test_calls_are_inlined_and_equal_operations_of_a_computation_merged",
    ),
    _m(
        "V17",
        "what a loop computes is merged with what stands before the loop",
        "mesh.private_jax:inline_and_merge",
        "_merge_in(block)",
        'PassManager.parse("builtin.module(cse)").run(module.operation)',
        "test_pinned_tree.py"
        "::test_calls_are_inlined_and_equal_operations_of_a_computation_merged",
    ),
)

TESTING = (
    _m(
        "T01",
        "assert_replicates is blind to a leaf",
        "step.comparison:judge",
        "if x is not None)",
        "if x is not None)[-1:]",
        "test_audit.py::test_the_numbers_of_a_finding_are_those_of_numpy",
    ),
    _m(
        "T02",
        "assert_replicates keeps the order of the rows",
        "tools.testing.audit:assert_replicates",
        "seed=0",
        "seed=None",
        f"{_AUDIT}[places]",
    ),
    _m(
        "T05",
        "assert_same leaves the last leaf out",
        "tools.testing.compare:assert_same",
        "for name in left:\n",
        "for name in list(left)[:-1]:\n",
        "test_testing.py::test_differences_are_told_leaf_by_leaf",
    ),
    _m(
        "T06",
        "assert_same does not see NaN",
        "step.comparison:gaps",
        "nan=np.inf",
        "nan=0.0",
        "test_testing.py::test_trees_that_are_not_alike_are_told",
    ),
    _m(
        "T07",
        "the oracle of one tower has all towers",
        "tools.testing.compare:_one_device",
        "return OneDevice(strategy.placement.devices[0])",
        "return strategy",
        "test_testing.py::test_the_oracle_shows_what_is_wrong",
    ),
    _m(
        "T09",
        "the command's exit status does not tell of a finding",
        "tools.shell:run_parsed",
        "return run(**given)",
        "return run(**given) and OK",
        "test_audit.py::test_the_command_says_what_is_wrong",
    ),
)

_RESUMED = "test_checkpoint.py::test_a_stopped_run_goes_on_to_the_bit_on_other_devices"

CHECKPOINTS = (
    _m(
        "C01",
        "a checkpoint that was not finished counts",
        "loop.checkpoint.folder:saved_steps",
        "_WHOLE.fullmatch(path.name)",
        "_WHOLE.match(path.name)",
        "test_checkpoint.py::test_what_a_killed_process_left_does_not_count",
    ),
    _m(
        "C16",
        "a copy of a checkpoint is restored as the step of its name",
        "loop.checkpoint.record:CheckpointRecord.read",
        "folder.name != (name",
        "not (name",
        "test_checkpoint.py::test_a_copy_under_another_steps_name_is_refused",
    ),
    _m(
        "C02",
        "a file that was changed is loaded",
        "loop.checkpoint.folder:check_manifest",
        "_checksum(folder / name)[1] != digest",
        "_checksum(folder / name)[0] != size",
        "test_checkpoint.py::test_every_file_that_is_damaged_is_named",
    ),
    _m(
        "C03",
        "a resumed run begins its data anew",
        "loop.checkpoint.checkpointer:Saving._seek",
        'if self.options.batches == "anew":',
        'if self.options.batches != "count":',
        _RESUMED,
    ),
    _m(
        "C04",
        "random keys are not restored",
        "types.leaves:like_key",
        "return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))",
        "return x",
        _RESUMED,
    ),
    _m(
        "C05",
        "each of other towers gets the whole SUM",
        "towers.cross_tower.assign:restore_on",
        "fit_copies(old, new, placement.num_towers)",
        "replicate(new, placement.num_towers)",
        "test_checkpoint.py::test_other_towers_deal_out_what_was_there_and_go_on",
    ),
    _m(
        "C06",
        "a resumed run does all of its steps again",
        "loop.checkpoint.checkpointer:Saving.resume",
        "start + steps - newest",
        "steps",
        _RESUMED,
    ),
    _m(
        "C07",
        "how far a batch was padded is forgotten",
        "loop.checkpoint.checkpointer:Saving.resume",
        "self._step.expect_batch_rows(saved.batch_rows)",
        "self._step.expect_batch_rows(())",
        "test_checkpoint.py::test_other_towers_deal_out_what_was_there_and_go_on",
    ),
    _m(
        "C08",
        "the best checkpoint is removed with the old ones",
        "loop.checkpoint.checkpointer:Saving._finish",
        "if number != best:",
        "if number != steps[-1]:",
        "test_checkpoint.py::test_the_newest_and_the_best_stay[min-values0-kept0]",
    ),
    _m(
        "C15",
        "a resumed run takes its first evaluation for the best",
        "loop.checkpoint.checkpointer:Saving.__init__",
        "min(_costs(options).values(), default=math.inf)",
        "math.inf",
        "test_checkpoint.py::test_the_best_is_saved_between_and_known_to_the_next_run",
    ),
    _m(
        "C09",
        "early stopping counts from 0 in a resumed run",
        "loop.checkpoint.checkpointer:Saving.save",
        "stopping=stopping,",
        "stopping={},",
        "test_checkpoint.py::test_early_stopping_counts_on",
    ),
    _m(
        "C10",
        "another model's checkpoint is restored as far as names agree",
        "types.leaves:differing_texts",
        "if old != new",
        'if old == "absent"',
        "test_checkpoint.py::test_another_model_is_refused_before_training",
    ),
    _m(
        "C11",
        "a distributed data set goes on with smaller batches",
        "data.sources:ResumableDataPass.set_state",
        'self._begin(state["rows"])',
        "self._begin(0)",
        "test_distribute.py::"
        "test_a_pass_says_where_it_is_and_goes_on_there[Loader-batch]",
    ),
)

FIGURES = (
    _m(
        "F01",
        "a report says that a device holds all of what is in shards",
        "step.report:_held",
        "sharding.shard_shape(leaf.shape)",
        "leaf.shape",
        "test_report.py::test_memory_counts_what_is_taken_over_once",
    ),
    _m(
        "F02",
        "a collective in a loop counts once",
        "step.hlo:collectives_of",
        "trips * (often or 1)",
        "trips",
        "test_report.py::test_the_users_line_and_the_trips_of_a_collective_in_a_loop",
    ),
    _m(
        "F03",
        "a benchmark times calls that are not done",
        "tools.sweep.turns:_time_call",
        "jax.block_until_ready(out)",
        "pass",
        "test_bench.py::test_a_call_is_awaited",
    ),
)

TIMES = (
    _m(
        "F05",
        "the step is timed over another round of its peer",
        "tools.sweep.bench:_figures",
        "own[:, 0] / x[:, 0]",
        "own[:, 0] / x[::-1, 0]",
        "test_bench.py::test_ratios_are_of_the_same_round",
    ),
    _m(
        "F06",
        "times of other work are compared",
        "tools.sweep.bench:_timed",
        'losses, found.setdefault("losses", losses)',
        "losses, losses",
        "test_bench.py::test_other_work_is_not_compared",
    ),
    _m(
        "F07",
        "what failed before is timed again unasked",
        "tools.sweep.bench:bench",
        "retry_failed and ",
        "",
        "test_bench.py::test_a_worker_that_dies_or_hangs_is_a_failure[was ended by "
        "SIGABRT. Last it said: it]",
    ),
)

BESIDES = (
    _m(
        "N05",
        "nothing of a sharded state is sharded",
        "step.state:state_layout",
        "dict.fromkeys(_SHARDED[strategy.state], Layout.SHARDED)",
        "{}",
        "test_sharded_state.py::test_a_device_holds_its_part_alone",
    ),
    _m(
        "N01",
        "all steps of a call are given the first one's shared values",
        "step.engine:repeated_recipe",
        "batch = jax.tree.map(lambda x: x[i], batches)",
        "batch = [jax.tree.map(lambda x: x[i], b) for b in batches[:2]]\n"
        "            batch.append(jax.tree.map(lambda x: x[0], batches[2]))",
        "test_inputs_and_fixed.py"
        "::test_shared_leaves_of_several_steps_padding_and_the_function",
    ),
    _m(
        "N02",
        "the extra state is the sum and not the mean",
        "step.train:next_extra",
        "lambda x: x.value",
        "lambda x: getattr(x, 'sum', x.value)",
        "test_inputs_and_fixed.py"
        "::test_what_towers_return_for_the_extra_state_is_merged",
    ),
    _m(
        "N02b",
        "the extra state follows the parameters one step late",
        "step.train:Training.update",
        "self.update_extra(after, extra)",
        "self.update_extra(state, extra)",
        "test_update_extra.py::test_queue_target_and_centres_follow_those_of_one_tower",
    ),
    _m(
        "N02c",
        "padded rows count in a queue without a word",
        "step.train:TrainStep.__init__",
        "uses_rows = training.update_extra is not None",
        "uses_rows = False",
        "test_update_extra.py::test_rows_of_a_queue_say_which_are_padding",
    ),
    _m(
        "N03",
        "the key that towers share is a tower's own",
        "towers.tower:Tower.shared_rng",
        "2**32 - 1)",
        "self.id)",
        "test_inputs_and_fixed.py::test_all_towers_share_a_key_that_is_no_towers_own",
    ),
    _m(
        "N04",
        "what is fixed is trained when it is floating",
        "step.update:trained_part",
        "x if yes else None",
        "x if jnp.issubdtype(x.dtype, jnp.floating) else None",
        "test_inputs_and_fixed.py::test_only_what_is_trainable_is_trained",
    ),
    _m(
        "A01",
        "the noise of parts is divided by their number, with which it is too small",
        "contrib.tower_statistics:TowerStatistics.metrics",
        "jnp.maximum(parts - 1, 1)",
        "parts",
        "test_tower_statistics.py::test_statistics_are_those_of_numpy[4-4-vmap-1-21]",
    ),
    _m(
        "A05",
        "an audit compares what depends on the number of towers by design",
        "step.audit:_value_of",
        'getattr(leaf, "counts_towers", False)',
        "False",
        "test_tower_statistics.py::test_several_steps_in_one_program_tell_of_each",
    ),
    _m(
        "A02",
        "what the code of a device's share loses is never sent",
        "contrib.compressed:Compressed._sum_encoded",
        "keepdims=False) + share_lost",
        "keepdims=False)",
        f"{_CODES}[4-4-vmap-4-1-True]",
    ),
    _m(
        "A03",
        "the certificate forgets what the second code loses",
        "contrib.compressed:_largest_error",
        " + jnp.sqrt(squares[:, 1].sum(axis=0))",
        "",
        f"{_CODES}[6-3-scan-4-2-False]",
    ),
    _m(
        "A06",
        "no guard looks at the gradients that are sent in codes",
        "contrib.compressed:Compressed.__call__",
        'if fns.options.guard == "gradients":',
        "if False:",
        "test_compressed.py"
        "::test_a_gradient_that_is_not_finite_is_guarded_where_the_loss_is",
    ),
)

_ALONE = "test_sync.py::test_towers_train_alone_and_the_outer_update_is_made_of_them"
_LOCAL_SGD = (
    "test_sync.py"
    "::test_local_sgd_averages_what_is_trained_and_a_tower_skips_its_own_step"
)
ROUNDS = (
    _m(
        "Y01",
        "towers that go alone count alike, whatever they have seen",
        "step.rounds:Rounds._send",
        "weight = own.weight[p]",
        "weight = jnp.sign(own.weight[p])",
        _LOCAL_SGD,
    ),
    _m(
        "Y02",
        "what a tower has sent counts again in the next round",
        "step.rounds:_reset_counters",
        "own.weight.at[:, p].set(reset(own.weight[:, p]))",
        "own.weight",
        _LOCAL_SGD,
    ),
    _m(
        "Y03",
        "towers do not go on alone while what they sent is under way",
        "step.rounds:Rounds._adopt",
        "since - self.sync.overlap",
        "since",
        _ALONE,
    ),
    _m(
        "Y04",
        "towers that go alone may meet in their loss",
        "step.proving:_prove_pass",
        "if one.alone is not None:",
        "if False:",
        "test_sync.py::test_what_cannot_be_honoured_is_refused[meeting]",
    ),
    _m(
        "Y05",
        "padding is looked for after a tower has made its step of its rows",
        "step.one_pass:Pass.values_to_mask",
        "dataclasses.replace(axes, traced=None)",
        "axes",
        "test_sync.py::test_padding_that_nothing_masks_is_refused",
    ),
)

_LOOKUP = "test_sparse_gradient.py::test_each_lookup_has_the_dense_gradient"
_TABLE = "test_sparse_gradient.py::test_towers_train_a_table_as_one_does"
TABLES = (
    _m(
        "K01",
        "of several lookups in a table one has a gradient",
        "collectives.lookups:_Lookups.look_up",
        "kept.append((ids, rows))",
        "kept[:] = [(ids, rows)]",
        f"{_LOOKUP}[twice]",
    ),
    _m(
        "K02",
        "a table's other uses lose their gradient",
        "collectives.lookups:_Lookups.gradients",
        "for i in self.rows if i in self.dense",
        "for i in () if i in self.dense",
        "test_sparse_gradient.py::test_what_would_need_all_rows_is_refused[params['t']:"
        " looked up by tj.sparse.take and used otherwise too, so that]",
    ),
    _m(
        "K03",
        "an id that no row has moves another row",
        "collectives.lookups:_join",
        "ids[jnp.argmax(exist)]",
        "ids[0]",
        "test_sparse_gradient.py::"
        "test_an_id_of_no_row_counts_at_one_that_was_looked_up",
    ),
    _m(
        "K04",
        "a dense optimizer sees the rows that were looked up alone",
        "layers.sparse.update:update_with_rows",
        "if not lazy:",
        "if lazy is None:",
        "test_sparse_update.py::test_rows_are_updated_as_the_table_is[False]",
    ),
    _m(
        "K05",
        "a step's gradient of rows is a sum where it is a mean",
        "metrics.weighted:Weighted.value",
        "map_values(lambda x: x * scale.astype(x.dtype), total)",
        "map_values(lambda x: x * (scale if x.ndim < 2 else 1), total)",
        f"{_TABLE}[4-2-how1-2-True]",
    ),
)

SWEEPS = (
    _m(
        "W01",
        "members in turn are all given the first one's numbers",
        "tools.sweep.train:_Program.train_members",
        "{name: x[i] for name, x in numbers.items()}",
        "{name: x[0] for name, x in numbers.items()}",
        "test_sweep.py::test_a_member_is_what_it_is_alone[in_turn]",
    ),
    _m(
        "W02",
        "of members that train together all are told the first one's metrics",
        "step.members:MembersStep.of_member",
        "values[:, index]",
        "values[:, 0]",
        "test_sweep.py::test_a_member_is_what_it_is_alone[together]",
    ),
    _m(
        "W03",
        "a sweep goes on in the file of another",
        "tools.sweep.grid:RecordFile._check_same",
        "if (old := record.get(name)) != value:",
        "if (old := record.get(name)) is value:",
        "test_sweep.py::test_a_file_of_another_sweep_is_refused_before_anything_runs",
    ),
)

# Several processes that are no job, or the wrong one.
_STARTED = "test_cluster.py::test_several_that_do_not_meet_are_refused"
_STEPS = "test_steps_of_one_slurm_job_and_other_jobs_have_ports_of_their_own"
_ABORTED = "test_going_on.py::test_those_whom_jax_aborts_since_one_ended_are_not_lost"
JOBS = (
    _m(
        "J01",
        "steps of one Slurm job meet at one port",
        "mesh.cluster.started:_coordinator",
        "_port(61 * job + step)",
        "_port(job)",
        f"test_cluster.py::{_STEPS}",
    ),
    _m(
        "J02",
        "each process of several trains by itself",
        "mesh.cluster.started:refusal",
        "if name is None:",
        "if found:",
        _STARTED,
    ),
    _m(
        "J03",
        "processes of an mpirun meet those of the Slurm step around it",
        "mesh.cluster.started:_coordinator",
        "if is_of_step and",
        "if",
        _STARTED,
    ),
    _m(
        "J04",
        "those whom JAX aborts are counted as lost",
        "mesh.cluster.group:_Job._handle_end",
        "{signal.SIGABRT} if self.end.code else set()",
        "set()",
        f"{_ABORTED}[os.kill(os.getpid(), 9)-137-1]",
    ),
)

# One for each file that no other names: what that file alone would show.
ALONE = (
    _m(
        "D01",
        "a step that is done again has two lines",
        "loop.writers:JsonLines._cut",
        "if last <= start:",
        "if last <= start + 1:",
        "test_writers.py::test_an_evaluation_that_is_done_again_is_there_once",
    ),
    _m(
        "D02",
        "numbers of a batch of a known kind wrap round",
        "data.placer:Placer.place",
        "if known.may_wrap:",
        "if False:",
        "test_door.py::test_values_are_looked_at_each_time",
    ),
    _m(
        "D03",
        "a float of NumPy is a whole number",
        "types.options:is_whole",
        "int | np.integer)",
        "int | np.integer | np.floating)",
        "test_malformed.py::test_all_odd_options_are_refused_by_name[EarlyStopping]",
    ),
    _m(
        "D04",
        "a call that finds fewer batches does the last one again",
        "towers.cross_tower.steps:_run_steps",
        "lax.fori_loop(0, count,",
        "lax.fori_loop(0, len(num_valid),",
        "test_multi_step.py::"
        "test_the_last_call_takes_what_is_left_and_is_no_other_program",
    ),
    _m(
        "D05",
        "a root of a sum over towers is counted as often as the sum",
        "proof.scale:scale_of_equation",
        "_scale_of_power(scales[0], _POWERS[name])",
        "scales[0]",
        "test_proof_scale.py::test_a_sum_that_a_division_follows_is_right[normed]",
    ),
    _m(
        "D06",
        "what is read at a tower's own index is the same on all",
        "proof.analysis:_compute",
        "mark = join(ins)\n",
        'mark = join(ins[:1] if eqn.primitive.name == "gather" else ins)\n',
        "test_proof_fuzz.py::test_what_is_called_mirrored_has_the_same_bits",
    ),
    _m(
        "D07",
        "a batch is padded to the largest size that was seen",
        "data.placer:Placer._fit",
        "size = min(sizes,",
        "size = max(sizes,",
        "test_properties.py::"
        "test_placed_batches_lie_on_their_towers_padded_to_few_sizes",
    ),
    _m(
        "D08",
        "classes of exports are joined where they are to be stacked",
        "estimator.model_fn:typed_rows",
        "if stacked_classes:",
        "if not stacked_classes:",
        "test_replicate_calls.py::test_exports_are_joined_row_by_row",
    ),
    _m(
        "D09",
        "each micro-batch reads a variable that the one before has changed",
        "estimator.model_engine:ModelEngine._split",
        "if self.options.micro_batches > 1:",
        "if False:",
        "test_replicate_engine.py::"
        "test_local_variables_are_read_in_one_pass_of_micro_batches[2]",
    ),
    _m(
        "D10",
        "padding counts in tower.mean",
        "towers.tower:Tower.mean",
        "Weighted.mean(values, weight, axis=axis)",
        "Weighted.mean(values, None, axis=axis)",
        "test_research.py::test_tower_mean_is_that_of_all_rows[18]",
    ),
    _m(
        "D11",
        "one device runs all towers where more divide them",
        "towers.strategies:_pick_devices",
        "fitting[-1]",
        "fitting[0]",
        "test_strategies.py::test_as_many_devices_as_divide_the_towers[16-8]",
    ),
    _m(
        "D12",
        "frames of towerjax stay in the traceback of a user's mistake",
        "types.door:_of_others",
        "startswith(_OURS)",
        "startswith(_OURS[:1])",
        "test_tracebacks.py::test_a_mistake_shows_the_users_lines_alone[train]",
    ),
    _m(
        "D13",
        "a metric that is not there says not which there are",
        "types.missing:Named.__missing__",
        "', '.join(map(repr, self)) or 'none'",
        "'others'",
        "test_missing.py::test_an_error_says_what_to_write[There are 'loss'.]",
    ),
    _m(
        "D14",
        "a variable that a tower function closes over stays as at the first call",
        "towers.cross_tower.call:_run",
        "closes_over = closed_over_kinds(towers.jaxpr)",
        'closes_over = ""',
        "test_refusals.py::test_a_variable_that_a_tower_closes_over_is_told[2]",
    ),
    _m(
        "D15",
        "of a mean of towers a weight that all share counts once",
        "towers.cross_tower.reduce:_by_leaf",
        "jnp.broadcast_to(x, (num_towers, *np.shape(x)))",
        "jnp.zeros((num_towers, *np.shape(x))).at[0].set(x)",
        "test_cross_tower.py::test_a_weighted_mean_of_towers_of_equal_weight",
    ),
    _m(
        "D16",
        "a complex -0.0 of the first tower arrives as 0.0",
        "collectives.reduce:as_bits",
        "[x.real, x.imag]",
        "[jnp.where(x.real == 0, 0.0, x.real), x.imag]",
        "test_exact_values.py::test_the_first_towers_value_comes_bit_for_bit",
    ),
    _m(
        "D17",
        "batches that a stopped run had taken in advance are lost",
        "data.ledger:Ledger.settle",
        "if self.has_cursor and self._taken:",
        "if False:",
        "test_all_or_nothing.py::test_batches_are_set_back_where_a_run_stops_early",
    ),
    _m(
        "D18",
        "9 GPUs are of one host of eight",
        "mesh.absent:Absent.num_hosts",
        "-(-(self.number or 1) // 8)",
        "max((self.number or 1) // 8, 1)",
        "test_absent.py::test_what_cannot_be_is_refused",
    ),
    _m(
        "D19",
        "Ctrl-C of a command has the code of wrong arguments",
        "tools.shell:run_parsed",
        "return INTERRUPTED",
        "return USAGE",
        "test_shell.py::test_ctrl_c_has_its_own_code",
    ),
)

AUDITS = (
    _m(
        "U01",
        "the audit draws each row its own numbers",
        "step.audit:of_towers",
        "rng=key",
        "rng=state.rng",
        f"{_AUDITED}[noise]",
    ),
    _m(
        "U02",
        "rows that draw from the towers' key pass the audit",
        "towers.row_free_keys:_fold_in_key",
        "is_shared &= key[1] != jnp.uint32(ALL_TOWERS)",
        "is_shared &= False",
        f"{_HABITS}[noise_from_the_shared_key]",
    ),
    _m(
        "U03",
        "towers of unequally many rows are not compared",
        "step.audit:run_audit",
        "each + each // 2",
        "2 * each",
        "test_audit.py::test_uneven_towers_are_compared_where_batches_are_padded",
    ),
    _m(
        "U04",
        "two towers are compared with themselves",
        "step.audit:run_audit",
        "(1, 2))\n    second",
        "(2, 2))\n    second",
        f"{_HABITS}[sum_with_weight_1]",
    ),
    _m(
        "U05",
        "a step that was refused by its audit trains at the next call",
        "step.caller:Caller._audit_first",
        "self.audit(state, batch)",
        "(vars(self).update(_audits=False), self.audit(state, batch))",
        f"{_HABITS}[sum_with_weight_1]",
    ),
)

MUTANTS = REGISTRY + PROOF + MODELS + STATE + INPUT + OTHER + VALUES + TESTING
MUTANTS += TABLES + CHECKPOINTS + FIGURES + TIMES + BESIDES + ROUNDS + SWEEPS
MUTANTS += JOBS + AUDITS + ALONE
