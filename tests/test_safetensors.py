"""Files of parameters, read and written by the library that defines the format."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy

import towerjax as tj

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"]
DTYPES += ["uint64", "float16", "bfloat16", "float32", "float64", "complex64"]
DTYPES += ["float8_e4m3fn", "float8_e5m2"]


def params():
    rng = np.random.default_rng(0)
    leaves = {x: rng.normal(size=(3, 2)).astype(jnp.dtype(x)) for x in DTYPES}
    turned = np.arange(6, dtype=np.float32).reshape(2, 3).T
    empty, scalar = np.zeros((0, 2), np.float32), np.array(3, np.float32)
    return {"a": {"b": leaves, 'é "x"': [turned, empty]}, "scalar": scalar}


def assert_same(x, y):
    assert x.dtype == y.dtype and x.shape == y.shape
    assert x.tobytes() == y.tobytes()


def names_of(tree):
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    keystr = jax.tree_util.keystr
    return {keystr(path, simple=True, separator="/"): x for path, x in pairs}


def test_what_is_saved_is_loaded_to_the_bit(tmp_path):
    path = tmp_path / "x.safetensors"
    tj.loop.save_safetensors(params(), path)
    jax.tree.map(assert_same, tj.loop.load_safetensors(path, params()), params())
    assert [x.name for x in tmp_path.iterdir()] == ["x.safetensors"]


def test_the_library_of_the_format_reads_it(tmp_path):
    path = tmp_path / "x.safetensors"
    tj.loop.save_safetensors(params(), path, metadata={"from": "towerjax"})
    expected = names_of(params())
    read = dict(safetensors.deserialize(path.read_bytes()))
    assert set(read) == set(expected)
    for name, x in expected.items():
        assert read[name]["shape"] == list(x.shape)
        assert bytes(read[name]["data"]) == x.tobytes()
    with safetensors.safe_open(path, "np") as file:
        assert file.metadata() == {"from": "towerjax"}
        assert_same(file.get_tensor("a/b/bfloat16"), expected["a/b/bfloat16"])


def test_what_the_library_of_the_format_writes_is_read(tmp_path):
    path, w = tmp_path / "x.safetensors", np.arange(6, dtype=np.float32).reshape(2, 3)
    v = np.ones(3, jnp.bfloat16)
    safetensors.numpy.save_file({"layer/w": w, "v": v}, path, metadata={"a": "b"})
    tree = tj.loop.load_safetensors(path)
    assert_same(tree["layer"]["w"], w)
    assert_same(tree["v"], v)


@pytest.mark.slow
def test_a_state_starts_from_a_file(tmp_path):
    def loss_fn(params, batch, tower):
        return tj.Weighted.mean(params["w"] * batch, tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(1.0), tj.Mirrored(towers=2))
    state, _ = step(step.init({"w": np.float32(3)}), np.ones(4, np.float32))
    tj.loop.save_safetensors(state.params, tmp_path / "x")
    again = step.init(tj.loop.load_safetensors(tmp_path / "x", state.params))
    assert float(again.params["w"]) == 2.0


def other_dtype(content):
    """The file with a dtype of the format that JAX does not have."""
    content = content.replace(b'"F32","shape":[2,3]', b'"F8_E8M0","shape":[2,12]')
    return content.replace(b"}}     ", b"}}")


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda b: b[:-1], "file not fully covered"),
        (lambda b: b + b"0", "file not fully covered"),
        (lambda b: b[:5], "header too small"),
        (lambda b: b[:20], "invalid header length"),
        (lambda b: b.replace(b"F32", b"F99"), "F99"),
        (other_dtype, "'F8_E8M0'"),
        (lambda b: b.replace(b"[2,3]", b"[2,2]"), "invalid shape"),
        (lambda b: b.replace(b"[0,24]", b"[1,25]"), "invalid offset for tensor `w`"),
        (lambda b: b.replace(b"{", b"["), "no whole safetensors"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, change, text):
    path = tmp_path / "x.safetensors"
    tj.loop.save_safetensors({"w": np.ones((2, 3), np.float32)}, path)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(tj.CheckpointError, match=text) as error:
        tj.loop.load_safetensors(path)
    assert "x.safetensors" in str(error.value)


def test_a_missing_library_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ValueError, match=r"'towerjax\[safetensors\]'"):
        tj.loop.save_safetensors({"w": np.ones(2)}, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_what_does_not_fit_is_named(tmp_path):
    path = tmp_path / "x.safetensors"
    tree = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32), "c": np.ones(1)}
    tj.loop.save_safetensors(tree, path)
    like = {**tree, "a": np.ones(3, np.float32), "b": np.ones(2, jnp.bfloat16)}
    like["d"] = like.pop("c")
    with pytest.raises(tj.CheckpointError) as error:
        tj.loop.load_safetensors(path, like)
    assert (
        "a is float32[2] there and float32[3] in like; b is float32[2] there and"
        " bfloat16[2] in like; c is float64[1] there and absent in like; d is absent"
        " there and float64[1] in like." in str(error.value)
    )


@pytest.mark.parametrize(
    "tree, text",
    [
        ({"k": jax.random.key(0)}, "k is key<fry>, which the format does not have"),
        ({"x": 1.0}, "x is float, which the format"),
        ({"a/b": np.ones(1), "a": {"b": np.ones(1)}}, "a/b is the name of two leaves"),
        ({"__metadata__": np.ones(1)}, "or of the metadata"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, tree, text):
    with pytest.raises(tj.CheckpointError, match=text):
        tj.loop.save_safetensors(tree, tmp_path / "x")
    assert not list(tmp_path.iterdir())


def test_names_that_are_arrays_and_folders_need_a_tree(tmp_path):
    tree = {"a": np.ones(1), "a/b": np.ones(2)}
    tj.loop.save_safetensors(tree, tmp_path / "x")
    with pytest.raises(tj.CheckpointError, match="a part of another name"):
        tj.loop.load_safetensors(tmp_path / "x")
    jax.tree.map(assert_same, tj.loop.load_safetensors(tmp_path / "x", tree), tree)


def test_a_list_of_numbers_at_the_head_is_plain_json(tmp_path):
    tj.loop.save_safetensors(np.ones(2, np.float32), tmp_path / "x")
    content = (tmp_path / "x").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    head = json.loads(content[8 : 8 + length])
    assert head == {"value": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
