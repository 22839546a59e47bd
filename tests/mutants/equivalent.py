"""Generated mutants that change nothing, each with the reason."""

# A function and a change of it, as the score prints them: why nothing else comes of it.
# fmt: off
SAME: dict[tuple[str, str], str] = {
    ("towerjax.mesh.transfer:place_own", "constant: 1 -> 2"):
        "what several processes do places the same arrays on one",
    ("towerjax.make.members:Members.begin", "constant: 0 -> 1"):
        "all members begin at one number",
    ("towerjax.sweeps.train:Sweep.best", "constant: 0 -> 1"):
        "a dict of which the keys alone are read, in their order",
    ("towerjax.types.trees:widen_dtype",
     "flipped: jnp.dtype(dtype).itemsize < 4 -> jnp.dtype(dtype).itemsize <= 4"):
        "float32 is widened to float32",
    ("towerjax.loop.checkpoint.folder:write_table",
     'dropped: json.dumps({**table, "crc32": _of_table(table)}, indent=1, '
     "allow_nan=False) -> json.dumps({**table, 'crc32': _of_table(table)}, "
     "allow_nan=False)"):
        "how a file looks to who reads it",
    ("towerjax.data.batch_rows:may_wrap",
     'flipped: x.dtype.kind in "iu" and x.dtype.itemsize > 4 -> '
     "(x.dtype.kind in 'iu' or x.dtype.itemsize > 4)"):
        "more leaves are looked at, and each number of them fits",
    ("towerjax.data.stream:Stream._next_of_thread",
     "deleted: feed.added.clear() -> pass"):
        "it waits by going round",
    ("towerjax.step.run.compile:_step_of",
     "deleted: step.__signature__ = inspect.Signature(parameters) -> pass"):
        "names of a program's parameters, for who reads its text",
    ("towerjax.data.sparse_rows:Entries.max_per_block", "constant: 1 -> 2"):
        "room for one entry more, which is filled up",
    ("towerjax.collectives.reduce:add_pairwise",
     "flipped: paired < len(rows) -> paired <= len(rows)"):
        "no row is joined where none is left",
    ("towerjax.collectives.packing:Packing.unpack",
     "flipped: platform == \"cpu\" -> platform != 'cpu'"):
        "where a slice begins is hidden from XLA or not, with the same bits",
    ("towerjax.types.tables:picture",
     'dropped: Picture(size, layout="constrained", dpi=100) -> '
     "Picture(size, dpi=100)"):
        "how far apart the panels of a picture lie",
    ("towerjax.towers.on_towers:call_on_towers",
     "dropped: np.arange(placement.num_towers, dtype=np.int32) -> "
     "np.arange(placement.num_towers)"):
        "an argument that is not read",
    ("towerjax.loop.checkpoint.saving:Saving.resume", "constant: 1 -> 2"):
        "-1 or -2 stands for no checkpoint",
    ("towerjax.metrics.tf:_is_below",
     "flipped: threshold > limits.max -> threshold >= limits.max"):
        "a threshold that is the largest number is compared below",
    ("towerjax.metrics.thresholds:_rate_at_nearest",
     "flipped: distance > nearest + 1e-6 -> distance >= nearest + 1e-06"):
        "no distance is larger by just that",
    ("towerjax.step.run.programs:Programs.program",
     "flipped: self.placement.num_processes > 1 -> "
     "self.placement.num_processes >= 1"):
        "one process agrees with itself",
    ("towerjax.prover.comparison:_gap_of_leaf",
     "flipped: got is not None and want is not None -> "
     "(got is not None or want is not None)"):
        "an assertion of ours, which holds",
    ("towerjax.data.stream:Stream._next_of_thread",
     "deleted: feed.added.wait() -> pass"):
        "it waits by going round",
    ("towerjax.data.distribute:DistributedDataset._begin", "constant: 0 -> 1"):
        "the least number of rows of a round, each of which has one",
    ("towerjax.mesh.absent:Absent.num_hosts", "constant: 1 -> 2"):
        "one GPU and two are of one host",
    ("towerjax.mesh.cluster.group:_Worker.listen", "constant: 1 -> 2"):
        "numbers of steps are compared with one another, and with 0",
    ("towerjax.loop.writers:as_json", "flipped: value > 0 -> value >= 0"):
        "it is not finite, so that it is not 0",
    ("towerjax.sweeps.bench:worker_environ", "constant: 4 -> 5"):
        "bytes of freed memory that stay with a process",
    ("towerjax.sweeps.bench:worker_environ", "constant: 64 -> 65"):
        "bytes that a process takes at once",
    ("towerjax.mesh.private_jax:least_effort", "constant: 11 -> 12"):
        "an option of JAX 0.11, which neither end of the suite has",
    ("towerjax.step.passes.on_device:_denominators",
     "dropped: dataclasses.replace(pass_, differentiates=False, looks_at=None) -> "
     "dataclasses.replace(pass_, differentiates=False)"):
        "what that run looks at is not read, and XLA leaves it out",
    ("towerjax.towers.row_free_keys:_split_key", "constant: 1 -> 2"):
        "of two words, JAX takes the last for the one after it",
    ("towerjax.mesh.placement:Placement.mesh",
     "dropped: Mesh(np.array(self.jax_devices).reshape(sizes), names, "
     "axis_types=kinds) -> Mesh(np.array(self.jax_devices).reshape(sizes), names)"):
        "Auto is JAX's default",
    ("towerjax.mesh.placement:Placement.abstract_axes",
     "dropped: dataclasses.replace(self.axes, devices=(), **spread) -> "
     "dataclasses.replace(self.axes, **spread)"):
        "which device a sum is made on changes no proof",
    ("towerjax.mesh.cluster.group:_Job._look_for_hangs",
     "flipped: still_s > self.timeouts.step_s -> still_s >= self.timeouts.step_s"):
        "a moment",
    ("towerjax.tools.cli:main",
     'dropped: Parser(prog="towerjax", description=about) -> '
     "Parser(prog='towerjax')"):
        "a sentence of the help",
}
# fmt: on
