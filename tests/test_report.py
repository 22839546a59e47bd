"""What a report says of a compiled step, against counts by hand."""

import dataclasses
import html.parser
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
from towerjax.step.report.flops import flops_of
from towerjax.step.report.hlo import Module, Shape, collectives_of, parse, ring_bytes
from towerjax.step.report.memory import alive_at_peak, memory_of
from towerjax.step.report.step_report import time_calls
from towerjax.types.tables import Table, as_html, as_text, in_flops

IN, HIDDEN, OUT, LOOPS = 5, 7, 3, 4
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


def matmul_flops(rows):
    """Forward once; backward twice, but for the first layer's input."""
    first, loop, last = IN * HIDDEN, HIDDEN * HIDDEN * LOOPS, HIDDEN * OUT
    return 2 * rows * (2 * first + 3 * loop + 3 * last)


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
    assert found.memory.arguments == analysis.argument_size_in_bytes
    assert found.memory.aliased == analysis.alias_size_in_bytes
    return found, analysis.output_size_in_bytes


@pytest.fixture(scope="module")
def of_eight():
    strategy = tj.Mirrored(devices(8))
    found, results = report(strategy, micro_batches=3, timed_calls=2)
    table = 8 * (3 * 4 + 1 + 2)  # of addresses, one a result
    assert found.memory.results == results - table
    return found


@pytest.fixture(scope="module")
def of_one():
    """Of four towers on one device, of a state that is kept."""
    found, _ = report(tj.Mirrored(devices(1), towers=4), donate=False)
    return found


@pytest.mark.slow
def test_flops_by_hand_loops_counted_by_their_trips(of_eight):
    # Three micro-batches of two rows each: a loop around the loops of the model.
    assert of_eight.flops.matmul == matmul_flops(48 // 8)
    assert of_eight.flops.notes == ()
    # tanh in each layer at least, and nothing like the products' number.
    assert 6 * HIDDEN * (LOOPS + 1) < of_eight.flops.other < 100_000


@pytest.mark.slow
def test_a_device_makes_the_flops_of_all_its_towers(of_one):
    assert of_one.flops.matmul == matmul_flops(48)
    assert of_one.collectives == () and of_one.bytes_sent == 0
    assert (of_one.towers, of_one.devices) == (4, 1)
    strategy = tj.Mirrored(devices(1), towers=4, local="scan")
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    traced = jax.make_jaxpr(step.fn)(step.shapes(params()), batch())
    assert flops_of(traced.jaxpr).matmul == matmul_flops(48)


@pytest.mark.slow
def test_one_all_reduce_with_its_bytes(of_eight):
    (found,) = of_eight.collectives
    size = 4 * (NUMBERS + 3)  # and the loss, with both weights
    assert (found.opcode, found.bytes, found.num_devices) == ("all-reduce", size, 8)
    assert found.sent == of_eight.bytes_sent == -(-2 * size * 7 // 8)
    assert (found.trips, found.trips_known, found.dtypes) == (1, True, ("f32",))
    assert re.search(r"ops\.py:\d+ \(_all_reduce\)", found.line)


def squares(params, batch, tower):
    return tj.Weighted.mean((batch["x"] @ params["w"]) ** 2, tower.weight)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["shard_map", "pmap"])
def test_a_pinned_tree_sends_the_bytes_of_an_all_reduce(executor):
    ops, values = tj.PinnedTree(), {"w": np.ones(IN, np.float32)}
    strategy = tj.Mirrored(devices(8), executor=executor, cross_tower_ops=ops)
    step = tj.build_train_step(squares, optax.sgd(0.1), strategy)
    found = step.report(step.init(values), batch())
    share = -(-(IN + 2) // 8)
    to_all, gather = found.collectives
    assert (to_all.opcode, to_all.bytes) == ("all-to-all", 4 * share * 8)
    assert (gather.opcode, gather.bytes) == ("all-gather", 4 * share)
    assert to_all.sent == gather.sent == 4 * share * 7
    assert found.bytes_sent == 2 * 4 * share * 7
    assert found.flops.matmul == 2 * 2 * 6 * IN
    named = {b.name: (b.kind, b.bytes, b.aliased) for b in found.memory.buffers}
    assert named["params['w']"] == ("parameters", 4 * IN, True)
    assert named["batch['x']"] == ("batch", 4 * 6 * IN, False)


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
    assert any(
        re.search(rf"test_report.py:{number} \(body\)", line) for line in lines
    ), lines
    assert [c.trips for c in found if c not in inside] == [1]


@pytest.mark.slow
def test_memory_counts_what_is_taken_over_once(of_eight):
    memory = of_eight.memory
    kinds = memory.by_kind
    assert kinds["parameters"] == 4 * NUMBERS
    assert kinds["optimizer state"] == 2 * 4 * NUMBERS + 4
    assert kinds["batch"] == 4 * 6 * IN  # not the counts: nothing is padded
    assert kinds["other"] == 4  # the step
    assert memory.aliased == 3 * 4 * NUMBERS + 4
    assert kinds["results not aliased"] == 8  # the next step and the loss
    assert memory.total == sum(kinds.values())
    assert memory.total == kinds["temporaries"] + kinds["code"] + 12 + (
        3 * 4 * NUMBERS + 4 + kinds["batch"]
    )
    assert memory.not_donated == ()
    names = {b.name for b in memory.buffers if b.aliased}
    assert "params['in']" in names and "opt_state[0].nu['loop']" in names
    (rng,) = [b for b in memory.buffers if b.name == "rng"]
    assert rng.bytes == 0  # nobody draws, so that the program does not read it


@pytest.mark.slow
def test_several_steps_in_a_program_say_that_their_trips_are_unknown():
    step = tj.build_train_step(squares, optax.sgd(0.1), tj.Mirrored(devices(2)))
    state = step.init({"w": np.ones(IN, np.float32)})
    found = step.report(state, step.place_batches([batch(8)], 3), timed_calls=1)
    (reduce,) = found.collectives
    assert not reduce.trips_known and "unknown" in str(found)
    assert found.flops.notes == ("a loop of unknown trips is counted once",)
    assert found.flops.matmul == 2 * 2 * 4 * IN  # of one step
    assert found.memory.by_kind["batch"] == 3 * 4 * 4 * IN
    assert "achieved" not in str(found)


@pytest.mark.slow
def test_buffers_of_a_state_that_is_kept_say_so(of_one):
    found = of_one.memory
    assert found.aliased == 0
    assert {b.why_not for b in found.not_donated} == {"donate=False"}
    assert len(found.not_donated) == 3 * 4 + 1
    assert found.by_kind["results not aliased"] == 3 * 4 * NUMBERS + 4 + 8


DONATED = {
    "params": {"same": jnp.ones(3), "cast": jnp.ones(5), "twice": jnp.ones((2, 2))},
    "local": {"twin": jnp.ones((2, 2)), "unread": jnp.ones(7)},
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_why_a_buffer_could_not_be_donated(monkeypatch):
    aliased, reads = Module.aliased.fget, []
    counted = property(lambda module: reads.append(module) or aliased(module))
    monkeypatch.setattr(Module, "aliased", counted)

    def f(carry, step):
        own, local = carry["params"], carry["local"]
        both = own["twice"] @ local["twin"]
        return own["same"] + step, own["cast"].astype(jnp.bfloat16), both

    compiled = jax.jit(f, donate_argnums=0).lower(DONATED, 1.0).compile()
    module = parse(compiled.as_text())
    memory = memory_of(compiled, module, roots=("state", "step"))
    found = {b.name: b.why_not for b in memory.not_donated}
    twins = {name for name in found if name.endswith(("['twice']", "['twin']"))}
    assert len(twins) == 1
    (reason,) = (found.pop(name) for name in twins)
    assert reason == "2 buffers of f32[2,2] are donated for 1 such results"
    assert found == {
        "params['cast']": "no result is f32[5]: dtype and shape must be the same",
        "local['unread']": "the program does not read it",
    }
    assert "params['same']" in {b.name for b in memory.buffers if b.aliased}
    assert len(reads) == 1  # the text, which grows with the leaves, once for all


@pytest.mark.slow
def test_a_report_is_plain_values(of_eight):
    found = json.loads(json.dumps(dataclasses.asdict(of_eight), allow_nan=False))
    assert found["timing"]["calls"] == 2 and found["collectives"]


class Tags(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.open, self.text, self.seen = [], [], set()

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        self.seen |= {tag, *(name for name, _ in attributes)}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.slow
def test_html_is_escaped_whole_and_alone(of_eight):
    page = of_eight._repr_html_()
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen == {"div", "h4", "table", "tr", "th", "td", "p", "style"}
    assert "params['out<&>']" in tags.text and "out<&>" not in page
    assert "opt_state[0].mu['in']" in tags.text and "all-reduce" in tags.text
    assert "http" not in page


@pytest.mark.slow
def test_text_shows_all_and_html_escapes(of_eight):
    for words in ("params['out<&>']", "all-reduce", "taken over", "8 towers on 8"):
        assert words in str(of_eight)
    assert "[bold]" in as_text([Table("t", ("a",), (("[bold]",),))])
    assert "<b>" not in as_html([Table("t", ("<b>",), (("<b>",),), "<b>")])


@pytest.mark.slow
def test_times_are_of_calls_that_happened(of_eight):
    timing = of_eight.timing
    assert 0 < timing.dispatch_s <= timing.step_s < 10
    assert of_eight.compile_s > 0


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


def test_an_evaluation_has_a_report():
    def metric_fn(params, batch, tower):
        return {"mean": tj.Weighted.mean(batch["x"] @ params["w"], tower.weight)}

    evaluate = tj.build_eval_step(metric_fn, tj.Mirrored(devices(2)))
    values = {"w": np.ones((IN, 2), np.float32)}
    found = evaluate.report(values, batch(6), timed_calls=1)
    assert found.flops.matmul == 2 * 3 * IN * 2
    assert sum(c.bytes for c in found.collectives) == 8
    assert found.memory.by_kind["parameters"] == 4 * IN * 2
    assert found.memory.not_donated == () and found.timing.calls == 1


def test_a_model_has_a_report_in_each_mode():
    def model_fn(variables, features, labels, mode, tower):
        y = features["x"] @ variables["w"]
        if mode is tj.estimator.Mode.PREDICT:
            return tj.estimator.ModelSpec(mode, predictions={"y": y})
        loss = tj.Weighted.mean((y - labels) ** 2, tower.weight)
        return tj.estimator.ModelSpec(mode, loss=loss)

    model = tj.estimator.replicate_model_fn(model_fn, devices=tj.Mirrored(devices(2)))
    values = {"w": np.ones((IN, 2), np.float32)}
    labelled = {"features": batch(6), "labels": np.ones((6, 2), np.float32)}
    for step, given, sent in (
        (model.eval_step(), labelled, 8),
        (model.predict_step(), {"features": batch(6)}, 0),
    ):
        found = step.report(values, given, timed_calls=1)
        assert found.flops.matmul == 2 * 3 * IN * 2
        assert sum(c.bytes for c in found.collectives) == sent
        assert found.memory.by_kind["parameters"] == 4 * IN * 2
        assert found.memory.not_donated == () and found.timing.calls == 1


# Bytes are in the comments; the loop inside holds 400 more than what it is given.
SCHEDULE = """HloModule jit_step, is_scheduled=true, input_output_alias={ {0}: (0, {}) }

%body (s: (s32[], f32[10])) -> (s32[], f32[10]) {
  %s = (s32[], f32[10]{0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %v = f32[10]{0} get-tuple-element(%s), index=1
  %wide = f32[10,10]{1,0} broadcast(%v), dimensions={0}
  %new = f32[10]{0} fusion(%wide), kind=kLoop, calls=%f
  ROOT %t = (s32[], f32[10]{0}) tuple(%i, %new)
}

ENTRY %main (w: f32[10], x: f32[30]) -> (f32[10], f32[]) {
  %w = f32[10]{0} parameter(0), metadata={op_name="donated['params']['w']"}
  %x = f32[30]{0} parameter(1), metadata={op_name="batch['x']"}
  %a = (f32[50]{0}, f32[5]{0}) fusion(%w, %x), kind=kLoop, calls=%f
  %a0 = f32[50]{0} get-tuple-element(%a), index=0
  %b = f32[25]{0} fusion(%a0), kind=kLoop, calls=%f
  %same = f32[25]{0} opt-barrier(%b)
  %flat = f32[25]{0} bitcast(%same)
  %zero = s32[] constant(0)
  %start = (s32[], f32[10]{0}) tuple(%zero, %w)
  %c = f32[BIG]{0} fusion(%b), kind=kLoop, calls=%f, metadata={op_name="jit(step)/big"}
  %l = (s32[], f32[10]{0}) while(%start), condition=%f, body=%body
  %l1 = f32[10]{0} get-tuple-element(%l), index=1
  %d = (f32[10]{0}, f32[]) fusion(%l1, %flat), kind=kLoop, calls=%f
  %d0 = f32[10]{0} get-tuple-element(%d), index=0
  %d1 = f32[] get-tuple-element(%d), index=1
  ROOT %r = (f32[10]{0}, f32[]) tuple(%d0, %d1)
}

%f (p: f32[]) -> f32[] {
  ROOT %p = f32[] parameter(0)
}
"""


@pytest.mark.parametrize(
    "big, expected",
    [
        # While %l runs: arguments (40, 120), %b (100) to come, and what is inside.
        (1, {"wide": 400, "batch['x']": 120, "b": 100, "params['w']": 40}),
        # While %c is made, which is not used: %b, and no %a any more.
        (200, {"jit(step)/big": 800, "batch['x']": 120, "b": 100, "params['w']": 40}),
    ],
)
def test_what_is_alive_when_most_is(big, expected):
    found = alive_at_peak(parse(SCHEDULE.replace("BIG", f"{big}")))
    assert {value.name: value.bytes for value in found} == expected
    assert [value.bytes for value in found] == sorted(expected.values(), reverse=True)


STARTED = """HloModule jit_step, is_scheduled=true

ENTRY %main (x: f32[10]) -> f32[] {
  %x = f32[10]{0} parameter(0), metadata={op_name="batch['x']"}
  %packed = (f32[50]{0}, f32[5]{0}) fusion(%x), kind=kLoop, calls=%f
  %a = f32[50]{0} get-tuple-element(%packed), index=0
  %b = f32[5]{0} get-tuple-element(%packed), index=1
  %sum = ((f32[50]{0}, f32[5]{0}), (f32[50]{0}, f32[5]{0})) all-reduce-start\
(%a, %b), to_apply=%f, \
output_to_operand_aliasing={{1,0}: (0, {}), {1,1}: (1, {})}
  %sums = (f32[50]{0}, f32[5]{0}) all-reduce-done(%sum)
  %part = f32[50]{0} get-tuple-element(%sums), index=0
  %added = f32[50]{0} fusion(%part, %x), kind=kLoop, calls=%f, \
output_to_operand_aliasing={{}: (0, {})}
  %gather = (f32[50]{0}, f32[400]{0}) all-gather-start(%added), dimensions={0}
  %all = f32[400]{0} all-gather-done(%gather)
  ROOT %loss = f32[] fusion(%all), kind=kLoop, calls=%f
}

%f (p: f32[]) -> f32[] {
  ROOT %p = f32[] parameter(0)
}
"""


def test_what_lies_in_the_memory_of_an_operand_counts_once():
    """The operands that a start returns, and results that reuse an operand's buffer."""
    found = alive_at_peak(parse(STARTED))
    sizes = {"gather": 1600, "packed": 200, "batch['x']": 40}
    assert [(value.name, value.bytes) for value in found] == [*sizes.items()]


@pytest.mark.slow
def test_the_largest_at_the_peak_are_in_the_report(of_one):
    found = of_one
    sizes = [value.bytes for value in found.at_peak]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) > 8
    assert sizes[0] == 4 * 48 * HIDDEN * LOOPS
    assert "Largest when most is held" in str(found)
    lines = [value.line for value in found.at_peak]
    assert any(re.search(r"test_report.py:\d+ \(loss_fn\)", line) for line in lines)


@pytest.mark.slow
def test_a_function_of_ones_own_stands_beside_the_step(of_eight):
    strategy = tj.Mirrored(devices(8))
    mesh = strategy.placement.mesh
    whole, rows = P(), P(*mesh.axis_names)
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
    assert found.flops.matmul == matmul_flops(48 // 8)
    assert sum(each.bytes for each in found.collectives) == 4 * NUMBERS
    assert found.memory.by_kind["parameters"] == 4 * NUMBERS
    assert found.memory.not_donated == () and found.kernels > 0
    beside = of_eight.beside(found)
    (table,) = beside.tables()
    assert table.title == "8 towers on 8 devices (cpu), each device in one call"
    both = {name: cells for name, *cells in table.rows}
    products = in_flops(matmul_flops(48 // 8))
    assert both["matrix products and convolutions"] == [products, products]
    assert both["fused kernels"] == [f"{of_eight.kernels}", f"{found.kernels}"]
    assert "held at most" in str(beside) and "<table>" in beside._repr_html_()
    with pytest.raises(ValueError, match="report_of expects a function under jax.jit"):
        tj.tools.report_of(mapped, (params(), batch()), strategy)
    of_any = jax.jit(lambda first, *others: first + sum(others))
    found = tj.tools.report_of(of_any, (np.float32(1),) * 4, strategy)
    assert len(found.memory.buffers) == 4


def test_a_negative_number_of_calls_is_refused():
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(devices(1)))
    with pytest.raises(ValueError, match="timed_calls=-1 must be a whole number >= 0"):
        step.report(step.shapes(params()), batch(), timed_calls=-1)


# Text of other compilers, written by hand after theirs.

GPU = """HloModule jit_f, input_output_alias={ {0}: (0, {}, may-alias) }, num_partitions=4

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

ENTRY %main (x: bf16[3,8,16], w: bf16[3,16,4], y: f32[2,9,9,5]) -> f32[6] {
  %x = bf16[3,8,16]{2,1,0} parameter(0), metadata={op_name="x"}
  %w = bf16[3,16,4]{2,1,0:T(8,128)(2,1)} parameter(1), metadata={op_name="w"}
  %y = f32[2,9,9,5]{3,2,1,0} parameter(2)
  %k = f32[3,3,5,7]{3,2,1,0} constant({...})
  %gemm = (bf16[3,8,4]{2,1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={"x":")"}
  %conv = (f32[2,4,4,7]{3,2,1,0}, u8[0]{0}) custom-call(%y, %k), window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convForward"
  %gy = f32[2,4,4,7]{3,2,1,0} get-tuple-element(%conv), index=0
  %gx = (f32[2,9,9,5]{3,2,1,0}, u8[0]{0}) custom-call(%gy, %k), window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardInput"
  %gk = (f32[3,3,5,7]{3,2,1,0}, u8[0]{0}) custom-call(%y, %gy), window={size=3x3 stride=2x2}, dim_labels=b01f_01io->b01f, custom_call_target="__cudnn$convBackwardFilter"
  %topk = (f32[2]{0}, s32[2]{0}) custom-call(%gy), custom_call_target="TopK"
  %b = bf16[8,4]{1,0} constant({...})
  %start = ((bf16[8,4]{1,0}), bf16[2,4]{1,0}) async-start(%b), calls=%async
  %done = bf16[2,4]{1,0} async-done(%start), calls=%async
  %zero = s32[] constant(0)
  %six = f32[6]{0} constant({...})
  %in = (s32[], f32[6]{0}) tuple(%zero, %six)
  %loop = (s32[], f32[6]{0}) while(%in), condition=%test, body=%body
  %perm = f32[6]{0} collective-permute(%six), source_target_pairs={{0,1},{1,2}}, metadata={op_name="p" source_file="train.py" source_line=7}
  ROOT %out = f32[6]{0} get-tuple-element(%loop), index=1
}
"""  # noqa: E501


def test_what_is_taken_over_stands_in_the_header():
    module = parse(GPU)
    assert module.aliased == {0: 0}
    assert str(module.parameters[1].shapes[0]) == "bf16[3,16,4]"


def test_groups_of_every_form_and_loops_without_end():
    scatter, reduce, permute = collectives_of(parse(GPU))
    assert (scatter.opcode, scatter.bytes, scatter.num_devices) == (
        "reduce-scatter", 64, 4)  # fmt: skip
    assert scatter.sent == 48
    assert (reduce.bytes, reduce.num_devices, reduce.trips_known) == (24, 2, False)
    assert (permute.sent, permute.line) == (24, "train.py:7")
    for groups, size in {
        "mesh['a'=2,'b'=4] {'b'}": 4,
        "mesh['a'=2,'b'=4] {'a','b'}": 8,
        "mesh['a'=2,'b'=4] {'b':(1)2}": 2,
        "[2,3]<=[3,2]T(1,0)": 3,
        "{}": 4,
    }.items():
        text = GPU.replace("{{0,1},{2,3}}", groups)
        assert collectives_of(parse(text))[1].num_devices == size


def test_sizes_of_element_types():
    sizes = {"pred": 5, "bf16": 10, "f8e4m3fn": 5, "s4": 3, "c64": 40, "token": 0}
    assert {d: Shape(d, (5,)).bytes for d in sizes} == sizes


def test_rings_of_one_send_nothing():
    assert {ring_bytes(op, 100, 1) for op in ("all-reduce", "all-gather")} == {0}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["MIRRORED", "ROUND_ROBIN"])
def test_a_replicated_model_has_a_report(where):
    optimizer = tj.estimator.TowerOptimizer(optax.sgd(0.1))

    def model_fn(variables, features, labels, mode, tower):
        def loss_fn(p):
            return tj.Weighted.mean((features @ p["w"]) ** 2, tower.weight)

        loss, after = optimizer.minimize(loss_fn, variables)
        return tj.estimator.ModelSpec(mode, loss=loss, train_op=after)

    model = tj.estimator.replicate_model_fn(
        model_fn,
        tj.estimator.LossReduction.SUM_BY_NONZERO_WEIGHTS,
        tj.Mirrored(devices(2)),
        variable_placement=tj.estimator.VariablePlacement[where],
    )
    values = {"w": np.ones((IN, 2), np.float32)}
    state = model.init(tj.TrainState.create(values, optimizer))
    data = {"features": batch(6)["x"], "labels": None}
    step = model.train_step(donate=where == "MIRRORED")
    found = step.report(state, data, timed_calls=1)
    assert found.flops.matmul == 2 * 2 * 3 * IN * 2  # forward, and one gradient
    assert found.memory.by_kind["parameters"] == 4 * IN * 2
    (weights,) = [b for b in found.memory.buffers if b.name == "params['w']"]
    assert weights.aliased == (where == "MIRRORED")
    step(state, data)  # the report has taken nothing of it
