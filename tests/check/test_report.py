"""What a report says of a compiled step, against counts by hand."""

import dataclasses
import json
import pathlib
import re
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from layouts import names as devices

import towerjax as tj
from towerjax.check.report.hlo import (
    CompiledCollective,
    Shape,
    collectives_of,
    parse,
    ring_bytes,
)
from towerjax.check.report.report import time_calls
from towerjax.types.tables import Table, as_text

IN = 5
HIDDEN = 7
OUT = 3
LOOPS = 4
NUMBERS = IN * HIDDEN + HIDDEN + HIDDEN * HIDDEN + HIDDEN * OUT


def params():
    draw = np.random.default_rng(0)
    shapes = {"in": (IN, HIDDEN), "b": (HIDDEN,), "loop": (HIDDEN, HIDDEN)}
    shapes["out<&>"] = (HIDDEN, OUT)
    return {k: draw.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def loss_fn(params, batch, tower):
    x = jnp.tanh(batch["x"] @ params["in"] + params["b"][None])
    x, _ = jax.lax.scan(
        lambda x, _: (jnp.tanh(x @ params["loop"]), None), x, None, length=LOOPS
    )
    return tj.Weighted.mean(((x @ params["out<&>"]) ** 2).sum(-1), tower.weight)


def batch(rows=48):
    draw = np.random.default_rng(1)
    return {"x": draw.normal(size=(rows, IN)).astype(np.float32)}


def report(strategy, *, timed_calls=0, **options):
    step = tj.build_train_step(loss_fn, optax.adam(1e-3), strategy, **options)
    state = step.init(params())
    found = step.report(state, batch(), timed_calls=timed_calls)
    assert not any(x.is_deleted() for x in jax.tree.leaves(state))
    # What the compiler says is the same.
    analysis = step.program(state, batch()).call.memory_analysis()
    kinds = found.memory.by_kind
    others = ("results not aliased", "temporaries", "code")
    held = sum(size for kind, size in kinds.items() if kind not in others)
    assert held == found.memory.arguments == analysis.argument_size_in_bytes
    own = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    planned = analysis.temp_size_in_bytes, analysis.generated_code_size_in_bytes
    assert [kinds[kind] for kind in others] == [own, *planned]
    _, entry = step.program(state, batch()).call.as_text().split("\nENTRY ")
    assert found.kernels == entry.partition("\n}")[0].count(" fusion(")
    assert found.flops == step.program(state, batch()).call.cost_analysis()["flops"]
    return found


@pytest.fixture(scope="module")
def of_eight():
    strategy = tj.Mirrored(devices(8))
    return report(strategy, micro_batches=3, timed_calls=2)


@pytest.mark.slow
def test_several_towers_on_one_device_send_nothing():
    found = report(tj.Mirrored(devices(1), towers=4), donate=False)
    assert found.collectives == () and found.bytes_sent == 0
    assert (found.towers, found.devices) == (4, 1)
    assert found.memory.aliased == 0  # of a state that is kept


@pytest.mark.slow
def test_one_all_reduce_with_its_bytes(of_eight):
    (found,) = of_eight.collectives
    size = 4 * (NUMBERS + 3)  # and the loss, with both weights
    assert (found.opcode, found.bytes, found.num_devices) == ("all-reduce", size, 8)
    assert found.sent == of_eight.bytes_sent == -(-2 * size * 7 // 8)
    assert (found.trips, found.trips_known, found.dtypes) == (1, True, ("f32",))
    assert re.search(r"ops\.py:\d+ \(AllReduce\._send\)", found.line)


def squares(params, batch, tower):
    return tj.Weighted.mean((batch["x"] @ params["w"]) ** 2, tower.weight)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["shard_map", "pmap"])
def test_a_pinned_tree_sends_the_bytes_of_an_all_reduce(executor):
    ops = tj.PinnedTree()
    values = {"w": np.ones(IN, np.float32)}
    strategy = tj.Mirrored(devices(8), executor=executor, cross_tower_ops=ops)
    step = tj.build_train_step(squares, optax.sgd(0.1), strategy)
    found = step.report(step.init(values), batch())
    share = -(-(IN + 2) // 8)
    to_all, gather = found.collectives
    assert (to_all.opcode, to_all.bytes) == ("all-to-all", 4 * share * 8)
    assert (gather.opcode, gather.bytes) == ("all-gather", 4 * share)
    assert to_all.sent == gather.sent == 4 * share * 7
    assert found.bytes_sent == 2 * 4 * share * 7
    assert found.memory.by_kind["parameters"] == found.memory.aliased == 4 * IN
    assert found.memory.by_kind["batch"] == 4 * 6 * IN + 4  # and the counts


@pytest.mark.slow
def test_the_users_line_and_the_trips_of_a_collective_in_a_loop():
    def talks(params, batch, tower):
        def body(x, _):
            return x + tower.reduce(tj.Reduction.SUM, x.sum()), None  # here

        x, _ = jax.lax.scan(body, batch["x"][:, 0] * params, None, length=3)
        return tj.Weighted.mean(x, tower.weight)

    step = tj.build_train_step(talks, optax.sgd(0.1), tj.Mirrored(devices(2)))
    found = step.report(step.init(np.float32(2)), batch(4)).collectives
    inside = [c for c in found if c.trips == 3]
    assert inside and all(c.bytes == 4 for c in inside)
    text = pathlib.Path(__file__).read_text().splitlines()
    number = 1 + next(i for i, line in enumerate(text) if line.endswith("  # here"))
    lines = {c.line for c in inside}
    assert any(f"test_report.py:{number} (body)" in line for line in lines), lines
    assert [c.trips for c in found if c not in inside] == [1]


@pytest.mark.slow
def test_memory_counts_what_is_taken_over_once(of_eight):
    memory = of_eight.memory
    kinds = memory.by_kind
    assert kinds["parameters"] == 4 * NUMBERS
    assert kinds["optimizer state"] == 2 * 4 * NUMBERS + 4
    assert kinds["batch"] == 4 * 6 * IN  # not the counts: nothing is padded
    assert kinds["other"] == 4 + 4  # the step, and the step flag of those before
    assert memory.aliased == 3 * 4 * NUMBERS + 4
    # The next step, the loss, the step flag, and the address of each result.
    assert kinds["results not aliased"] == 12 + 8 * (3 * 4 + 1 + 3)
    assert set(kinds) - {"temporaries", "code"} == {
        *("parameters", "optimizer state", "batch", "other", "results not aliased")
    }  # nobody draws, so that the program does not read the key
    assert memory.fits and memory.peak >= memory.arguments


@pytest.mark.slow
def test_several_steps_in_a_program_say_that_their_trips_are_unknown():
    strategy = tj.Mirrored(devices(2))
    step = tj.build_train_step(squares, optax.sgd(0.1), strategy)

    def steps(state, batch, number):
        one = lambda _, state: step.fn(state, batch)[0]  # noqa: E731
        return jax.lax.fori_loop(0, number, one, state)

    state = step.init({"w": np.ones(IN, np.float32)})
    placed = step.place_batch(batch(8))
    found = tj.tools.report_of(jax.jit(steps), (state, placed, jnp.int32(3)), strategy)
    (reduce,) = found.collectives
    assert not reduce.trips_known and "unknown" in str(found)
    assert found.memory.by_kind["batch"] == 4 * 4 * IN + 4


@pytest.mark.slow
def test_a_report_is_plain_values_and_text(of_eight):
    found = json.loads(json.dumps(dataclasses.asdict(of_eight), allow_nan=False))
    assert found["timing"]["calls"] == 2 and found["collectives"]
    timing = of_eight.timing
    assert 0 < timing.dispatch_s <= timing.step_s < 10 and of_eight.compile_s > 0
    for words in ("optimizer state", "all-reduce", "8 towers on 8", "most at once"):
        assert words in str(of_eight)
    assert "[bold]" in as_text([Table("t", ("a",), (("[bold]",),))])


def test_a_call_is_done_when_its_results_are_there():
    class Late:
        def block_until_ready(self):
            time.sleep(0.02)

    calls = []

    def call(number):
        calls.append(number)
        return number + 1, Late()

    timing = time_calls(call, 0, calls=3)
    assert calls == [0, 1, 2, 3]  # the first of which does not count
    assert timing.calls == 3 and timing.dispatch_s < 0.02 <= timing.step_s


@pytest.mark.slow
def test_evaluations_and_models_have_reports():
    def metric_fn(params, batch, tower):
        return {"mean": tj.Weighted.mean(batch["x"] @ params["w"], tower.weight)}

    def model_fn(variables, features, labels, mode, tower):
        y = features["x"] @ variables["w"]
        if mode is tj.estimator.Mode.PREDICT:
            return tj.estimator.ModelSpec(mode, predictions={"y": y})
        loss = tj.Weighted.mean((y - labels) ** 2, tower.weight)
        return tj.estimator.ModelSpec(mode, loss=loss)

    strategy = tj.Mirrored(devices(2))
    values = {"w": np.ones((IN, 2), np.float32)}
    model = tj.estimator.replicate_model_fn(model_fn, devices=strategy)
    labelled = {"features": batch(6), "labels": np.ones((6, 2), np.float32)}
    for step, given, sent in (
        (tj.build_eval_step(metric_fn, strategy), batch(6), 8),
        (model.eval_step(), labelled, 8),
        (model.predict_step(), {"features": batch(6)}, 0),
    ):
        found = step.report(values, given, timed_calls=1)
        assert sum(c.bytes for c in found.collectives) == sent
        assert found.memory.by_kind["parameters"] == 4 * IN * 2
        assert found.timing.calls == 1


@pytest.mark.slow
def test_a_function_of_ones_own_has_a_report():
    strategy = tj.Mirrored(devices(8))
    mesh = strategy.placement.mesh
    whole = P()
    rows = P(*mesh.axis_names)
    all_rows = types.SimpleNamespace(weight=None)

    def on_device(params, batch):
        grads = jax.grad(lambda w: loss_fn(w, batch, all_rows).sum)(params)
        grads = jax.lax.psum(grads, mesh.axis_names)
        return jax.tree.map(jnp.subtract, params, grads)

    mapped = jax.shard_map(
        on_device, mesh=mesh, in_specs=(whole, rows), out_specs=whole, check_vma=False
    )
    by_hand = jax.jit(mapped, donate_argnums=0)
    found = tj.tools.report_of(by_hand, (params(), batch()), strategy)
    assert sum(each.bytes for each in found.collectives) == 4 * NUMBERS
    assert found.memory.by_kind["parameters"] == 4 * NUMBERS
    assert found.memory.aliased == 4 * NUMBERS and found.kernels > 0
    with pytest.raises(ValueError, match="report_of needs a function under jax.jit"):
        tj.tools.report_of(mapped, (params(), batch()), strategy)
    of_any = jax.jit(lambda first, *others: first + sum(others))
    found = tj.tools.report_of(of_any, (np.float32(1),) * 4, strategy)
    assert found.memory.by_kind["other"] == 16
    of_any = jax.jit(lambda params, *batch: params + sum(batch))
    found = tj.tools.report_of(of_any, (np.float32(1),) * 4, strategy)
    kinds = found.memory.by_kind
    assert (kinds["parameters"], kinds["batch"]) == (4, 12)


# Text of other compilers, written by hand after theirs.

GPU = """HloModule jit_f, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=4

FileNames
1 "train.py"

FunctionNames
1 "step"
2 "loss"

FileLocations
1 {file_name_id=1 function_name_id=1 line=9 end_line=9 column=4 end_column=5}
2 {file_name_id=1 function_name_id=2 line=7 end_line=7 column=4 end_column=5}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%async (p: bf16[8,4]) -> bf16[2,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %rs = bf16[2,4]{1,0} reduce-scatter(%p), replica_groups=[1,4]<=[4], to_apply=%add
}

%body (s: (s32[], f32[6])) -> (s32[], f32[6]) {
  %s = (s32[], f32[6]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[6]{0} get-tuple-element(%s), index=1
  %ar = f32[6]{0} all-reduce(%v), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[], f32[6]{0}) tuple(%i, %ar)
}

%test (s: (s32[], f32[6])) -> pred[] {
  %s.1 = (s32[], f32[6]{0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main () -> f32[6] {
  %b = bf16[8,4]{1,0} constant({...})
  %start = ((bf16[8,4]{1,0}), bf16[2,4]{1,0}) async-start(%b), calls=%async
  %done = bf16[2,4]{1,0} async-done(%start), calls=%async
  %zero = s32[] constant(0)
  %six = f32[6]{0} constant({...})
  %in = (s32[], f32[6]{0}) tuple(%zero, %six)
  %loop = (s32[], f32[6]{0}) while(%in), condition=%test, body=%body
  %perm = f32[6]{0} collective-permute(%six), source_target_pairs={{0,1},{1,2}}, metadata={op_name="p" stack_frame_id=2}
  ROOT %out = f32[6]{0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_groups_of_every_form_and_loops_without_end():
    scatter, reduce, permute = collectives_of(parse(GPU))
    assert (scatter.opcode, scatter.bytes, scatter.sent) == ("reduce-scatter", 64, 48)
    assert scatter.num_devices == 4
    assert (reduce.bytes, reduce.num_devices, reduce.trips_known) == (24, 2, False)
    assert (permute.sent, permute.line) == (24, "train.py:7 (loss)")
    for groups, size in {
        "mesh['a'=2,'b'=4] {'b'}": 4,
        "mesh['a'=2,'b'=4] {'a','b'}": 8,
        "mesh['a'=2,'b'=4] {'b':(1)2}": 2,
        "[2,3]<=[3,2]T(1,0)": 3,
        "{}": 4,
    }.items():
        text = GPU.replace("{{0,1},{2,3}}", groups)
        assert [*collectives_of(parse(text))][1].num_devices == size


def test_sizes_of_element_types():
    sizes = {"pred": 5, "bf16": 10, "f8e4m3fn": 5, "s4": 3, "c64": 40, "token": 0}
    assert {d: Shape(d, (5,)).bytes for d in sizes} == sizes


def test_rings_of_one_send_nothing():
    assert {ring_bytes(op, 100, 1) for op in ("all-reduce", "all-gather")} == {0}


@pytest.mark.parametrize(("end", "trips_known", "shown"), [
    (5, True, ("3", "at 5 of 9, exposed")),  # nothing runs meanwhile
    (6, True, ("3", "5 to 6 of 9, beside 64 B read and written")),
    (5, False, ("unknown", "at 5 of 9, exposed")),
])  # fmt: skip
def test_a_collective_shows_when_it_runs(end, trips_known, shown):
    sizes = ("all-reduce", 8, 8, ("f32",), 2, 3, trips_known, 5, end, 9, 64, "a.py:1")
    kind, _, _, trips, _, when, line = CompiledCollective(*sizes).cells()
    assert (kind, line) == ("all-reduce", "a.py:1")
    assert (trips, when) == shown
