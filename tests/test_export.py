"""A model written as programs and read again: the same outputs, and what is refused."""

import dataclasses
import re
import shutil

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import InconclusiveDimensionOperation

import towerjax as tj
from towerjax.estimator import export
from towerjax.loop.checkpoint import folder as folder_module
from towerjax.mesh.placement import Placement

WEIGHTS = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
X = np.arange(15, dtype=np.float32).reshape(5, 3)


def model_fn(variables, features, labels, mode):
    scores = features @ variables
    outputs = {
        "classes": tj.estimator.ClassificationOutput(scores, classes=("cat", "dog")),
        "first": tj.estimator.RegressionOutput(scores[:, 0]),
        "all": tj.estimator.PredictOutput({"scores": scores, "rows": features}),
    }
    return tj.estimator.ModelSpec(
        mode, predictions={"x": scores}, export_outputs=outputs
    )


def only_predicts(variables, features, labels, mode):
    return tj.estimator.ModelSpec(mode, predictions={"y": features["x"] @ variables})


def replicated(fn=model_fn):
    strategy = tj.Mirrored(("cpu:0", "cpu:1"), towers=4)
    return tj.estimator.replicate_model_fn(fn, devices=strategy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("exported") / "served"
    tj.estimator.export_model(replicated(), WEIGHTS, X[:1], target, platforms=["cpu"])
    return target


@pytest.mark.slow
def test_what_is_exported_is_loaded(folder):
    served, expected = tj.estimator.load_exported(folder), X @ WEIGHTS
    assert set(served(X, "all")) == {"scores", "rows"}
    assert served.signatures["classes"]["classes"] == ["cat", "dog"]
    assert served(X, "classes")["scores"].tolist() == expected.tolist()
    assert set(served(X, "first")) == {"value"}
    assert served(X[:2], "first")["value"].tolist() == expected[:2, 0].tolist()
    for x in (X, X.astype(">f4")):
        assert served(x, "all")["rows"].tolist() == X.tolist()
    assert "program" not in repr(served).replace("program_", "")


def test_predictions_are_exported_where_nothing_else_is(tmp_path):
    options = {"platforms": ["cpu"]}
    model = replicated(only_predicts)
    tj.estimator.export_model(model, WEIGHTS, {"x": X}, tmp_path / "served", **options)
    served = tj.estimator.load_exported(tmp_path / "served")
    assert served({"x": X[:3]})["y"].tolist() == (X[:3] @ WEIGHTS).tolist()
    with pytest.raises(ValueError, match="a <class 'dict'> when exported"):
        served(X)


def test_a_state_is_exported_as_one_tower_reads_it(tmp_path):
    def scaled(variables, features, labels, mode, tower):
        x = features * tower.local["scale"] + tower.local["first"][None]
        return tj.estimator.ModelSpec(mode, predictions={"y": x @ variables.params})

    scale, first = np.float32([1, 2, 3, 6]), np.arange(12.0).reshape(4, 3)
    state = tj.TrainState.create(WEIGHTS, optax.sgd(0.1), local={
        "scale": tj.TowerLocal(scale[0], tj.Reduction.MEAN),
        "first": tj.TowerLocal(np.float32(first[0]), tj.Reduction.ONLY_FIRST_TOWER),
    })  # fmt: skip
    model = replicated(scaled)
    with pytest.raises(
        ValueError, match=r"towers than 4: .* has \(3,\) copies.*model.init"
    ):
        tj.estimator.export_model(model, state, X, tmp_path / "served")
    state = model.init(state)
    local = {
        "scale": dataclasses.replace(state.local["scale"], value=scale),
        "first": dataclasses.replace(state.local["first"], value=np.float32(first + 1)),
    }
    state = dataclasses.replace(state, local=local)
    tj.estimator.export_model(model, state, X, tmp_path / "served", platforms=["cpu"])
    served = tj.estimator.load_exported(tmp_path / "served")(X)["y"]
    expected = (X * 3.0 + (first[0] + 1)[None]) @ WEIGHTS.astype(np.float64)
    np.testing.assert_allclose(served, expected, rtol=1e-6)


FEATURES = {
    "width": (X[:, :2], r"expected \(b, 3\) and called with \(5, 2\)"),
    "dtype": (X.astype(int), "expected float32 and called with int32"),
    "tree": ({"x": X}, "is a <class 'dict'> in the invocation"),
    "scalar": (np.float32(1), r"expected \(b, 3\) and called with \(\)"),
    "empty": (X[:0], "Expected value >= 1 for dimension variable 'b'"),
    "wide": (np.full((1, 3), 2**40), r"\['features'\] is .* of int64 that holds 109"),
}


@pytest.mark.parametrize("name", FEATURES)
def test_features_of_another_kind_are_refused(folder, name):
    features, text = FEATURES[name]
    with pytest.raises(ValueError, match=text):
        tj.estimator.load_exported(folder)(features, "first")


def test_a_folder_that_there_is_stays(folder):
    with pytest.raises(ValueError, match="served' exists. Export into a new one"):
        tj.estimator.export_model(replicated(), WEIGHTS, X[:1], folder)


def test_a_second_process_neither_writes_nor_minds_what_the_first_wrote(
    tmp_path, monkeypatch
):
    target = tmp_path / "served"
    target.mkdir()
    monkeypatch.setattr(Placement, "num_processes", 2)
    monkeypatch.setattr(export, "call_on_first_process", lambda make: None)
    model, features = replicated(only_predicts), {"x": X[:1]}
    tj.estimator.export_model(model, WEIGHTS, features, target, platforms=["cpu"])
    assert not list(target.iterdir())


def test_a_signature_that_there_is_not_is_refused(folder):
    for name in (None, "second"):
        text = f"signature={name!r} must be one of 'all', 'classes', 'first'."
        with pytest.raises(ValueError, match=re.escape(text)):
            tj.estimator.load_exported(folder)(X, name)


@pytest.mark.parametrize(
    "changed, text",
    [
        (
            {"model": model_fn},
            "it has no model_fn. Pass tj.estimator.replicate_model_fn(model_fn)",
        ),
        (
            {"features": [1.0, 2.0]},
            "batch['features'][0] is 1.0 of type float; batch['features'][1]",
        ),
        ({"features": jnp.float32(1)}, "batch['features'] is a scalar of dtype"),
        ({"platforms": "cpu"}, "platforms='cpu' must be a list of some of ['cpu', 'cu"),
        ({"platforms": ["gpu"]}, "platforms=['gpu'] must be a list of some of"),
    ],
    ids=["function", "list", "scalar", "text", "gpu"],
)
def test_bad_arguments_are_refused_and_nothing_is_written(tmp_path, changed, text):
    given = {"model": replicated(), "variables": WEIGHTS, "features": X}
    with pytest.raises(ValueError, match=re.escape(text)):
        tj.estimator.export_model(directory=tmp_path / "served", **{**given, **changed})
    assert not list(tmp_path.iterdir())


def embeds(variables, features, labels, mode):
    rows = variables["table"][features["ids"]] * variables["scale"][None]
    return tj.estimator.ModelSpec(mode, predictions={"y": rows})


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    target = tmp_path_factory.mktemp("exported") / "served"
    variables = {"table": WEIGHTS, "scale": np.float32([2, 3])}
    ids = {"ids": np.zeros(1, np.int32)}
    tj.estimator.export_model(
        replicated(embeds), variables, ids, target, platforms=["cpu"]
    )
    return target


def test_a_table_is_looked_up_by_features(embedded):
    ids = np.array([2, 0, 2], np.int32)
    out = tj.estimator.load_exported(embedded)({"ids": ids})["y"]
    assert out.tolist() == (WEIGHTS[ids] * [2, 3]).tolist()


def test_one_changed_bit_of_any_file_is_refused_by_name(embedded, tmp_path):
    """Every file, at its ends and in between: of a number it would be another one."""
    names = {path.name for path in embedded.iterdir()}
    assert names == {"program_0.bin", "manifest.json"}
    for name in sorted(names):
        whole = (embedded / name).read_bytes()
        for place in (0, len(whole) // 3, len(whole) // 2, len(whole) - 2):
            target = tmp_path / f"{name}.{place}"
            shutil.copytree(embedded, target)
            changed = bytearray(whole)
            changed[place] ^= 1
            (target / name).write_bytes(bytes(changed))
            with pytest.raises(Exception) as caught:  # noqa: B017, PT011
                tj.estimator.load_exported(target)
            assert isinstance(caught.value, ValueError) and name in str(caught.value)


def _without_program(folder):
    (folder / "program_0.bin").unlink()


def _cut_program(folder):
    whole = (folder / "program_0.bin").read_bytes()
    (folder / "program_0.bin").write_bytes(whole[:-1])


def _added(folder):
    (folder / "other.bin").write_bytes(b"")


def _without_manifest(folder):
    (folder / "manifest.json").unlink()


def _manifest_elsewhere(folder):
    """The manifest's own names: none outside is read."""
    table = folder_module.read_manifest(folder)
    table["files"]["../outside.bin"] = table["files"]["program_0.bin"]
    shutil.copy(folder / "program_0.bin", folder.parent / "outside.bin")
    folder_module._write_table(folder, table)


DAMAGES = {
    "missing": (_without_program, "program_0.bin is missing"),
    "cut": (_cut_program, "program_0.bin has "),
    "added": (_added, "other.bin does not belong there"),
    "no manifest": (_without_manifest, "manifest.json is missing, cut or changed. Exp"),
    "manifest above": (_manifest_elsewhere, "../outside.bin is missing"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_was_not_written_is_refused(embedded, tmp_path, name):
    damage, text = DAMAGES[name]
    target = tmp_path / "served"
    shutil.copytree(embedded, target)
    damage(target)
    with pytest.raises(ValueError, match=re.escape(text)):
        tj.estimator.load_exported(target)


def test_sparse_features_are_refused(tmp_path):
    features = tj.sparse.IndexedRows(np.ones((1, 3)), np.array([0]), (2, 3))
    with pytest.raises(ValueError, match=r"features is a IndexedRows, whose entries"):
        tj.estimator.export_model(replicated(), WEIGHTS, features, tmp_path / "served")


@pytest.mark.parametrize(
    "ask, kind",
    [
        (lambda x: x.reshape(2, -1), InconclusiveDimensionOperation),
        (lambda x: x.reshape(len(x), -1), TypeError),
    ],
)
def test_how_many_rows_there_are_is_not_to_be_asked(ask, kind, tmp_path):
    def fn(variables, features, labels, mode):
        return tj.estimator.ModelSpec(mode, predictions={"y": ask(features)})

    with pytest.raises(kind) as caught:
        tj.estimator.export_model(replicated(fn), WEIGHTS, X, tmp_path / "no")
    text = "no len(x), and no if on x.shape[0]"
    assert any(text in note for note in caught.value.__notes__)
    assert not (tmp_path / "no").exists()


def test_another_type_error_of_a_model_is_not_said_to_be_of_its_rows(tmp_path):
    def fn(variables, features, labels, mode):
        raise TypeError("of the model itself")

    with pytest.raises(TypeError, match="of the model itself") as caught:
        tj.estimator.export_model(replicated(fn), WEIGHTS, X, tmp_path / "no")
    assert not any("any number of rows" in note for note in caught.value.__notes__)
