"""What is compiled, and how often: traces, collectives, donated buffers."""

import contextlib
import dataclasses
import gc
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import mirrored
from layouts import names as devices

import towerjax as tj

LAYERS = 2
WIDTH = 8


def params(layers=1):
    rng = np.random.default_rng(0)
    return [
        {
            "w": rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / WIDTH**0.5,
            "b": np.zeros(WIDTH, np.float32),
        }
        for _ in range(layers)
    ]


def loss_fn(params, batch, tower):
    x = batch["x"]
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"][None])
    return tj.TowerOutput(
        loss=tj.Weighted.mean((x**2).mean(-1), tower.weight),
        metrics={"largest": tj.Weighted.mean(jnp.abs(x).max(-1), tower.weight)},
    )


def batch(rows=32):
    rng = np.random.default_rng(1)
    return {"x": rng.normal(size=(rows, WIDTH)).astype(np.float32)}


def lines_with(text, *operations):
    return [
        line
        for line in text.splitlines()
        if any(f" {op}(" in line or f" {op}-start(" in line for op in operations)
    ]


LOCAL = tj.TowerLocal(np.zeros(3, np.float32), tj.Reduction.MEAN)
COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter",
               "collective-permute", "collective-broadcast")  # fmt: skip


@pytest.mark.slow
def test_one_all_reduce_for_all_gradients():
    strategy = tj.Mirrored(devices=devices(2))
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy, micro_batches=4)
    program = step.program(step.init(params(LAYERS)), batch())
    found = lines_with(program.call.as_text(), *COLLECTIVES)
    assert len(found) == 1 and " all-reduce(" in found[0], found
    # One flat buffer of all gradients, two sums and three weights.
    numbers = LAYERS * (WIDTH * WIDTH + WIDTH) + 5
    assert f"f32[{numbers}]" in found[0]


@pytest.mark.slow
def test_a_device_of_one_tower_runs_the_trace_that_was_proved():
    class Counted(tj.collectives.AllReduce):
        traces = 0

        def sum_over_towers(self, tree, axes):
            Counted.traces += 1
            return super().sum_over_towers(tree, axes)

    strategy = tj.Mirrored(devices=devices(2), cross_tower_ops=Counted())
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    jax.make_jaxpr(step.fn)(step.init(params()), batch())
    assert Counted.traces == 1


@pytest.mark.slow
def test_large_leaves_travel_alone_in_the_same_all_reduce():
    wide = {"w": np.ones((600, 600), np.float32), "b": np.zeros(600, np.float32)}

    def loss_fn(params, batch, tower):
        out = batch["x"][:, :1] * params["w"].sum(0)[None] + params["b"][None]
        return tj.Weighted.mean((out**2).sum(-1), tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(devices(2)))
    text = step.program(step.init(wide), batch()).call.as_text()
    found = lines_with(text, *COLLECTIVES)
    assert len(found) == 1
    # The bias shares its buffer with what comes after the weights: loss, rows, weight.
    assert "f32[600,600]" in found[0] and "f32[603]" in found[0]


@pytest.mark.slow
def test_pinned_tree_moves_its_parts_once():
    strategy = tj.Mirrored(devices=devices(4), cross_tower_ops=tj.PinnedTree())
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    text = step.program(step.init(params()), batch()).call.as_text()
    assert len(lines_with(text, "all-to-all")) == 1
    assert len(lines_with(text, "all-gather")) == 1
    assert len(lines_with(text, *COLLECTIVES)) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "executor", "tower_loop", "towers", "ops"),
    [(2, "shard_map", "scan", 4, tj.AllReduce()),
     (2, "pmap", "vmap", 2, tj.PinnedTree()),
     (1, "shard_map", "vmap", 1, tj.AllReduce())],
)  # fmt: skip
def test_one_trace_one_compile_and_donated_buffers(
    count, executor, tower_loop, towers, ops, compiled
):
    traces = []

    def counting(params, batch, tower):
        traces.append(tower)
        return loss_fn(params, batch, tower)

    how = {"executor": executor, "cross_tower_ops": ops}
    strategy = mirrored(towers, count, tower_loop, **how)
    optimizer = optax.sgd(1e-3, momentum=0.9)
    # A proof of equality traces the loss of one tower, too.
    options = {"remainder": "pad", "audit": False}
    step = tj.build_train_step(counting, optimizer, strategy, **options)
    state = step.init(params(), local=LOCAL)
    placed = step.place_batch(batch())
    program = step.program(state, placed)
    found = lines_with(program.call.as_text(), *COLLECTIVES)
    assert bool(found) == (count > 1)
    leaves = jax.tree.leaves((state.params, state.opt_state))
    size = sum(x.nbytes for x in leaves)
    assert program.call.memory_analysis().alias_size_in_bytes >= size
    compiled.clear()
    state, _ = step(state, placed)  # the first buffers came from the host
    assert len(compiled) == 0
    # For its proof, for the devices, for each trip of a loop: the very same program.
    assert len(traces) == 1
    where = pointers(state)
    before = state
    for rows in (32, 32, 27, 1, 31):  # ragged batches are filled up: no new program
        state, _ = step(state, batch(rows))
    # That padding is masked is seen in that program too.
    assert len(traces) == 1 and compiled == []
    assert int(state.step) == 6
    assert all(x.is_deleted() for x in jax.tree.leaves(before.params))
    assert pointers(state) == where


def pointers(state):
    return [
        x.addressable_shards[0].data.unsafe_buffer_pointer()
        for x in jax.tree.leaves(state.params)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_one_program_for_init_and_the_first_call(count, caplog):
    strategy = tj.Mirrored(devices(count))
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    key = jax.random.key(0)  # as a user has made it
    given = [{"w": np.ones((WIDTH, WIDTH), np.float32), "b": np.ones(WIDTH)}]
    given += [{"w": np.ones((WIDTH, count), np.float32), "b": np.ones(count)}]
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        step(step.init(given, rng=key), batch())
    lines = [x.getMessage() for x in caplog.records]
    compiled = [x for x in lines if x.startswith("Finished XLA compilation")]
    assert len(compiled) == 1 and "jit(step)" in compiled[0], compiled


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_a_program_for_full_batches_reads_no_weights(count):
    strategy = tj.Mirrored(devices=devices(count), towers=2)

    def loss_fn(w, batch, tower):
        return tj.Weighted.mean((w - batch) ** 2, tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(0.5), strategy)
    x = np.array([1, 2, 4, 9], np.float32)
    state, _ = step(step.init(0.0), x)
    assert float(state.params) == 4
    [full] = step.programs.compiled.values()
    assert full.is_full and not reads_counts(full)
    assert " iota(" not in full.call.as_text()
    # Rows that were padded elsewhere need their weights: from now on by one program.
    [padded] = strategy.distribute_dataset([x[:3]])
    state, _ = step(state, padded)
    np.testing.assert_allclose(state.params, 7 / 3, rtol=1e-6)
    [general] = step.programs.compiled.values()
    assert not general.is_full and reads_counts(general)
    state, _ = step(state, x)
    assert float(state.params) == 4
    assert [*step.programs.compiled.values()] == [general]


@pytest.mark.slow
@pytest.mark.parametrize("remainder, ops, may", [
    ("drop", tj.AllReduce(), True), ("drop", tj.PinnedTree(), False),
    ("pad", tj.AllReduce(), False),
])  # fmt: skip
def test_weights_are_left_out_where_they_may_be(remainder, ops, may):
    """Not with `PinnedTree`, whose bits are those of any other program."""
    strategy = mirrored(2, tower_loop="scan", cross_tower_ops=ops)
    step = tj.build_train_step(loss_fn, optax.sgd(0.5), strategy, remainder=remainder)
    found = step.program(step.init(params()), batch())
    assert (found.is_full, reads_counts(found)) == (may, not may)


def reads_counts(program):
    """Whether a program reads how many of each tower's rows are examples."""
    given = jax.tree.leaves(program.call.args_info)
    kinds = [(x.shape, x.dtype) for x in given]
    assert kinds.count(((2,), jnp.int32)) == 1
    read = re.search(r"entry_computation_layout={\((.*?)\)->", program.call.as_text())
    return re.search(r"s32\[\d+\]", read[1]) is not None  # on a device, its towers'


@pytest.mark.slow
def test_init_copies_so_donation_spares_the_callers_arrays():
    mine = jax.tree.map(jnp.asarray, params())
    kept = jax.tree.map(np.array, mine)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(("cpu:0",)))
    state = step.init(mine)
    for _ in range(2):
        state, _ = step(state, batch())
    assert not any(x.is_deleted() for x in jax.tree.leaves(mine))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(kept), strict=True):
        np.testing.assert_array_equal(a, b)


# Each has a leaf of its own.


def twins():
    """An optimizer whose state holds constants, inputs and one value twice."""

    def update_fn(grads, state, params=None):
        same = state["a"] + 1
        state = {"a": same, "b": same, "c": jnp.float32(5), "d": state["d"]}
        return jax.tree.map(lambda g: -0.1 * g, grads), state

    start = {"a": 0.0, "b": 10.0, "c": 7.0, "d": 3.0}
    state = {name: jnp.float32(value) for name, value in start.items()}
    return optax.GradientTransformation(lambda params: state, update_fn)


@pytest.mark.slow
def test_a_refused_step_leaves_each_leaf_as_it_was():
    def counting(params, batch, tower):
        rows = tj.Sum(tower.extra / tower.num_towers + tower.weight.sum())
        return dataclasses.replace(loss_fn(params, batch, tower), extra=rows)

    strategy = tj.Mirrored(devices(2))
    how = {"on_nonfinite": "skip"}
    step = tj.build_train_step(counting, twins(), strategy, **how)
    state = step.init(params(), extra=np.float32(7))
    poisoned = batch()
    poisoned["x"][0, 0] = np.nan
    state, _ = step(state, poisoned)
    kept = jax.tree.map(float, state.opt_state)
    assert kept == {"a": 0.0, "b": 10.0, "c": 7.0, "d": 3.0} and state.extra == 7
    state, _ = step(state, batch())
    kept = jax.tree.map(float, state.opt_state)
    assert kept == {"a": 1.0, "b": 1.0, "c": 5.0, "d": 3.0} and state.extra == 7 + 32


@pytest.mark.slow
def test_an_interrupt_during_compilation_waits_for_it(monkeypatch, compiled):
    inner = jax.stages.Lowered.compile

    def interrupted(self, *args, **options):
        signal.raise_signal(signal.SIGINT)
        return inner(self, *args, **options)

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(devices(2)))
    state = step.init(params())
    data = batch()
    compiled.clear()
    monkeypatch.setattr(jax.stages.Lowered, "compile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(state, data)
    assert len(compiled) == 1
    monkeypatch.undo()
    state, _ = step(state, data)
    assert int(state.step) == 1


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("ask", ["program", "check"])
def test_the_collector_pauses_while_a_step_is_traced_and_proved(ask, enabled, fails):
    def traced(params, batch, tower):
        seen.append(gc.isenabled())
        assert not fails
        return loss_fn(params, batch, tower)

    seen = []
    step = tj.build_train_step(traced, optax.sgd(0.1), tj.Mirrored(towers=2))
    given = step.init(params()), batch()
    (gc.enable if enabled else gc.disable)()
    try:
        with contextlib.suppress(AssertionError):
            getattr(step, ask)(*given)
        calls = 1 if fails else 2  # for the step's towers, and for one tower
        assert (seen, gc.isenabled()) == ([False] * calls, enabled)
    finally:
        gc.enable()
