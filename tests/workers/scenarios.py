"""What two processes are told when they disagree, and how their input may end."""

import dataclasses
import functools
import hashlib
import inspect
import pathlib
import threading
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
import optax
import quickly
import suite
import writes

import towerjax as tj
from towerjax.contrib import LocalSGD

suite.shards_from(1)  # as in tests/in_process.py
FOUR = tj.Mirrored(towers=4)
VERBS = tj.tf1.with_verbs(FOUR)
CPUS = ("cpu:0", "cpu:1", "cpu:2", "cpu:3")


def loss_fn(params, batch, tower):
    return tj.Weighted.mean((params - batch["x"]) ** 2, tower.weight)


@functools.cache
def step_of(strategy, **options):
    options = {"remainder": "pad", **options}
    return tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, **options)


def rows(n, start=0):
    return {"x": np.arange(start, start + n, dtype=np.float32)}


def differing_batches(me):
    step = step_of.__wrapped__(FOUR)  # the first batch is compared
    step(step.init(np.float32(0)), rows(8, start=me))


def audited(me):
    def wrong(params, batch, tower):
        return tj.Weighted(loss_fn(params, batch, tower).sum, 1.0)

    def along_rows(params, batch, tower):
        own = jnp.cumsum((params - batch["x"]) ** 2)
        return tj.Weighted.mean(own, tower.weight)

    found = []
    for loss in (wrong, along_rows, loss_fn):
        step = tj.build_train_step(loss, optax.sgd(0.1), FOUR, remainder="error")
        state = step.init(np.float32(0))
        try:
            step(state, rows(8))
        except tj.testing.SplitError as error:
            found.append([x.leaf for x in error.findings])
        found.append(step.unproved == {})
    return found


def own_devices_alone(me):
    """Each process by itself, on its own devices: no job of several."""
    strategy = tj.tf1.MirroredStrategy(devices=(f"cpu:{2 * me}", f"cpu:{2 * me + 1}"))
    step = step_of(strategy)
    state, _ = step(step.init(np.float32(me)), rows(8, start=me))
    return [strategy.between_graph, round(float(state.params), 5)]


def elements_of_all(me):
    source = [rows(1, start=i) for i in range(6)]
    dataset = FOUR.distribute_dataset(source, split="elements", remainder="drop")
    return [
        [shard.data.tolist() for shard in placed.arrays["x"].addressable_shards]
        for placed in dataset
    ]


def steps_on_data(me):
    def step(ctx, total, batch):
        sums = ctx.call_for_each_tower(lambda tower, x: x.sum(), batch["x"])
        ctx.set_last_step_output("sums", FOUR.reduce(tj.Reduction.SUM, sums))
        return total + FOUR.reduce(tj.Reduction.SUM, sums)

    data = iter(FOUR.distribute_dataset([rows(8), rows(8, start=1)]))
    ctx = VERBS.run_steps_on_dataset(step, data, 2, np.float32(0))
    return [float(ctx.final), float(ctx.last_step_outputs["sums"])]


def towers_values(me):
    """call_for_each_tower, reduce and gather over the devices of both processes."""
    ids = VERBS.call_for_each_tower(lambda tower: 10.0 * tower.id)
    total = FOUR.reduce(tj.Reduction.SUM, ids)
    mean = VERBS.call_for_each_tower(
        lambda tower, x: tower.reduce(tj.Reduction.MEAN, x), ids
    )
    return [float(total), float(mean), [float(x) for x in FOUR.unwrap(ids)]]


def fetched(me):
    v = VERBS.create_var("v", [1.0 + me, 2.0])  # process 0's values on both
    return [float(VERBS.fetch(v, fn=lambda x: x[0] + x[1])), float(v.value[0])]


def ops(me):
    """The sums over towers by each op, of two values at once."""
    sums = {}
    for name, op in {
        "Packed": tj.collectives.Packed(num_packs=2),
        "Hierarchical": tj.collectives.Hierarchical(),
        "ReduceToOneDevice": tj.collectives.ReduceToOneDevice("cpu:2"),
    }.items():
        strategy = tj.tf1.MirroredStrategy(towers=8, cross_tower_ops=op)
        ids = strategy.worker_device_index
        pairs = [(ids, None), (tj.PerTower(np.arange(8.0) ** 2), None)]
        batch = strategy.batch_reduce(tj.Reduction.SUM, pairs)
        sums[name] = [*map(float, batch)]
    return sums


def saved_and_restored(me):
    """A tower-local sum of 4 towers on both processes, restored on 8."""
    v = VERBS.create_var("v", 1.5, reduction=tj.Reduction.SUM, tower_local=True)
    saved = tj.towers.saved_values({"v": v})
    totals = [float(saved["v"])]
    other = tj.tf1.MirroredStrategy(towers=8)
    like = other.create_var("v", 0.0, reduction=tj.Reduction.SUM, tower_local=True)
    restored = tj.towers.restored_values(other, {"v": like}, saved)["v"]
    copies = [float(x) for x in other.unwrap(restored)]
    return [*totals, float(other.read_var(restored)), copies[-1]]


def of_the_first(me):
    """Host values that differ from process to process, given to methods for all."""
    x = np.float32(1 + me)
    v = VERBS.create_var("v", x)
    mean = FOUR.reduce(tj.Reduction.MEAN, {"x": x, "n": 1 + me})
    found = [
        VERBS.update(v, lambda a, b, *, k: a + k * b, x, k=2 + me).value,
        VERBS.assign(v, 4 * x).value,
        VERBS.assign_add(v, 7 + me).value,
        mean["x"],
        mean["n"],
        *VERBS.map(lambda e, y: e * y, [x, 2 * x], x).values,
    ]
    return [np.asarray(one).tolist() for one in found]


def sums_of_rows(me):
    """Rows of a table, reduced: every process reads and applies them."""
    rows = VERBS.call_for_each_tower(
        lambda tower: tj.sparse.IndexedRows(
            jnp.full((1, 2), tower.id + 1.0), jnp.array([1]) + 0 * tower.id, (3, 2)
        )
    )
    total = FOUR.reduce(tj.Reduction.SUM, rows)
    table = VERBS.create_var("table", np.ones((3, 2), np.float32))
    new = VERBS.update(table, lambda x, rows: rows.add_to(x), total).value
    return [total.to_dense().tolist(), new.tolist()]


def evaluated_and_predicted(me):
    evaluate = tj.build_eval_step(
        lambda w, b, tower: {"mean": tj.Weighted.mean(w * b["x"], tower.weight)}, FOUR
    )
    predict = tj.build_predict_step(lambda w, b, tower: w * b["x"], FOUR)
    w = np.float32(2)
    values = tj.evaluate(evaluate, w, [rows(8), rows(3)])
    return [values["mean"], predict(w, rows(5)).tolist()]


def work_of_one_process(me):
    """What the last process alone is asked for besides the steps."""
    step = step_of(FOUR)
    predict = tj.build_predict_step(loss_fn, FOUR)
    told = []
    for given in (
        {"checkpointer": tj.Checkpointer("nowhere")},
        {"hooks": [tj.loop.WithState(print, every=2)]},
        {"evaluate": predict, "eval_batches": [rows(4)]},
    ):
        state = step.init(np.float32(0))
        given = given if me else {}
        try:
            tj.run(step, state, [rows(4)], progress=False, **given)
        except ValueError as error:
            told.append(str(error))
    return told


def restored_from_the_chief(me):
    """Only process 0 read the file: its values count."""
    step = step_of(FOUR)
    state = step.init(np.float32(0))
    saved = tj.towers.saved_values(state)
    value = np.float32(100 if me == 0 else -1)
    saved = dataclasses.replace(saved, params=value)
    restored = tj.towers.restored_values(FOUR, state, saved)
    placed = step.place(jax.tree.map(lambda x: x, restored))
    sent = VERBS.broadcast(value)
    return [float(restored.params), float(placed.params), float(sent)]


def alone_between_meetings(me):
    """Towers train two steps alone, and then take their mean."""
    # No audit: of towers that go alone nothing is merged.
    options = {"extend": LocalSGD(every=2), "audit": False}
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), FOUR, **options)
    state = step.init(np.float32(0))
    for _ in range(2):
        state, _ = step(state, rows(8))
    return round(float(state.params), 5)


def learning_rates_of_the_first(me):
    """Written into the state as numbers of the host, before and after it compiles."""
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    step = tj.build_train_step(loss_fn, optimizer, FOUR)
    state = step.init(np.float32(0))
    for rate in (0.25 + me, np.float32(0.125 + me)):
        state.opt_state.hyperparams["learning_rate"] = rate
        state, _ = step(state, rows(8))
    return float(state.params)


def loader_fails(me):
    def source(context):
        yield rows(2)
        if me == 1:
            raise OSError("disk")
        yield rows(2)

    try:
        return [placed.counts.tolist() for placed in FOUR.distribute_dataset(source)]
    except OSError as error:
        return f"mine: {error}"


def left_early(me):
    """Breaking out of a loop neither waits nor leaves a thread, however late."""
    start = time.monotonic()
    source = lambda context: (rows(4) for _ in range(1000))  # noqa: E731
    for i, _placed in enumerate(FOUR.distribute_dataset(source)):
        if me == 0:
            time.sleep(0.01)
        if i == 3:
            break
    threads = [t for t in threading.enumerate() if t.name == "towerjax-prefetch"]
    return [time.monotonic() - start < 8, len(threads)]


@functools.cache
def one_step():
    return tj.build_train_step(loss_fn, optax.sgd(0.1), FOUR, remainder="pad")


def with_a_wrong_copy(state):
    """The last device's copy of the parameters differs."""
    shards = [
        jax.device_put(np.array(x.data) * (-1 if x.device == jax.devices()[3] else 1),
                       x.device)
        for x in state.params.addressable_shards
    ]  # fmt: skip
    of_shards = jax.make_array_from_single_device_arrays
    params = of_shards((), state.params.sharding, shards)
    return dataclasses.replace(state, params=params)


def desynced(me):
    """Both processes name the device whose copy differs."""
    step = one_step()
    state = step.init(np.float32(1))
    try:
        tj.check_mirrored(with_a_wrong_copy(state))
    except tj.DesyncError as error:
        [one] = error.differing
        return [error.step, one.device, one.leaf]


def replayed(me):
    """Neighbours are devices of one process; two of them cannot vote."""
    step = step_of(FOUR)
    state = step.init(np.float32(1))
    agrees = tj.tools.replay(step, state, rows(8)).agrees
    report = tj.tools.replay(step, with_a_wrong_copy(state), rows(8))
    found = {(*x.devices, x.part) for x in report.undecided}
    alone = step_of(tj.Mirrored(devices=CPUS[::2]))
    try:
        tj.tools.replay(alone, alone.init(np.float32(1)), rows(8))
    except ValueError as error:
        return [agrees, *sorted(map(list, found)), str(error)[:90]]


def not_finite(me):
    step = one_step()
    data = rows(8)
    data["x"][5] = np.nan
    try:
        tj.run(step, step.init(np.float32(1)), [rows(8), data, rows(8)])
    except tj.NonFiniteError as error:
        return [[p.step, p.tower, p.leaf, p.part, p.kind] for p in error.locations]


def sharded(me):
    """Of 8 parameters and their momentum each of four devices holds two."""
    strategy = tj.tf1.MirroredStrategy(towers=4, state="sharded")
    optimizer = optax.sgd(0.1, momentum=0.5)

    def loss_fn(params, batch, tower):
        errors = params["w"].sum() - batch["x"] + batch["by"]
        return tj.Weighted.mean(errors**2, tower.weight)

    step = tj.build_train_step(loss_fn, optimizer, strategy)
    state = step.init({"w": np.arange(8, dtype=np.float32)})
    for by in (0.0, 1.0):
        state, metrics = step(state, {**rows(8), "by": tj.Whole(by)})
    parts = [x.addressable_shards[0].data.size for x in jax.tree.leaves(state)[:3]]
    read = tj.towers.saved_values(state.params), strategy.fetch(state.params)
    read = [np.float64(x["w"]).round(2).tolist() for x in read]
    return [round(float(metrics["loss"]), 2), parts, *read]


def bits_of_parts(me):
    """The bits of a sharded state, two towers on each of four devices."""
    return pinned("sharded")


def pinned(state, devices=None):
    """A hash of what eight towers end on, and how many elements a device holds."""

    def loss_fn(params, batch, tower):
        errors = batch["x"][:, None] * params["w"][None] - params["w"].sum()
        return tj.Weighted.mean((errors**2).sum(-1), tower.weight)

    options = {"tower_loop": "scan", "cross_tower_ops": tj.PinnedTree(), "towers": 8}
    strategy = tj.Mirrored(devices, state=state, **options)
    clipped = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.01))
    step = tj.build_train_step(loss_fn, clipped, strategy)
    done = step.init({"w": np.linspace(-1, 1, 512, dtype=np.float32)})
    for start in range(3):
        done, _ = step(done, rows(24, start))
    read = tj.towers.saved_values((done.params, done.opt_state))
    digest = hashlib.sha256(
        b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(read))
    )
    return digest.hexdigest(), done.params["w"].addressable_shards[0].data.size


def wide(me):
    """Each process has one tower of two devices, each with half of a matrix."""
    specs = {"w": jax.sharding.PartitionSpec("model")}
    strategy = tj.tf1.MirroredStrategy(within={"model": 2}, specs=specs)

    def loss_fn(params, batch, tower):
        w = jax.lax.with_sharding_constraint(params["w"], specs["w"])
        errors = w.sum() - batch["x"]
        return tj.Weighted.mean(errors**2, tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(0.01, momentum=0.5), strategy)
    state = step.init({"w": np.arange(8, dtype=np.float32)})
    for _ in range(2):
        state, metrics = step(state, rows(8))
    parts = [x.addressable_shards[0].data.size for x in jax.tree.leaves(state)[:3]]
    read = np.float64(strategy.fetch(state.params)["w"]).round(3).tolist()
    torn = tj.Mirrored(within={"model": 4})
    try:
        tj.build_train_step(loss_fn, optax.sgd(0.1), torn).init({"w": np.zeros(8)})
    except ValueError as error:
        told = str(error).split(".")[0]
    return [strategy.num_towers, round(float(metrics["loss"]), 3), parts, read, told]


def shared_values_of_the_first(me):
    """All that is not the same on all processes, but for the first batch's."""

    def loss_fn(w, batch, tower):
        seed = jax.random.key_data(batch["by"]["key"])[1]
        rate = batch["by"]["rate"] * (1 + seed)
        return tj.Weighted.mean(w * batch["x"] * rate, tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(1.0), FOUR)
    state = step.init(np.float32(0))
    given = [
        {**rows(8), "by": tj.Whole({"rate": rate, "key": jax.random.key(seed)})}
        for rate, seed in ((1.0, 0), (2.0 + me, 0), (jnp.float32(4 - me), me))
    ]
    for batch in given[:2]:
        state, _ = step(state, batch)
    state, _ = tj.run(step, state, given, progress=False)
    part = {**rows(4, start=4 * me), "by": given[-1]["by"]}
    for batch in step.strategy.distribute_dataset(lambda context: [part] * 2):
        state, _ = step(state, batch)
    assert step.locate(state, given[2]) == ()
    assert step.report(state, given[2], timed_calls=1).timing.calls == 1
    return [float(x.data) for x in state.params.addressable_shards]


def begun(params=0, **options):
    return step_of(tj.Mirrored(**options)).init(np.float32(params))


def ran(step, batches, **options):
    state = step.init(np.float32(0))
    return tj.run(step, state, batches, progress=False, **options)


def counts(batches, **options):
    """The rows of each tower of batches, of each process' own."""
    dataset = FOUR.distribute_dataset(lambda context: batches, **options)
    return [placed.counts.tolist() for placed in dataset]


def ends(me, remainder):
    """Process 0 has batches of 4, 4 and 3 rows, process 1 of 4 rows and none."""
    return counts([rows(n) for n in ([4, 0] if me else [4, 4, 3])], remainder=remainder)


# fmt: off
SHORT = {
    "differing_towers": lambda me: begun(towers=4 * (me + 1)),
    "differing_params": lambda me: begun(np.zeros(2 + me), towers=4),
    "pmap": lambda me: begun(executor="pmap"),
    "one_process_has_more_devices": lambda me: begun(devices=CPUS[:3]),
    "devices_out_of_order": lambda me: begun(devices=CPUS[2:] + CPUS[:2]),
    "towers_not_for_all": lambda me: tj.Mirrored(towers=3).placement,
    "destination_of_one_process": lambda me: FOUR.reduce(
        tj.Reduction.SUM, VERBS.worker_device_index, destinations="cpu:0"),
    "other_numbers_on_towers": lambda me: VERBS.call_for_each_tower(
        lambda tower, x: tower.reduce(tj.Reduction.SUM, tower.id * x), 1.0 + me),
    "other_steps_on_data": lambda me: VERBS.run_steps_on_dataset(
        lambda ctx, n, batch: n + me, iter(FOUR.distribute_dataset([rows(8)])), 1,
        np.float32(0)),
    "other_numbers_in_the_optimizer": lambda me: ran(
        tj.build_train_step(loss_fn, optax.sgd(0.1 * (1 + me)), FOUR), [rows(8)]),
    "other_options": lambda me: ran(
        step_of(FOUR, on_nonfinite=("raise", "skip")[me]), [rows(8)]),
    "other_numbers_of_steps": lambda me: ran(step_of(FOUR), [rows(4)] * (3 - me)),
    "other_numbers_of_batches": lambda me: tj.evaluate(
        tj.build_predict_step(lambda w, b, tower: w * b["x"], FOUR), np.float32(2),
        [rows(8)] * (2 + me)),
    "checkpoints_of_one_process": lambda me: ran(
        step_of(tj.Mirrored(devices=CPUS[2 * me : 2 * me + 1])), [rows(8)],
        checkpointer=tj.Checkpointer("nowhere")),
    "one_ends_early": lambda me: counts([rows(4)] * (2 + me), remainder="error"),
    "elements_of_each": lambda me: counts([rows(2 + me)] * (5 + me), split="elements"),
    "one_is_empty": lambda me: counts([rows(4)] * me),
    "no_leaves": lambda me: counts([rows(2) if me else {}]),
    "ends_pad": lambda me: ends(me, "pad"),
    "ends_drop": lambda me: ends(me, "drop"),
    "ends_error": lambda me: ends(me, "error"),
}
# fmt: on


def data_twice(me):
    """Gone through again, and twice at once."""
    source = lambda context: [rows(context.part_of(8))] * 3  # noqa: E731
    data = FOUR.distribute_dataset(source)
    return [sum(1 for _ in data), sum(1 for _ in zip(data, data, strict=True))]


LONG = {
    name: fn
    for name, fn in list(globals().items())
    if inspect.isfunction(fn) and [*inspect.signature(fn).parameters] == ["me"]
}


def told(folder):
    """What each scenario returns or fails with; the last one writes to the folder."""
    me = jax.process_index()
    told = {}
    # Each process sees another folder of this name, as on its own disk.
    own = tj.Checkpointer(pathlib.Path(folder) / f"own {me}")
    named = SHORT | LONG
    named["folders_of_each"] = lambda me: ran(
        step_of(FOUR), [rows(8)], checkpointer=own
    )
    named["written"] = lambda me: writes.written(me, pathlib.Path(folder))
    for name, scenario in named.items():
        quickly.compiled("bits" not in name)
        try:
            told[name] = scenario(me)
        except ValueError as error:
            told[name] = str(error)
        except Exception:
            told[name] = traceback.format_exc()
    return told
