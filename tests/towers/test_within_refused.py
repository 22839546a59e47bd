"""What towers of several devices cannot be is refused, before any device is used."""

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P
from wide_towers import (
    ADAM,
    CPUS,
    SPECS,
    loss_by,
    loss_fn,
    plain_loss_fn,
    rows,
    start,
    trained,
    wide,
)

import towerjax as tj

REPLICATED = P()


def by_hand(fn, outs=REPLICATED, ins=REPLICATED):
    specs = {"in_specs": ins, "out_specs": outs, "check_vma": False}
    return jax.shard_map(fn, axis_names={"model"}, **specs)


@loss_by
def forgotten_sum(params, x):
    fn = lambda w1, w2, x: jnp.tanh(x @ w1) @ w2  # noqa: E731  # here
    whole = by_hand(fn, ins=(P(None, "model"), P("model"), P()))
    return whole(params["w1"], params["w2"], x)


@jax.custom_vjp
def own_in_backward(x):
    return x


def _own_part(_, g):
    own = by_hand(lambda g: g * (1.0 + jax.lax.axis_index("model")))
    return (own(g),)


own_in_backward.defvjp(lambda x: (x, None), _own_part)


@loss_by
def drifting_backward(params, x):
    w2 = own_in_backward(params["w2"])  # here
    return jnp.tanh(x @ params["w1"]) @ w2


@loss_by
def some_hang(params, x):
    def fn(x):
        first = jax.lax.axis_index("model") == 0
        x = jax.lax.cond(first, lambda: jax.lax.pmean(x, "model"), lambda: x)  # here
        return jax.lax.pmean(x, "model")

    return jnp.tanh(by_hand(fn)(x) @ params["w1"]) @ params["w2"]


@loss_by
def in_a_loop(params, x):
    def turn(x, _):
        fn = lambda x: x * (1.0 + jax.lax.axis_index("model"))  # noqa: E731  # here
        return by_hand(fn)(x), None

    x = jax.lax.scan(turn, x, length=2)[0]
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


@pytest.mark.few_fast(3)
@pytest.mark.parametrize(("two_layers", "text"), [
    (forgotten_sum, "drift apart: result .* depends on what in_specs split at"),
    (drifting_backward, "drift apart: result 0 depends on axis_index at"),
    (some_hang, "would hang"),
    (in_a_loop, "drift apart: result 0 depends on axis_index at"),
])  # fmt: skip
@pytest.mark.parametrize("towers, devices", [(4, 8), (1, 2)])
def test_copies_within_a_tower_that_would_differ_are_refused(
    two_layers, text, towers, devices
):
    fn = inspect.getclosurevars(two_layers).nonlocals["two_layers"]
    lines, first = inspect.getsourcelines(fn)
    [here] = [first + i for i, line in enumerate(lines) if "# here" in line]
    with pytest.raises(tj.ReplicationError, match=text) as caught:
        checked(wide(towers, devices), two_layers)
    assert f"test_within_refused.py:{here}" in str(caught.value)
    assert "in a tower" in str(caught.value) and "'model'" in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 13])
def test_what_counts_the_padding_of_split_rows_is_refused(size):
    def of_padding(params, batch, tower):
        mean = (batch["x"][:, 0] * tower.weight).mean()  # of a call's rows, padded
        mean = tower.reduce(tj.Reduction.MEAN, mean)
        return plain_loss_fn(params, batch, tower) + tj.penalty(mean * params["b"][0])

    strategy = wide(2, within={"data": 4}, rows="data", specs=None)
    options = {"remainder": "pad", "audit": True}
    step = tj.build_train_step(of_padding, ADAM, strategy, **options)
    with pytest.raises(tj.testing.SplitError, match="Padded rows count"):
        trained(step, size=size)


def checked(strategy, loss_fn=loss_fn, size=16):
    tj.build_train_step(loss_fn, ADAM, strategy).check(start(), rows(size))


def by(specs, devices=8):
    within = {"model": 2 if devices == 8 else 3}
    checked(tj.Mirrored(CPUS[:devices], within=within, specs=specs))


def member(rate):
    step = tj.build_train_step(loss_fn, optax.sgd(rate), wide(4))
    return step, step.init(start())


TOGETHER = {"order": "together", "progress": False}
REFUSED = [
    (lambda: tj.sweep(member, {"rate": [0.1, 0.2]}, [rows()] * 2, **TOGETHER),
        r"order='in_turn'\), or leave specs out"),
    (lambda: wide(4, executor="pmap"), r"within=.* cannot run under executor='pmap'"),
    (lambda: tj.Mirrored(CPUS[:3], within={"model": 2}),
        r"the 3 devices.* 3 devices, or name a multiple of 2; .*_devices', 4\)"),
    (lambda: tj.Mirrored(within={"model": 16}).placement,
        "16 devices, which does not divide the 8 .* Give towers 2 or 4 or 8 devices"),
    (lambda: tj.Mirrored(CPUS[:1], within={"model": 2}),
        r"the 1 devices\. Name a multiple of 2; on CPUs .*jax_num_cpu_devices', 2\)"),
    (lambda: wide(2, within={"model": 16}).placement,
        "a tower of 16 devices, which does not divide"),
    (lambda: wide(3, 8),
        r"towers=3 is not a multiple of the 4 groups of 2 devices.*towers=4"),
    (lambda: tj.Mirrored(within={"batch": 2}, axis_name="batch"),
        "'batch' must be a name that nothing"),
    (lambda: tj.Mirrored(within="model"), "must be a dict of axis names and sizes"),
    (lambda: tj.Mirrored(within={"model": 0}), r"within\['model'\]=0"),
    (lambda: wide(2, rows="data"), "rows='data' is not an axis.*'model'"),
    (lambda: tj.Mirrored(specs=P("x")), "there are none. Write within="),
    (lambda: tj.build_train_step(loss_fn, ADAM, tj.OneDevice(), specs=SPECS),
        r"Write tj\.Mirrored\(towers=1, within="),
    (lambda: wide(2, specs={"w1": 3}), r"specs\['w1'\] is 3\."),
    (lambda: by(P("towerjax_device")),
        r"params\['b'\]\[8\], but 'towerjax_device' is not an axis within.*'model'"),
    (lambda: by({**SPECS, "w3": P()}), "entries that match no parameter: w3"),
    (lambda: by({"w1": P()}), r"no entry for params\['b'\]"),
    (lambda: by(lambda name, x: P(None, None)),
        r"params\['b'\]\[8\], which has more entries"),
    (lambda: by(lambda name, x: "model"), r"specs= gives 'model' for params\['b'\]"),
    (lambda: by(SPECS, devices=6),
        r"w1'\]\[8, 16\], but 16, the size of dim 1, is not a multiple of the 3 .* 18"),
    (lambda: checked(wide(4, within={"data": 2}, specs=None, rows="data"),
                     plain_loss_fn, size=12),
        "12 examples, which 4 towers on 2 devices along rows= cannot share evenly"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), REFUSED, ids=[x[1][:30] for x in REFUSED])
def test_what_wide_towers_cannot_be_is_refused(call, text):
    with pytest.raises(ValueError, match=re.compile(text, re.S)):
        call()


def test_specs_by_a_function_of_the_name():
    def specs(name, x):
        return {"w1": P(None, "model"), "w2": P("model")}.get(name)

    strategy = wide(4, specs=specs)
    assert "specs=specs" in repr(strategy)
    assert hash(strategy) == hash(wide(4, specs=specs))
    step = tj.build_train_step(loss_fn, ADAM, strategy)
    state = step.init(start())
    assert state.params["w2"].addressable_shards[0].data.shape == (8, 8)
    whole = tj.build_train_step(loss_fn, ADAM, wide(4, specs=None)).init(start())
    with pytest.raises(ValueError, match=r"not placed as the strategy says.*params"):
        step(whole, rows())


@pytest.mark.parametrize("within", [{}, {"other": 2}])
def test_an_axis_that_is_not_there_names_the_option(within):
    strategy = tj.Mirrored(CPUS[:2], within=within)
    step = tj.build_train_step(loss_fn, ADAM, strategy)
    with pytest.raises((RuntimeError, ValueError), match="mesh") as told:
        step.check(start(), rows())
    assert "tj.Mirrored(within={'model': 2})" in "".join(told.value.__notes__)


@pytest.mark.slow
def test_a_shard_map_that_is_kept_says_to_call_it_anew():
    whole = P(None, "model"), P("model"), P()

    @functools.partial(
        jax.shard_map,
        in_specs=whole, out_specs=P(), axis_names={"model"}, check_vma=False,
    )  # fmt: skip
    def kept(w1, w2, x):
        return jax.lax.psum(jnp.tanh(x @ w1) @ w2, "model")

    of_kept = loss_by(lambda params, x: kept(params["w1"], params["w2"], x))
    checked(wide(4), of_kept)
    with pytest.raises(ValueError, match="should match the mesh") as told:
        checked(wide(1, 2), of_kept)
    assert "call jax.shard_map in the tower function" in told.value.__notes__[0]
