"""Parameters leave as plain arrays, and other libraries read them without towerjax."""

import os
import re
import subprocess
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from safetensors.numpy import load_file, save_file

import towerjax as tj
from towerjax.tools import (
    flat_parameters,
    load_parameters,
    parameter_table,
    save_parameters,
)

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)


def of_dicts():
    draw = np.random.default_rng(1)
    params = {"dense": {"w": draw.normal(size=(3, 2)).astype(np.float32)}, "b": X[0, 0]}

    def call(params, x):
        return x @ params["dense"]["w"] + params["b"]

    def again(flat):
        return call(unflatten_dict(flat, sep="/"), X)

    return params, call, again


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        x = nn.relu(nn.Dense(4, kernel_init=split, name="up")(x))
        return nn.Dense(2, name="down")(x)


def of_linen():
    params = Linen().init(jax.random.key(0), X)["params"]  # with a box around up/kernel

    def call(params, x):
        return Linen().apply({"params": params}, x)

    def again(flat):
        return call(unflatten_dict(flat, sep="/"), X)

    return params, call, again


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])
        self.last = nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.last(x)


def of_nnx():
    graph, params = nnx.split(Nnx(nnx.Rngs(0)))

    def call(params, x):
        return nnx.merge(graph, params)(x)

    def again(flat):
        other = Nnx(nnx.Rngs(7))
        state = nnx.state(other)
        keys = [tuple(int(k) if k.isdigit() else k for k in x.split("/")) for x in flat]
        pure = nnx.to_pure_dict(state)
        assert {*flatten_dict(pure)} == {*keys}
        new = unflatten_dict(dict(zip(keys, flat.values(), strict=True)))
        nnx.replace_by_pure_dict(state, new)
        nnx.update(other, state)
        return other(X)

    return params, call, again


def of_equinox():
    eqx = pytest.importorskip("equinox")

    def model(seed):
        return eqx.nn.MLP(3, 2, 4, 2, key=jax.random.key(seed))

    params, static = eqx.partition(model(0), eqx.is_inexact_array)

    def call(params, x):
        return jax.vmap(eqx.combine(params, static))(x)

    def again(flat):
        def loaded(path, x):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            return flat[name] if name in flat else x

        return jax.vmap(jax.tree_util.tree_map_with_path(loaded, model(7)))(X)

    return params, call, again


LIBRARIES = {"dict": of_dicts, "linen": of_linen, "nnx": of_nnx, "equinox": of_equinox}


@pytest.mark.slow
@pytest.mark.parametrize("state", ["mirrored", "sharded"])
@pytest.mark.parametrize("library", LIBRARIES)
def test_trained_parameters_are_loaded_without_towerjax(library, state, tmp_path):
    params, call, again = LIBRARIES[library]()

    def loss_fn(params, batch, tower):
        return tj.Weighted.mean((call(params, batch) ** 2).sum(-1), tower.weight)

    strategy = tj.Mirrored(devices=("cpu:0", "cpu:1"), state=state)
    step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
    with jax.numpy_rank_promotion("allow"):
        trained, _ = step(step.init(params), X)
        path = tmp_path / "new" / "model.safetensors"
        save_parameters(path, trained.params)
        flat = load_file(path)
        host = jax.device_get(trained.params)
        assert {*flat} == {*flat_parameters(trained.params)}
        np.testing.assert_allclose(again(flat), call(host, X), rtol=1e-6)
        assert not np.allclose(call(host, X), call(params, X), rtol=1e-3)
    read = load_parameters(path, params)
    assert jax.tree.structure(read) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, read, host)
    assert [x.name for x in path.parent.iterdir()] == ["model.safetensors"]


def test_names_are_those_of_a_library_and_values_are_as_they_were():
    graph, params = nnx.split(Nnx(nnx.Rngs(0)))
    names = [f"layers/{i}/{x}" for i in range(2) for x in ("bias", "kernel")]
    assert [*flat_parameters(params)] == ["last/bias", "last/kernel", *names]
    assert [*flat_parameters(params, separator=".")][-1] == "layers.1.kernel"
    odd = {"a": jnp.ones(3, jnp.bfloat16), "b": np.ones((2, 3)).T, "c": 2, "d": True}
    flat = flat_parameters(odd)
    assert [x.dtype.name for x in flat.values()][:2] == ["bfloat16", "float64"]
    assert [x.shape for x in flat.values()] == [(3,), (3, 2), (), ()]
    assert [*flat_parameters(np.float32(3))] == ["params"]


DTYPES = "bfloat16 float16 int8 uint32 bool complex64 float8_e5m2 float8_e4m3fn".split()


@pytest.mark.few_fast(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_file_keeps_each_dtype_and_shape(dtype, tmp_path):
    params = {
        "a": jnp.arange(6).reshape(2, 3).T.astype(dtype),
        "b": jnp.ones((), dtype),
    }
    params["empty"] = jnp.ones((0, 3), dtype)
    save_parameters(tmp_path / "a", params)
    read = load_parameters(tmp_path / "a", jax.eval_shape(lambda: params))
    for x, y in zip(params.values(), read.values(), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        np.testing.assert_array_equal(np.asarray(x), y)


@pytest.mark.slow
def test_the_file_is_read_where_neither_jax_nor_towerjax_is(tmp_path):
    save_parameters(tmp_path / "a", {"w": np.float32([1, 2])})
    program = f"""
import sys
sys.path += {sys.path}
from safetensors.numpy import load_file
print(load_file({str(tmp_path / "a")!r}), {{"jax", "towerjax"}} & {{*sys.modules}})
"""
    command = [sys.executable, "-S", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "{'w': array([1., 2.], dtype=float32)} set()\n"


def test_parameters_are_printed_as_a_table():
    strategy = tj.Mirrored(devices=("cpu:0", "cpu:1"), state="sharded")
    split = strategy.placement.sharding(tj.towers.Layout.PER_TOWER)
    _, params = nnx.split(Nnx(nnx.Rngs(0)))
    params["last"]["kernel"].set_value(jax.device_put(np.ones((4, 2)), split))
    title, head, *rows, note = parameter_table(params).splitlines()
    assert (title, head.split()[:3]) == ("Parameters", ["leaf", "shape", "dtype"])
    assert len(rows) == 6 and note.startswith("  6 leaves, ")
    (row,) = (row for row in rows if "last/kernel" in row)
    assert re.split("  +", row.strip()) == [
        *("last/kernel", "[4, 2]", "float32", "32 B", "16 B", "sharded")
    ]
    shapes = jax.eval_shape(lambda: {"a": jnp.ones(3), "key": jax.random.key(0)})
    assert parameter_table(shapes, max_rows=1).count("shape only") == 1
    assert "the first is shown" in parameter_table(shapes, max_rows=1)


def saved(folder, **params):
    save_file({k: np.asarray(x) for k, x in params.items()}, folder / "a")
    return folder / "a"


W = np.ones((2, 3), np.float32)
BAD = {
    "a key": (lambda _: flat_parameters({"a": {"key": jax.random.key(0)}}),
        "params has a random key, 'a/key', which a file of numbers"),
    "no array": (lambda _: flat_parameters({"a": print}), "params['a'] is"),
    "one name": (lambda _: flat_parameters({"a": {"b": 1}, "a/b": 2}),
        "Two parameters have the name 'a/b', because their keys"),
    "no separator": (lambda _: flat_parameters({"a": 1}, separator=3), "separator=3"),
    "no rows": (lambda _: parameter_table({"a": 1}, max_rows=0), "max_rows=0 must be"),
    "a folder": (lambda path: save_parameters(path, {"a": W}), "cannot be written to"),
    "no file": (lambda path: load_parameters(path / "b", {"w": W}), "cannot be read"),
    "another shape": (lambda path: load_parameters(saved(path, w=W), {"w": W.T}),
        "w is float32[2, 3], expected float32[3, 2]"),
    "another dtype": (lambda path: load_parameters(saved(path, w=W),
        {"w": W.astype(np.float16)}), "w is float32[2, 3], expected float16[2, 3]"),
    "other names": (lambda path: load_parameters(saved(path, v=W), {"w": W}),
        "v is float32[2, 3], expected absent; w is absent, expected float32[2, 3]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_leave_or_come_is_refused(name, tmp_path):
    call, told = BAD[name]
    with pytest.raises(ValueError, match=re.escape(told)):
        call(tmp_path)
    assert {x.name for x in tmp_path.iterdir()} <= {"a"}


def test_torn_files_are_refused(tmp_path):
    path = saved(tmp_path, w=W)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"a' cannot be read: .*"):
        load_parameters(path, {"w": W})


def test_a_link_beside_the_file_that_is_written_leads_nowhere(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    path = tmp_path / "a.safetensors"
    (tmp_path / f"{path.name}.{os.getpid()}.part").symlink_to(outside)
    save_parameters(path, {"w": X})
    assert outside.read_text() == "mine"
    np.testing.assert_array_equal(load_file(path)["w"], X)
