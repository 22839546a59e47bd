"""What a plan says from shapes alone, against counts by hand and compiled steps."""

import dataclasses
import itertools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from layouts import names as devices

import towerjax as tj
from towerjax.step.report.compiled_flops import flops_of
from towerjax.step.report.dispatch import Timing
from towerjax.step.report.formulas import Window, conv_flops
from towerjax.step.report.hlo import parse
from towerjax.tools.cli import main
from towerjax.tools.report.hardware import _KNOWN
from towerjax.tools.report.link_model import seconds_to_compute, seconds_to_send
from towerjax.tools.report.traced_work import temporary_bytes, work_of

IN, HIDDEN, LOOPS = 5, 7, 4


def params():
    draw = np.random.default_rng(0)
    shapes = {"in": (IN, HIDDEN), "b": (HIDDEN,), "loop": (HIDDEN, HIDDEN)}
    return {k: draw.normal(size=s).astype(np.float32) for k, s in shapes.items()}


def loss_fn(params, batch, tower):
    x = jnp.tanh(batch["x"] @ params["in"] + params["b"][None])
    x, _ = jax.lax.scan(
        lambda x, _: (jnp.tanh(x @ params["loop"]), None), x, None, length=LOOPS
    )
    return tj.Weighted.mean((x**2).sum(-1), tower.weight)


def rows(count):
    return {"x": jax.ShapeDtypeStruct((count, IN), jnp.float32)}


def traced(f, *args):
    return work_of(jax.make_jaxpr(f)(*args).jaxpr).flops


def compiled(f, *args):
    return flops_of(parse(jax.jit(f).lower(*args).compile().as_text()))


def attention(q, k, v):
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2.0)
    return (jnp.einsum("bhqk,bkhd->bqhd", scores, v) ** 2).sum()


@pytest.mark.slow
def test_attention_by_hand_traced_and_compiled():
    b, q, k, h, d = 2, 5, 6, 3, 4
    draw = np.random.default_rng(2)
    args = [draw.normal(size=(b, n, h, d)).astype(np.float32) for n in (q, k, k)]
    both = jax.value_and_grad(attention, (0, 1, 2))
    one = 2 * b * h * q * k * d
    # Two products forward, and of each both gradients.
    assert traced(both, *args).matmul == 6 * one
    assert compiled(both, *args).matmul == 6 * one
    assert traced(attention, *args).matmul == 2 * one


@pytest.mark.few_fast(1)
@pytest.mark.parametrize(
    "stride, padding, groups, dilation",
    [((1, 1), "SAME", 1, 1), ((2, 3), ((2, 0), (1, 2)), 1, 2), ((2, 1), "VALID", 2, 1)],
)
def test_convolutions_traced_as_compiled(stride, padding, groups, dilation):
    def f(x, k):
        y = jax.lax.conv_general_dilated(
            x,
            k,
            stride,
            padding,
            rhs_dilation=(dilation, dilation),
            feature_group_count=groups,
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return (y**2).sum()

    x, k = jnp.ones((2, 9, 8, 4)), jnp.ones((3, 2, 4 // groups, 6))
    both = jax.value_and_grad(f, (0, 1))
    forward = traced(f, x, k).matmul
    assert traced(both, x, k).matmul == 3 * forward
    if groups == 1:  # XLA makes a dense kernel of a grouped gradient's
        assert compiled(both, x, k).matmul == 3 * forward


def test_pairs_in_a_convolution_counted_one_by_one():
    for size, stride, low, high, base, dilation in itertools.product(
        (1, 3), (1, 2), (-1, 0, 2), (0, 3), (1, 2), (1, 2)
    ):
        length, found = 5, 0
        spread = np.zeros((length - 1) * base + 1)
        spread[::base] = 1
        padded = np.pad(spread[max(-low, 0) :], (max(low, 0), high))
        start = 0
        while start + (size - 1) * dilation < len(padded):
            found += int(padded[start : start + size * dilation : dilation].sum())
            start += stride
        window = Window(size, stride, low, high, base, dilation)
        assert window.pairs(length) == found, window
        assert conv_flops((length,), (window,), 3, 4) == 2 * found * 12


@pytest.mark.slow
def test_loops_and_branches_of_a_trace():
    def f(x):
        x = jax.lax.fori_loop(0, 3, lambda _, x: x @ x, x)  # a scan: trips are known
        big = lambda x: x @ x @ x  # noqa: E731
        return jax.lax.cond(x[0, 0] > 0, big, lambda x: x @ x, x)

    one = 2 * 4**3
    for found in (traced(f, jnp.ones((4, 4))), compiled(f, jnp.ones((4, 4)))):
        assert found.matmul == 5 * one

    def endless(x):
        return jax.lax.while_loop(lambda x: x[0, 0] < 9, lambda x: x @ x + 1, x)

    for found in (
        traced(endless, jnp.ones((4, 4))),
        compiled(endless, jnp.ones((4, 4))),
    ):
        assert found.matmul == one
        assert found.notes == ("a loop of unknown trips is counted once",)
    found = traced(jnp.linalg.cholesky, jnp.ones((4, 4)))
    assert found.notes == ("cholesky is not counted",)


def test_other_arithmetic_one_for_each_element():
    def f(x, i):
        return jnp.tanh(x) * 2 + x.sum(), i + i

    found = traced(f, jnp.ones((3, 4)), jnp.arange(5))
    assert (found.matmul, found.other) == (0, 3 * 12 + 11)
    assert compiled(f, jnp.ones((3, 4)), jnp.arange(5)).other == found.other


def test_temporaries_live_until_their_last_use():
    def f(x):  # [10] in, 3 values at once: a, b, and either's product
        a = jnp.outer(x, x)  # 400 bytes
        b = a @ a
        return (a @ b).sum()

    # a and b and the last product, each of 400 bytes.
    jaxpr = jax.make_jaxpr(f)(jnp.ones(10, jnp.float32)).jaxpr
    assert temporary_bytes(jaxpr) == 1200

    def spread(x):  # what is broadcast is made where it is read
        return (jnp.broadcast_to(x[None], (1000, 10)).sum(0) ** 2).sum()

    jaxpr = jax.make_jaxpr(spread)(jnp.ones(10, jnp.float32)).jaxpr
    assert temporary_bytes(jaxpr) <= 80

    def chain(x):  # of which each is dead when the one after the next is made
        for _ in range(5):
            x = x @ x
        return x.sum()

    jaxpr = jax.make_jaxpr(chain)(jnp.ones((10, 10), jnp.float32)).jaxpr
    assert temporary_bytes(jaxpr) == 800

    def loop(x):
        return jax.lax.fori_loop(0, 9, lambda _, x: (x @ x) @ x, x).sum()

    # The loop's result and, inside, one product at a time besides what it returns.
    jaxpr = jax.make_jaxpr(loop)(jnp.ones((10, 10), jnp.float32)).jaxpr
    assert 800 <= temporary_bytes(jaxpr) <= 816


@pytest.mark.slow
@pytest.mark.parametrize(
    "ops", [tj.AllReduce(), pytest.param(tj.PinnedTree(), marks=pytest.mark.slow)]
)
def test_a_plan_is_what_the_compiler_makes_of_it(ops):
    strategy = tj.Mirrored(devices(8), cross_tower_ops=ops)
    step = tj.build_train_step(loss_fn, optax.adam(1e-3), strategy, micro_batches=3)
    batch = {"x": np.ones((48, IN), np.float32)}
    report = step.report(step.init(params()), batch, timed_calls=1)
    planned = tj.tools.plan(
        loss_fn,
        params(),
        rows(6),
        towers=[8],
        micro_batches=3,
        cross_tower_ops=ops,
        measured=[report],
    )
    (row,) = planned.rows
    loop = HIDDEN * HIDDEN * LOOPS
    assert row.flops.matmul == report.flops.matmul == 12 * (2 * IN * HIDDEN + 3 * loop)
    assert row.bytes_sent == report.bytes_sent > 0
    assert row.arguments == report.memory.arguments
    assert 0 < row.temporaries < 4 * report.memory.temporaries
    assert row.flops.other == pytest.approx(report.flops.other, rel=0.5)
    assert row.examples == 48
    # The compared time is the measured one, and the error is printed.
    assert row.measured_s == report.timing.step_s
    assert row.error == pytest.approx(row.step_s / report.timing.step_s - 1)
    assert f"{row.error:+.0%}" in str(planned) and "measured" in planned._repr_html_()
    assert tj.tools.Plan.from_json(planned.to_json()) == planned


@pytest.mark.slow
def test_4096_towers_without_devices_in_two_seconds():
    times = []
    for _ in range(2):  # whichever is not held up by something else
        begin = time.perf_counter()
        planned = tj.tools.plan(loss_fn, params(), rows(6), towers=[4096])
        times.append(time.perf_counter() - begin)
    assert min(times) < 2
    (row,) = planned.rows
    size = 4 * (IN * HIDDEN + HIDDEN + HIDDEN * HIDDEN + 3)
    assert row.bytes_sent == -(-2 * size * 4095 // 4096)
    assert row.examples == 6 * 4096 and row.measured_s is row.error is None


def wide(params, batch, tower):
    out = jnp.tanh(batch["x"] @ params["a"]) @ params["b"]
    return tj.Weighted.mean((out.astype(jnp.float32) ** 2).sum(-1), tower.weight)


WIDE = {name: jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16) for name in "ab"}


def wide_rows(count):
    return {"x": jax.ShapeDtypeStruct((count, 2048), jnp.bfloat16)}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("name", ["A100", "H100", "H200", "TPU v5e", "TPU v5e strong"])
def test_more_towers_are_never_better_than_as_many_alone(name):
    name, strong, _ = name.partition(" strong")
    towers = [1, 2, 8, 9, 64, 512, 4096]
    planned = tj.tools.plan(
        wide,
        WIDE,
        wide_rows(8192),
        towers=towers if name != "H200" else towers[:4],
        hardware=name,
        optimizer=optax.sgd(0.1),
        scaling="strong" if strong else "weak",
    )
    scaling = [row.scaling for row in planned.rows]
    assert scaling[0] == 1.0 and scaling == sorted(scaling, reverse=True)
    assert 0 < scaling[-1] < 0.999
    sent = [row.bytes_sent for row in planned.rows]
    assert sent[0] == 0 and sent == sorted(sent)
    on = planned.hardware
    flops = 2 * 8192 * 2048 * 2048 * 5  # two products, and three for gradients
    assert planned.rows[0].flops.matmul == flops
    expected = flops / (dict(on.peak)["bfloat16"] * on.matmul_efficiency)
    assert planned.rows[0].compute_s == pytest.approx(expected)


def test_strong_scaling_shares_one_batch():
    planned = tj.tools.plan(wide, WIDE, wide_rows(512), towers=[1, 8], scaling="strong")
    alone, eight = planned.rows
    assert alone.examples == eight.examples == 512
    assert eight.flops.matmul * 8 == alone.flops.matmul


def test_what_does_not_fit_says_so():
    small = dataclasses.replace(tj.tools.Hardware.named("H100"), memory_bytes=1e6)
    planned = tj.tools.plan(wide, WIDE, wide_rows(8), towers=[1], hardware=small)
    assert "(too much)" in str(planned)
    # Two bfloat16 matrices, two moments of each, a count, the batch, its rows, a step.
    state = 3 * 2 * 2048 * 2048 * 2 + 4
    (row,) = planned.rows
    assert row.arguments == state + 8 * 2048 * 2 + 4 + 4
    # Arguments are read; the next state, step and loss are written.
    moved = row.arguments + state + 4 + 4
    assert row.update_s == pytest.approx(moved / (3350e9 * 0.8))


# The model.

ON = tj.tools.Hardware(
    name="toy",
    peak=(("float32", 100.0),),
    memory_bytes=1000.0,
    memory_bandwidth=50.0,
    devices_per_node=4,
    node=tj.tools.Link(bandwidth=20.0, latency_s=1.0),
    network=tj.tools.Link(bandwidth=5.0, latency_s=3.0),
    matmul_efficiency=0.5,
    memory_efficiency=0.4,
    link_efficiency=0.5,
)


def test_rings_by_hand():
    # In a node of 4: two rounds of 3 hops, each of 10 bytes at 10 B/s.
    assert seconds_to_send("all-reduce", 40, 4, ON) == 2 * 3 * (1 + 1.0)
    # Then two rounds of 2 hops between 3 nodes, of a third of 10 bytes at 2.5 B/s.
    between = 2 * 2 * (3 + 10 / 3 / 2.5)
    assert seconds_to_send("all-reduce", 40, 12, ON) == pytest.approx(12 + between)
    assert seconds_to_send("all-reduce", 40, 9, ON) == pytest.approx(12 + between)
    scatter = seconds_to_send("reduce-scatter", 40, 12, ON)
    gather = seconds_to_send("all-gather", 40 / 12, 12, ON)
    assert scatter == pytest.approx(gather) == pytest.approx((12 + between) / 2)
    # 3 near parts of 5 bytes, 4 far ones.
    by_hand = 3 * 1 + 15 / 10 + 1 * 3 + 20 / 2.5
    assert seconds_to_send("all-to-all", 40, 8, ON) == pytest.approx(by_hand)
    assert seconds_to_send("collective-permute", 40, 2, ON) == 1 + 4
    assert seconds_to_send("all-reduce", 40, 1, ON) == 0


def test_a_roofline_by_hand():
    assert seconds_to_compute((("float32", 500),), 100, ON) == 10  # of arithmetic
    assert seconds_to_compute((("float32", 500),), 400, ON) == 20  # of memory


@pytest.mark.slow
def test_each_known_figure_has_a_source():
    assert [on.name for on in _KNOWN] == ["A100", "H100", "H200", "TPU v5e"]
    for on in _KNOWN:
        said = " ".join(f"{figures}: {source}" for figures, source in on.sources)
        assert "https://" in said and "assumed" in said and "float32" in said
        planned = tj.tools.plan(wide, WIDE, wide_rows(8), towers=[1], hardware=on)
        assert all(source in str(planned) for _, source in on.sources)


@pytest.mark.slow
def test_measured_here():
    here = tj.tools.measure_hardware(
        devices(2), matmul_size=64, link_bytes=1 << 16, repeats=2
    )
    assert here.devices_per_node == 2 and here.network is None
    assert here.node.bandwidth > 0 and here.node.latency_s >= 0
    assert here.peak_of("float32") > 0 and here.step_overhead_s > 0
    assert here.matmul_efficiency == here.link_efficiency == 1
    planned = tj.tools.plan(loss_fn, params(), rows(6), towers=[1, 2], hardware=here)
    assert planned.hardware == here and planned.rows[1].step_s > here.step_overhead_s
    alone = tj.tools.measure_hardware(
        devices(1), matmul_size=8, link_bytes=64, repeats=1
    )
    assert alone.node is None and alone.devices_per_node == 1
    with pytest.raises(
        ValueError, match="here has no network between nodes. Plan for 2"
    ):
        tj.tools.plan(loss_fn, params(), rows(6), towers=[4], hardware=here)


def test_here_measures_the_dtypes_that_the_step_has(monkeypatch):
    asked = []

    def measure(**options):
        asked.append(options)
        return dataclasses.replace(ON, peak=(("bfloat16", 1.0),))

    monkeypatch.setattr(f"{tj.tools.plan.__module__}.measure_hardware", measure)
    tj.tools.plan(wide, WIDE, wide_rows(8), towers=[1], hardware="here")
    assert asked == [{"dtypes": ["bfloat16"]}]


REFUSED = {
    "scaling='both' must be one of": {"scaling": "both"},
    "towers.*must be a whole number >= 1": {"towers": [8, 0]},
    "at least one": {"towers": []},
    "hardware='B300' is not known here: 'A100', 'H100'": {"hardware": "B300"},
    "toy has no peak for products of bfloat16, only for float32": {"hardware": ON},
    "whose processes tj.collectives.Hierarchical goes by": {
        "cross_tower_ops": tj.collectives.Hierarchical()
    },
}


@pytest.mark.few_fast(1)
@pytest.mark.parametrize("message", REFUSED)
def test_what_a_plan_refuses(message):
    with pytest.raises(ValueError, match=message):
        tj.tools.plan(wide, WIDE, wide_rows(8), **REFUSED[message])


@pytest.mark.slow
def test_reports_that_cannot_be_compared_are_refused():
    step = tj.build_train_step(
        loss_fn, optax.sgd(0.1), tj.Mirrored(devices(1), towers=2)
    )
    batch = {"x": np.ones((4, IN), np.float32)}
    report = step.report(step.init(params()), batch)
    with pytest.raises(ValueError, match="of 2 towers has no times to compare"):
        tj.tools.plan(loss_fn, params(), rows(2), measured=[report])
    report = dataclasses.replace(report, timing=Timing(1, 0.1, 0.1))
    with pytest.raises(ValueError, match="of 2 towers on 1 devices"):
        tj.tools.plan(loss_fn, params(), rows(2), measured=[report])
    with pytest.raises(ValueError, match="A leaf of batch_spec has no rows"):
        tj.tools.plan(loss_fn, params(), {"x": np.float32(1)})


def test_wrong_figures_are_refused():
    with pytest.raises(ValueError, match="'toy' has memory_bytes=0, node.bandwidth=-1"):
        node = tj.tools.Link(bandwidth=-1, latency_s=0.0)
        dataclasses.replace(ON, memory_bytes=0, node=node)
    with pytest.raises(ValueError, match="link_efficiency=1.5. Figures are above 0"):
        dataclasses.replace(ON, link_efficiency=1.5)


# The commands.

PROGRAM = """
import numpy as np, optax, towerjax as tj
def loss_fn(params, batch, tower):
    return tj.Weighted.mean((batch["x"] @ params["w<"]) ** 2, tower.weight)
def with_local(params, batch, tower):
    loss = loss_fn(params, batch, tower)
    return tj.TowerOutput(loss, local=tower.local)
def make_params():
    return {"w<": np.ones(3, np.float32)}
def make_local():
    return {"n": tj.TowerLocal(np.zeros(3, np.float32), tj.Reduction.SUM)}
def make_batch():
    return {"x": np.ones((4, 3), np.float32)}
def make_step():
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.OneDevice("cpu:0"))
    return step, step.init(make_params()), make_batch()
def sgd():
    return optax.sgd(0.1)
link = tj.tools.Link(1e9, 0.0)
toy = tj.tools.Hardware("toy", (("float32", 1e9),), 1e9, 1e9, 2, link, None)
"""


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    (tmp_path / "program_of_plan.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main(arguments)
        return code, *capsys.readouterr()

    return run


@pytest.mark.slow
def test_the_command_report(shell, tmp_path):
    code, out, _ = shell("report", "program_of_plan:make_step", "--json")
    report = tj.tools.StepReport.from_json(out)
    assert code == 0 and report.memory.by_kind["parameters"] == 12
    assert report.timing is None
    code, out, _ = shell(
        "report", "program_of_plan:make_step", "--timed-calls", "1", "--html", "r.html"
    )
    assert (code, out) == (0, "")
    page = (tmp_path / "r.html").read_text()
    assert "params[&#x27;w&lt;&#x27;]" in page and page.startswith("<!doctype html>")
    code, _, error = shell("report", "program_of_plan:sgd")
    assert code == 2 and "returns (step, state, batch)" in error
    code, out, error = shell("report", "program_of_plan:loss_fn")
    assert (code, out) == (2, "") and "is called without arguments" in error


@pytest.mark.slow
def test_the_command_plan(shell):
    names = [
        f"program_of_plan:{name}" for name in ("loss_fn", "make_params", "make_batch")
    ]
    call = ["plan", names[0], "--params", names[1], "--batch", names[2]]
    code, out, _ = shell(*call, "--towers", "1,64")
    assert code == 0 and "H100, weak scaling" in out and "64" in out
    more = ["--hardware", "program_of_plan:toy", "--optimizer", "program_of_plan:sgd"]
    code, out, _ = shell(*call, "--towers", "2", *more, "--json")
    (row,) = json.loads(out)["rows"]
    assert (code, row["towers"], row["arguments"]) == (0, 2, 12 + 4 * 3 * 4 + 4 + 4)
    pinned = ["--cross-tower-ops", "ReduceToOneDevice()"]
    local = [f"program_of_plan:{name}" for name in ("with_local", "make_local")]
    call_with_local = ["plan", local[0], "--local", local[1], *call[2:]]
    found = shell(*call_with_local, "--towers", "2", *more, *pinned, "--json")
    assert found[::2] == (0, "")
    (other,) = json.loads(found[1])["rows"]
    assert other["arguments"] == row["arguments"] + 12
    assert other["bytes_sent"] != row["bytes_sent"]
    for option in ("--params", "--optimizer"):
        code, out, error = shell(*call, option, names[0])
        assert (code, out) == (2, "") and "is called without arguments" in error
    for towers, message in {"4": "toy has no network", "x": "must be whole"}.items():
        code, _, error = shell(*call, "--towers", towers, *more)
        assert code == 2 and message in error
