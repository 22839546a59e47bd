"""Training runs have the same bits on any number of devices; a control does not."""

import contextlib
import dataclasses
import io
import json
import re
import sys

import forked
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj
from benchmarks.same_bits import Case, cases, compare, main

pytestmark = pytest.mark.slow
CASES = cases()
# Every batch is ragged, and every mlp has dropout.
MICRO = {"micro_batches": 2}


def differing(case, *, devices=(1, 8), towers=8, steps=3, state="mirrored"):
    """``D`` -> the leaves that differ; nothing when every bit is the same."""
    how = {"towers": towers, "devices": devices, "steps": steps, "state": state}
    found = compare(case, ops=tj.PinnedTree(), **how)
    for number, names in found.differing.items():
        same = found.digests[number] == found.digests[devices[0]]
        assert same == (names == [])
    return {number: names for number, names in found.differing.items() if names}


def test_a_run_has_the_same_bits_on_one_device_and_on_many():
    # Both divide by what they use once, which XLA rewrites on one device alone.
    assert differing(Case("", "batch norm", "MultiSteps", options=MICRO)) == {}


def test_the_tree_is_not_fused_into_the_update():
    options = {"on_nonfinite": "ignore"}
    assert differing(Case("", "linear", "momentum", options=options)) == {}


# A plain all-reduce has other bits in each; more: python -m benchmarks.same_bits.
GRID = [
    (4, (1, 2), Case("", "mlp, dropout", "sgd", options={"micro_batches": 3})),
    (8, (1, 4), Case("", "mlp in bfloat16", "clip, adam", options=MICRO)),
    # Six rows a tower, as many as towers: in a loop both were one array once.
    (6, (1, 6), Case("", "conv 8 in bfloat16", "momentum")),
    (24, (1, 2, 3, 4, 6, 8), Case("", "linear", "clip, adam")),
]


@pytest.mark.parametrize(
    "towers, devices, case", GRID, ids=lambda x: getattr(x, "model", None)
)
def test_50_steps_have_the_same_bits_on_every_number_of_devices(towers, devices, case):
    assert differing(case, towers=towers, devices=devices, steps=50) == {}


ONCE = [
    CASES["attention"],
    CASES["model_fn, conv"],
    Case("", "function called twice", "muon"),
]


@pytest.mark.parametrize("case", ONCE, ids=lambda case: case.model)
def test_what_once_differed_has_the_same_bits(case):
    assert differing(case, devices=(1, 2)) == {}


def test_what_an_update_reads_of_its_own_results_has_the_same_bits_in_parts():
    """As a momentum of which an optimizer needs the whole matrix."""
    assert differing(Case("", optimizer="muon"), devices=(1, 2), state="sharded") == {}


@pytest.mark.slow
def test_the_shards_that_users_have_have_the_same_bits(users_shards):
    case = CASES["attention"]
    assert differing(case, devices=(1, 2), state="sharded") == {}


def command(ops, *devices):
    """Its status and what it says."""
    flags = f"--only linear --towers 16 --steps 50 --json --ops {ops} --devices"
    sys.argv = ["same_bits", *flags.split(), *devices]
    with contextlib.redirect_stdout(io.StringIO()) as output:
        with pytest.raises(SystemExit) as end:
            main()
    return end.value.code, json.loads(output.getvalue())


def test_the_command_on_16_devices_and_its_control():
    status, pinned = forked.called(command, "PinnedTree", "1", "16")
    assert status == 0 and pinned["differing"] == {"1": [], "16": []}
    assert pinned["leaves"] > 8 and len(set(pinned["digests"].values())) == 1
    # The plain all-reduce does not: neither state nor metrics are the same.
    status, plain = forked.called(command, "AllReduce", "2", "16")
    assert status == 1 and plain["differing"]["2"] == []
    for part in (".params['w']", ".opt_state[1][0].nu", "['metrics']"):
        assert [x for x in plain["differing"]["16"] if part in x], part


def in_turn(towers, devices):
    names = tuple(f"cpu:{number}" for number in range(devices))
    ops = tj.PinnedTree()
    return tj.Mirrored(names, towers=towers, tower_loop="scan", cross_tower_ops=ops)


def test_a_small_loop_over_towers_has_the_same_bits():
    """Of a size of which XLA made one function, and LLVM another for four trips."""

    def loss_fn(params, batch, tower):
        x = batch["x"] * params["scale"][None]
        x = x - x.mean(axis=-1, keepdims=True)
        hidden = jnp.tanh(x / jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + 0.1))
        out = jax.nn.softmax(hidden @ params["w"]) * jnp.exp(hidden @ params["w"])
        return tj.Weighted.mean((out.sum(axis=-1) - batch["y"]) ** 2, tower.weight)

    rng = np.random.default_rng(13)
    params = {"w": rng.normal(size=(13, 3)) / 13, "scale": rng.normal(size=13)}
    batch = {"x": rng.normal(size=(8, 13)), "y": rng.normal(size=8)}
    params, batch = jax.tree.map(np.float32, (params, batch))
    found = []
    for devices in (1, 2, 8):
        step = tj.build_train_step(loss_fn, optax.adam(0.01), in_turn(8, devices))
        state = step.init(params)
        for _ in range(5):
            state, _ = step(state, batch)
        leaves = jax.tree.leaves((state.params, state.opt_state))
        found.append(b"".join(np.asarray(x).tobytes() for x in leaves))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_xla_makes_no_function_of_the_loop_over_towers(devices):
    """As it does of small loops, whose bits their trips and one device then change."""

    def loss_fn(params, batch, tower):
        return tj.Weighted.mean((batch @ params - 1) ** 2, tower.weight)

    def update_fn(updates, seen, params=None):
        return updates, seen + params.sum()

    seen = optax.GradientTransformation(lambda _: jnp.zeros((5, 7)), update_fn)
    optimizer = optax.chain(seen, optax.sgd(0.1))
    step = tj.build_train_step(loss_fn, optimizer, in_turn(8, devices))
    state = step.init(np.ones(3, np.float32))
    program = step.program(state, np.ones((8, 3), np.float32)).call.as_text()
    assert "towerjax.in_turn" in program and "xla_cpu_small_call" not in program
    # Nor does the loop hold what no tower uses: a copy, where towers' values could lie.
    [loop] = re.findall(r"= (.*) while\(.*in_turn", program)
    assert "f32[3]" in loop and "f32[5,7]" in program and "f32[5,7]" not in loop


def bits(step, rows):
    rng = np.random.default_rng(0)
    state = step.init(rng.normal(size=(5, 4)).astype(np.float32))
    _, metrics = step(state, rng.normal(size=(rows, 2, 5)).astype(np.float32))
    return {name: np.asarray(x).tobytes() for name, x in metrics.items()}


def of_two_passes(devices):
    """What a second pass makes of merged values alone, and a gradient through it."""

    def first(state, batch, tower):
        rows = (batch[:, 0] @ state.params, batch[:, 1] @ state.params)
        return tj.Sum([{"sum": x.sum(axis=0), "product": x.T @ x} for x in rows])

    def penalty(merged):
        def of_one(sums):
            mean = sums["sum"] / merged["count"]
            scatter = sums["product"] - merged["count"] * jnp.outer(mean, mean)
            covariance = scatter / (merged["count"] - 1)
            return (covariance**2).sum() + jnp.sqrt(jnp.diag(covariance) + 1e-4).sum()

        return sum(map(of_one, merged["sums"]))

    def both(state, batch, tower):
        count = tj.Sum(jnp.sum(tower.weight))
        return {"count": count, "sums": first(state, batch, tower)}

    def second(state, batch, tower, merged):
        count = merged["count"].value
        of_sums = jax.grad(lambda sums: penalty({"count": count, "sums": sums}))
        told = of_sums(merged["sums"].value)

        def own(params):
            mine = first(dataclasses.replace(state, params=params), batch, tower)
            return optax.tree.vdot(told, mine.value)

        return {"told": told, "grads": tj.Sum(jax.grad(own)(state.params))}

    def update_fn(state, merged):
        leaves = jax.tree.leaves(merged["told"])
        told = {f"{number}": x for number, x in enumerate(leaves)}
        return state, {**told, "grads": merged["grads"]}

    step = tj.build_step(
        (both, second), update_fn, in_turn(4, devices), micro_batches=3
    )
    return bits(step, 12)


def of_an_update(devices):
    """What an update makes of rows, of a sum, and of a count that divides twice."""

    def tower_fn(state, batch, tower):
        rows = jnp.tanh(batch[:, 0] @ state.params)
        sums = tj.Sum((tower.weight[:, None] * rows).T @ batch[:, 1])
        return {
            "rows": tj.Rows(tower.weight[:, None] * rows),
            "sums": sums,
            "count": tj.Sum(tower.weight.sum()),
        }

    def update_fn(state, merged):
        rows, sums, count = (merged[name].value for name in ("rows", "sums", "count"))
        return state, {
            "of rows": rows.sum(axis=0),
            "deviation": sums.std(),
            "scaled": sums / sums.std(),
            "first": jnp.tanh(sums) / count,
            "second": jnp.cumsum(sums, axis=1) / count,
        }

    step = tj.build_step(tower_fn, update_fn, in_turn(6, devices), remainder="pad")
    return bits(step, 61)


def of_divisors(devices):
    """What arrays of several sizes become, divided by one number, or one a column."""

    def tower_fn(state, batch, tower):
        rows = jnp.tanh(batch[:, 0] @ state.params)
        a = rows.T @ rows
        b = batch[:, 1].T @ rows
        return tj.Sum({"a": a, "b": b, "c": jnp.stack([a, -b[1:]])})

    def update_fn(state, merged):
        squares = [x.reshape(-1, 4) ** 2 for x in merged.value.values()]
        column = jnp.sqrt(sum([x.sum(axis=0) for x in squares]))
        norms = {
            "column": column[None],
            "most": column.max(keepdims=True)[None],
            "norm": jnp.sqrt(sum([x.sum(keepdims=True) for x in squares])),
        }
        return state, {
            f"{name} / {what}": -0.1 * (x / (norm if x.ndim == 2 else norm[None]))
            for what, norm in norms.items()
            for name, x in merged.value.items()
        }

    return bits(tj.build_step(tower_fn, update_fn, in_turn(4, devices)), 12)


@pytest.mark.parametrize(
    "run, devices", [(of_two_passes, 2), (of_an_update, 3), (of_divisors, 2)]
)
def test_what_all_towers_compute_alike_has_the_same_bits(run, devices):
    found = [run(number) for number in (1, devices)]
    assert [name for name, x in found[0].items() if x != found[1][name]] == []


def test_complex_numbers_on_one_device():
    def loss_fn(params, batch, tower):
        power = jnp.abs(jnp.fft.fft(params[None] * batch, axis=1)) ** 2
        return tj.Weighted.mean(power.sum(axis=1), tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(1.0), in_turn(2, 1))
    x = np.float32([[1, 2], [3, 4], [5, 6], [7, 8]])
    w = np.float32([0.5, -1])
    state, _ = step(step.init(w), x)
    # Parseval: the power is twice the sum of the squares.
    np.testing.assert_allclose(w - state.params, 4 * w * (x**2).mean(0), rtol=1e-5)
