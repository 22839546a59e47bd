"""What is split is written to and looked up by index, and the faults of XLA itself."""

import dataclasses
import signal
import subprocess
import sys

import forked
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import towerjax as tj

ROWS = P("model")
COLUMNS = P(None, "model")
NUMBER = np.int32(5)
WRITES = {
    "set": (ROWS, lambda t: t.at[0].set(0.0)),
    "add": (ROWS, lambda t: t.at[5].add(1.0)),
    "multiply": (ROWS, lambda t: t.at[5].multiply(3.0)),
    "min": (ROWS, lambda t: t.at[5].min(-1.0)),
    "max": (ROWS, lambda t: t.at[5].max(99.0)),
    "apply": (ROWS, lambda t: lax.stop_gradient(t).at[5].apply(jnp.sin)),
    "a traced index": (ROWS, lambda t: t.at[NUMBER + (0 * t[0, 0]).astype(int)].set(0)),
    "an array of one index": (ROWS, lambda t: t.at[jnp.array([5])].set(0.0)),
    "an element": (ROWS, lambda t: t.at[3, 2].set(0.0)),
    "an element of split columns": (COLUMNS, lambda t: t.at[3, 2].add(5.0)),
    "a column": (COLUMNS, lambda t: t.at[:, 3].set(0.0)),
    "vmap": (COLUMNS, jax.vmap(lambda row: row.at[0].set(0.0))),
    "what is computed": (ROWS, lambda t: (3 * t).at[5].add(1.0) / 2),
    "in a loop": (ROWS, lambda t: lax.fori_loop(
        0, 3, lambda i, t: (t + 1).at[i].set(0.0), t)),
    "a branch": (ROWS, lambda t: lax.cond(
        t[0, 0] < 99, lambda t: t.at[5].set(0.0), lambda t: t, t)),
    "remat": (ROWS, jax.checkpoint(lambda t: jnp.sin(t).at[5].set(0.0))),
    "two indices": (ROWS, lambda t: t.at[jnp.array([0, 5])].set(0.0)),
    # Relatives, which XLA masks or gathers.
    "a slice": (ROWS, lambda t: lax.dynamic_update_slice_in_dim(t, 0 * t[:1], 5, 0)),
    "a row": (ROWS, lambda t: jnp.zeros_like(t) + t[5][None]),
    "a number": (ROWS, lambda t: t + t[5, 2]),
    "along an axis": (ROWS, lambda t: jnp.take_along_axis(
        t, jnp.arange(16)[None] % 8, 0) + t),
    "take": (ROWS, lambda t: t + jnp.take(t, NUMBER, axis=0)[None]),
}  # fmt: skip


def table():
    return np.random.default_rng(0).normal(size=(8, 16))


def loss_by(write):
    factor = jnp.asarray(np.random.default_rng(1).normal(size=(8, 16)))
    return lambda t: (factor * write(t) ** 2).sum()


ALL = pytest.param([*WRITES], marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("names", [["set"], ALL], ids=len)
def test_each_element_is_that_of_one_device(names):
    """Each way has a table of its own, so that one program holds them all.

    It gives numbers and gradients of each that is written to, and updates it.
    """
    specs, writes = ({name: WRITES[name][i] for name in names} for i in (0, 1))

    def tower_fn(state, batch, tower):
        found = {}
        for name, t in state.params.items():
            gradient = jax.grad(loss_by(writes[name]))(t)
            found |= {name: writes[name](t), f"{name}: gradient": gradient}
        return found

    def update_fn(state, merged):
        new = {name: writes[name](t * 2) for name, t in state.params.items()}
        return dataclasses.replace(state, params=new), merged

    options = {"within": {"model": 2}, "specs": specs, "state": "sharded"}
    strategy = tj.Mirrored([f"cpu:{i}" for i in range(4)], **options)
    with jax.enable_x64(True):
        step = tj.build_step(tower_fn, update_fn, strategy, audit=False)
        state = step.init(dict.fromkeys(names, table()))
        done, found = step(state, {"x": np.zeros((4, 1))})
        t = jnp.asarray(table())
        for name, write in writes.items():
            close = {"rtol": 1e-12, "err_msg": name}
            np.testing.assert_allclose(found[name], write(t), **close)
            wanted = jax.grad(loss_by(write))(t)
            np.testing.assert_allclose(found[f"{name}: gradient"], wanted, **close)
            np.testing.assert_allclose(done.params[name], write(t * 2), **close)


@pytest.mark.slow
def test_towers_of_one_group_of_devices_are_right_too():
    def tower_fn(state, batch, tower):
        t = lax.with_sharding_constraint(jnp.cumsum(state.params["table"], 0), P())
        return lax.with_sharding_constraint(t, ROWS).at[5].add(1.0)

    strategy = tj.Mirrored(["cpu:0", "cpu:1"], within={"model": 2})
    step = tj.build_step(tower_fn, lambda state, x: (state, {"out": x}), strategy)
    _, found = step(step.init({"table": table()}), {"x": np.zeros((4, 1))})
    wanted = table().cumsum(0)
    wanted[5] += 1
    np.testing.assert_allclose(found["out"], wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_which_jax_has_the_fault():
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def on_device(part):
        whole = lax.all_gather(part, "data", axis=1, tiled=True)
        return lax.with_sharding_constraint(whole, P("model")).at[3].add(1.0)

    on_devices = jax.shard_map(
        on_device, mesh=mesh, in_specs=P(None, "data"), out_specs=P(),
        axis_names={"data"}, check_vma=False,
    )  # fmt: skip
    x = jnp.arange(128.0).reshape(8, 16)
    is_right = np.array_equal(jax.jit(on_devices)(x), x.at[3].add(1.0))
    # Where the oldest JAX that is allowed is right, lowering/scatters.py may go.
    assert is_right == (jax.__version_info__ >= (0, 12))


# How a table of words by features is split, of a tower whose rows are along "data".
TABLES = [P("model"), P("data"), P("model", "data"), P(("model", "data")),
          P(None, "model"), P(None, ("data", "model")), P()]  # fmt: skip


def farthest_from_one_device(spec, towers):
    """Of a loss that looks words up, writes to rows and takes labels' logits."""
    rng = np.random.default_rng(0)
    params = {"table": rng.normal(size=(16, 8)), "head": rng.normal(size=(8, 16))}
    batch = {"words": rng.integers(16, size=(8, 6)), "place": rng.integers(6, size=8)}

    def losses_of(params, batch):
        words = batch["words"]
        x = params["table"][words]
        x = jax.vmap(lambda row, place: row.at[place].mul(2))(x, batch["place"])
        x = x + x[:, jnp.array([5, 0, 0, 1, 3, 2])] ** 2
        sent = jnp.zeros((16, 8)).at[words].add(jnp.sin(x))  # as backwards of a lookup
        of_labels = optax.softmax_cross_entropy_with_integer_labels
        return of_labels(x @ params["head"], words), sent

    def loss_fn(params, batch, tower):
        losses, sent = losses_of(params, batch)
        total = tj.penalty(tower.reduce(tj.Reduction.SUM, sent).var())
        return tj.Weighted.mean(losses.mean(-1)) + total

    def loss_of(params):
        losses, sent = losses_of(params, batch)
        return losses.mean() + sent.var()

    specs = {"table": spec, "head": P(None, "model")}
    strategy = tj.Mirrored(
        towers=towers, within={"data": 2, "model": 2}, rows="data", specs=specs
    )
    with jax.enable_x64(True):
        step = tj.build_train_step(loss_fn, optax.sgd(1.0), strategy, audit=False)
        state, metrics = step(step.init(params), batch)
        loss, grads = jax.value_and_grad(loss_of)(params)
        far = [abs(float(metrics["loss"]) - float(loss))]
        for name, x in params.items():
            far.append(abs(x - np.asarray(state.params[name]) - grads[name]).max())
        return max(map(float, far))


def each_from_one_device(splits):
    return {split: farthest_from_one_device(*split) for split in splits}


@pytest.mark.slow
def test_indices_and_what_they_index_are_split_along_two_axes():
    """In a process of its own: XLA would end it."""
    splits = [(spec, 2) for spec in TABLES] + [(spec, 1) for spec in TABLES[1:6:2]]
    far = forked.called(each_from_one_device, splits)
    assert len(far) == len(splits) and max(far.values()) < 1e-12, far


ABORTS = """\
import jax, jax.numpy as jnp
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
names, auto = ("tower", "data", "model"), (jax.sharding.AxisType.Auto,) * 3
jax.set_mesh(jax.make_mesh((2, 2, 2), names, axis_types=auto))


def of_labels(logits, labels):
    logits = constrain(logits, P("data", "model"))
    labels = constrain(labels, P("data"))
    return jnp.take_along_axis(logits, labels[:, None], axis=1)


towers = {"in_specs": P("tower"), "out_specs": P("tower"), "axis_names": {"tower"}}
fn = jax.jit(jax.shard_map(of_labels, **towers))
print(fn(jnp.ones((8, 16)), jnp.arange(8)).shape)
"""


@pytest.mark.slow
def test_which_jax_aborts():
    command = [sys.executable, "-c", ABORTS]
    done = subprocess.run(command, capture_output=True, text=True)
    # Where it no longer ends so, `_unsplit` of lowering/scatters.py may go.
    assert done.returncode == -signal.SIGABRT
    assert "ExpandDeviceGroupsWithIota" in done.stderr
