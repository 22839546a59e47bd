"""A model written as programs and read again: the same outputs, and what is refused."""

import dataclasses
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import towerjax as tj

WEIGHTS = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
X = np.arange(15, dtype=np.float32).reshape(5, 3)


def model_fn(variables, features, labels, mode):
    scores = features @ variables
    outputs = {
        "classes": tj.ClassificationOutput(scores, classes=("cat", "dog")),
        "first": tj.RegressionOutput(scores[:, 0]),
        "all": tj.PredictOutput({"scores": scores, "rows": features}),
    }
    return tj.ModelSpec(mode, predictions={"x": scores}, export_outputs=outputs)


def only_predicts(variables, features, labels, mode):
    return tj.ModelSpec(mode, predictions={"y": features["x"] @ variables})


def replicated(fn=model_fn):
    strategy = tj.Mirrored(("cpu:0", "cpu:1"), towers=4)
    return tj.replicate_model_fn(fn, devices=strategy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("exported") / "served"
    tj.export_model(replicated(), WEIGHTS, X[:1], target, platforms=["cpu"])
    return target


def test_what_is_exported_is_loaded(folder):
    served, expected = tj.load_exported(folder), X @ WEIGHTS
    assert set(served(X, "all")) == {"scores", "rows"}
    assert served.signatures["classes"]["classes"] == ["cat", "dog"]
    assert served(X, "classes")["scores"].tolist() == expected.tolist()
    assert served(X[:2], "first")["value"].tolist() == expected[:2, 0].tolist()
    assert served(X, "all")["rows"].tolist() == X.tolist()
    assert "program" not in repr(served).replace("program_", "")


def test_predictions_are_exported_where_nothing_else_is(tmp_path):
    options = {"platforms": ["cpu"]}
    model = replicated(only_predicts)
    tj.export_model(model, WEIGHTS, {"x": X}, tmp_path / "served", **options)
    served = tj.load_exported(tmp_path / "served")
    assert served({"x": X[:3]})["y"].tolist() == (X[:3] @ WEIGHTS).tolist()
    with pytest.raises(
        ValueError, match=r"exported for features\['x'\] float32\[b, 3\]"
    ):
        served(X)


def test_a_state_is_exported_as_one_tower_reads_it(tmp_path):
    def scaled(variables, features, labels, mode, tower):
        x = features * tower.local["scale"] + tower.local["first"][None]
        return tj.ModelSpec(mode, predictions={"y": x @ variables.params})

    scale, first = np.float32([1, 2, 3, 6]), np.arange(12.0).reshape(4, 3)
    state = tj.TrainState.create(WEIGHTS, optax.sgd(0.1), local={
        "scale": tj.TowerLocal(scale[0], tj.Reduction.MEAN),
        "first": tj.TowerLocal(np.float32(first[0]), tj.Reduction.ONLY_FIRST_TOWER),
    })  # fmt: skip
    model = replicated(scaled)
    state = model.init(state)
    local = {
        "scale": dataclasses.replace(state.local["scale"], value=scale),
        "first": dataclasses.replace(state.local["first"], value=np.float32(first + 1)),
    }
    state = dataclasses.replace(state, local=local)
    tj.export_model(model, state, X, tmp_path / "served", platforms=["cpu"])
    served = tj.load_exported(tmp_path / "served")(X)["y"]
    expected = (X * 3.0 + (first[0] + 1)[None]) @ WEIGHTS.astype(np.float64)
    np.testing.assert_allclose(served, expected, rtol=1e-6)


@pytest.mark.parametrize(
    "features, text",
    [
        (
            X[:, :2],
            "exported for features float32[b, 3], but got features float32[b, 2]",
        ),
        (X.astype(int), "float32[b, 3], but got features int32[b, 3]."),
        ({"x": X}, "float32[b, 3], but got features['x'] float32[b, 3]."),
        (X[:1].tolist(), "but got features[0][0] float32[], features[0][1] float32[]"),
        (np.float32(1), "but got features float32[]."),
        ((), "but got nothing."),
        (X[:0], "features has no rows."),
    ],
    ids=["width", "dtype", "tree", "list", "scalar", "nothing", "empty"],
)
def test_features_of_another_kind_are_refused(folder, features, text):
    with pytest.raises(ValueError, match=re.escape(text)):
        tj.load_exported(folder)(features, "first")


def test_a_signature_that_there_is_not_is_refused(folder):
    for name in (None, "second"):
        text = f"signature={name!r} is not one of ['all', 'classes', 'first']."
        with pytest.raises(ValueError, match=re.escape(text)):
            tj.load_exported(folder)(X, name)


@pytest.mark.parametrize(
    "changed, text",
    [
        (
            {"model": model_fn},
            "export_model: model is a function; write tj.export_mode",
        ),
        (
            {"features": [1.0, 2.0]},
            "but features[0] is a float; features[1] is a float",
        ),
        ({"features": jnp.float32(1)}, "arrays or shapes [B, ...], but features is a"),
        ({"platforms": "cpu"}, "platforms='cpu' must be a list of some of ['cpu', 'cu"),
        ({"platforms": ["gpu"]}, "platforms=['gpu'] must be a list of some of"),
    ],
    ids=["function", "list", "scalar", "text", "gpu"],
)
def test_bad_arguments_are_refused_and_nothing_is_written(tmp_path, changed, text):
    given = {"model": replicated(), "variables": WEIGHTS, "features": X}
    with pytest.raises(ValueError, match=re.escape(text)):
        tj.export_model(directory=tmp_path / "served", **{**given, **changed})
    assert not list(tmp_path.iterdir())


def test_a_damaged_index_is_named(tmp_path):
    (tmp_path / "model.json").write_text("{")
    with pytest.raises(ValueError, match=r"model\.json' is damaged"):
        tj.load_exported(tmp_path)
