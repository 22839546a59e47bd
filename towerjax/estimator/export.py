"""Export a trained model as serialized programs that contain its variables."""

import dataclasses
import functools
import json
import operator
import os
import pathlib
import shutil
import struct
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import InconclusiveDimensionOperation

from towerjax.data.shard import refuse_other_than_rows, refuse_wrapping
from towerjax.estimator.replicate import MAKE_MODEL, ReplicatedModel
from towerjax.estimator.spec import (
    ExportOutput,
    Mode,
    ModelSpec,
    PredictOutput,
    RegressionOutput,
)
from towerjax.estimator.variables import check_copies
from towerjax.loop.checkpoint.folder import check_manifest, write_manifest
from towerjax.mesh.placement import TowerAxes, readable
from towerjax.mesh.processes import call_on_first_process
from towerjax.step.state import TrainState
from towerjax.towers.strategies import OneDevice
from towerjax.towers.tower import tower_of
from towerjax.towers.tower_axis import lower_tower_axis
from towerjax.towers.tower_local import is_local, read_local
from towerjax.towers.variables import TowerLocal, plain
from towerjax.types import PyTree, named_leaves
from towerjax.types.leaves import (
    held_dtype,
    key_data,
    like_key,
    listed,
    map_parts,
    native,
)
from towerjax.types.options import check_methods, require
from towerjax.types.version import __version__

_FORMAT = 1
_PLATFORMS = ("cpu", "cuda", "tpu")


@dataclasses.dataclass(frozen=True)
class Exported:
    """An exported model, as `load_exported` returns it: one program a signature.

    Attributes:
      signatures: Name -> a description of its outputs: ``kind`` (``"predict"``,
        ``"regression"``, ``"classification"``) and, for classes with names,
        ``classes``.
    """

    signatures: Mapping[str, Mapping[str, Any]]
    _programs: Mapping[str, Any] = dataclasses.field(repr=False)

    def __call__(self, features: PyTree, signature: str | None = None) -> PyTree:
        """The outputs of one signature.

        Args:
          features: As the model was exported for, with any number of rows.
          signature: Its name; optional where there is only one.

        Returns:
          Name -> array: a classification's ``scores`` and ``classes``, a regression's
          ``value``, the ``outputs`` of a ``PredictOutput``.

        Raises:
          ValueError: There is no such signature, or features differ in their tree,
            shapes or dtypes.
        """
        if signature is None and len(self._programs) == 1:
            signature = next(iter(self._programs))
        if signature is None or signature not in self._programs:
            raise ValueError(
                f"signature={signature!r} is not one of {sorted(self._programs)}."
            )
        refuse_wrapping({"features": features})
        features = jax.tree.map(lambda x: jnp.asarray(native(x)), features)
        program = self._programs[signature]
        _check_features(features, program)
        return program.call(features)


def _check_features(features: PyTree, program: Any) -> None:
    """Raise unless features have the program's tree, shapes and dtypes, rows aside."""
    ((expected,), _) = jax.tree.unflatten(program.in_tree, program.in_avals)
    given, expected = _describe_leaves(features), _describe_leaves(expected)
    if given != expected:
        raise ValueError(
            f"The model was exported for {_join(expected)}, but got {_join(given)}."
        )
    empty = [name for name, x in named_leaves("features", features) if not x.shape[0]]
    if empty:
        raise ValueError(f"{', '.join(empty)} has no rows.")


def _describe_leaves(features: PyTree) -> dict[str, str]:
    return {
        name: f"{x.dtype}[{', '.join(['b', *map(str, x.shape[1:])][: x.ndim])}]"
        for name, x in named_leaves("features", features)
    }


def _join(leaves: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {x}" for name, x in leaves.items()) or "nothing"


def export_model(
    model: ReplicatedModel,
    variables: PyTree,
    features: PyTree,
    directory: str | os.PathLike[str],
    *,
    params: Any = None,
    config: Any = None,
    platforms: Sequence[str] = _PLATFORMS,
) -> None:
    """Write the model's exported outputs as programs that run without the model's code.

    Each of ``export_outputs`` that the model function returns in ``Mode.PREDICT``
    becomes a program of one tower, with the variables inside, for any number of rows;
    without ``export_outputs``, the predictions become one, called ``"predictions"``.
    Tower-local variables are reduced to one value. The directory appears whole or not
    at all; of several processes, all call this and the first writes it.

    Args:
      model: The model.
      variables: As the model takes them.
      features: Arrays or shapes ``[B, ...]``; only shapes and dtypes are read, not
        ``B``.
      directory: Where to write; must not exist.
      params: Hyperparameters, if the model function has the parameter ``params``.
      config: Anything else, if it has the parameter ``config``.
      platforms: JAX's names of the platforms on which the programs shall run.

    Raises:
      ValueError: The directory exists, the model function returns nothing to export,
        an argument has a wrong type, variables are not as ``model.init`` makes them,
        or the package flatbuffers, with which JAX writes programs, is missing.

    Example:
      >>> import tempfile, optax, towerjax as tj
      >>> def model_fn(w, features, labels, mode):
      ...     return tj.estimator.ModelSpec(mode, predictions={"y": w * features})
      >>> model = tj.estimator.replicate_model_fn(model_fn, devices=tj.OneDevice())
      >>> folder = pathlib.Path(tempfile.mkdtemp()) / "served"
      >>> export_model(model, jnp.float32(2), jnp.ones(1), folder, platforms=["cpu"])
      >>> load_exported(folder)(jnp.arange(3.0))["y"].tolist()
      [0.0, 2.0, 4.0]
    """
    _check_export(model, features, platforms)
    target = pathlib.Path(directory)
    several = model.strategy.placement.num_processes > 1
    on_first = call_on_first_process if several else operator.call
    on_first(functools.partial(_refuse_existing, target))
    _require_flatbuffers()
    given = {"params": params, "config": config}
    model.model_fn.refuse_unaccepted(given)
    variables = _as_one_tower(variables, model.strategy.num_towers)
    specs = _symbolic_shapes(features)
    programs = {}
    try:
        call = functools.partial(_call_model, model, variables, given)
        spec = jax.eval_shape(call, specs)
        signatures = {name: about for name, (about, _) in _served(spec).items()}
        for name in signatures:

            def serve(features: PyTree, name: str = name) -> PyTree:
                return _served(call(features))[name][1]

            exported = jax.export.export(jax.jit(serve), platforms=list(platforms))
            programs[name] = exported(specs).serialize()
    except InconclusiveDimensionOperation as error:
        error.add_note(
            "An exported program is for any number of rows, b, so the model function"
            " must not need to know it: write x.reshape(-1, 10) or"
            " x.reshape(x.shape[0], -1), and no if on x.shape[0]."
        )
        raise
    on_first(functools.partial(_write, target, programs, signatures))


def _refuse_existing(target: pathlib.Path) -> None:
    if target.exists():
        raise ValueError(f"directory={str(target)!r} exists. Export into a new one.")


def _check_export(model: Any, features: PyTree, platforms: Any) -> None:
    check_methods("model", model, "model_fn", MAKE_MODEL)
    refuse_other_than_rows(features, "features")
    bad = [
        f"{name} is a {type(x).__name__}"
        for name, x in named_leaves("features", features)
        if not jnp.shape(x) or not hasattr(x, "dtype")
    ]
    if bad:
        raise ValueError(
            f"features are arrays or shapes [B, ...], but {listed(bad)}. Wrap lists"
            " in np.asarray."
        )
    known = (*_PLATFORMS, "rocm")
    if isinstance(platforms, str) or not set(platforms) <= set(known):
        raise ValueError(
            f"platforms={platforms!r} must be a list of some of {list(known)}; a GPU of"
            " NVIDIA is 'cuda'."
        )


def load_exported(directory: str | os.PathLike[str]) -> Exported:
    """A model that `export_model` wrote.

    Args:
      directory: The directory that `export_model` wrote.

    Returns:
      An `Exported`.

    Raises:
      ValueError: The directory holds no exported model, or one of another format; a
        file is missing, unknown or changed; or the package flatbuffers is missing.

    Example:
      >>> load_exported("nowhere")
      Traceback (most recent call last):
      ValueError: directory='nowhere' holds no exported model: there is no model.json.
    """
    source = pathlib.Path(directory)
    index = source / "model.json"
    if not index.is_file():
        raise ValueError(
            f"directory={str(source)!r} holds no exported model: there is no"
            " model.json."
        )
    _require_flatbuffers()
    try:
        held = dict(json.loads(index.read_text()))
    except (ValueError, TypeError):
        held = {}
    known = held.get("format")
    if known not in (None, _FORMAT):
        raise ValueError(
            f"{str(index)!r} is of format {known!r}; this is towerjax {__version__},"
            f" which reads format {_FORMAT}."
        )
    signatures = held.get("signatures")
    if not isinstance(signatures, dict):
        raise ValueError(f"{str(index)!r} is damaged. Export the model anew.")
    check_manifest(source, "exported model", "Export the model anew.")
    programs = {
        name: _read_program(source, x.get("file")) for name, x in signatures.items()
    }
    return Exported(signatures, programs)


def _read_program(source: pathlib.Path, name: Any) -> Any:
    file = source / str(name)
    if file.resolve().parent != source.resolve():
        raise ValueError(
            f"{str(source / 'model.json')!r} names {name!r}, which is not a file of its"
            " folder. Export the model anew."
        )
    try:
        return jax.export.deserialize(bytearray(file.read_bytes()))
    except (OSError, ValueError, struct.error) as error:
        raise ValueError(
            f"{str(file)!r} is missing or damaged: {error}. Export the model anew."
        ) from error


def _require_flatbuffers() -> None:
    require("flatbuffers", "A program that JAX writes or reads", "'towerjax[export]'")


def _as_one_tower(variables: PyTree, num_towers: int) -> PyTree:
    """The variables as one tower sees them in PREDICT, on the default device.

    JAX arrays, because NumPy arrays take no traced index, as in ``table[ids]``.
    """
    nodes = jax.tree.leaves(variables, is_leaf=is_local)
    check_copies([x for x in nodes if is_local(x)], num_towers)

    def one(x: TowerLocal) -> TowerLocal:
        return dataclasses.replace(x, value=read_local(x))

    def on_host(x: Any) -> Any:
        return like_key(jax.device_put(jax.device_get(readable(key_data(x)))), x)

    return jax.tree.map(on_host, map_parts(TowerLocal, one, variables))


def _symbolic_shapes(features: PyTree) -> PyTree:
    """Shapes with a symbolic number of rows."""
    (rows,) = jax.export.symbolic_shape("b")

    def of(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *jnp.shape(x)[1:]), held_dtype(x.dtype))

    return jax.tree.map(of, features)


def _call_model(
    model: ReplicatedModel, variables: PyTree, given: Any, features: PyTree
) -> ModelSpec:
    """Call the model function in PREDICT, on one tower."""
    axes = TowerAxes(1, 1, device_axis=False, in_turn=False, platform="")
    state, local = None, None
    if isinstance(variables, TrainState):
        state, local = variables, plain(variables.local)
    rows = jax.tree.leaves(features)[0].shape[0]
    size = {"num_valid": jnp.int32(rows), "rows": rows}

    def call(batch: PyTree) -> ModelSpec:
        tower = tower_of(OneDevice(), axes, jnp.int32(0), state, local=local, **size)
        return model.model_fn.call(variables, batch, Mode.PREDICT, tower, given)

    return lower_tower_axis(call, axes)({"features": features})


def _served(spec: ModelSpec) -> dict[str, tuple[dict[str, Any], PyTree]]:
    """For each signature its description, and its outputs."""
    outputs = spec.export_outputs or {"predictions": PredictOutput(spec.predictions)}
    return {name: _describe_output(output) for name, output in outputs.items()}


def _describe_output(output: ExportOutput) -> tuple[dict[str, Any], PyTree]:
    if isinstance(output, PredictOutput):
        outputs = output.outputs
        outputs = dict(outputs) if isinstance(outputs, Mapping) else {"output": outputs}
        return {"kind": "predict"}, outputs
    if isinstance(output, RegressionOutput):
        return {"kind": "regression"}, {"value": output.value}
    about: dict[str, Any] = {"kind": "classification"}
    parts = {"scores": output.scores, "classes": output.classes}
    if isinstance(output.classes, tuple):
        about["classes"] = list(parts.pop("classes"))
    return about, {name: part for name, part in parts.items() if part is not None}


def _write(
    target: pathlib.Path, programs: dict[str, bytes], signatures: dict[str, Any]
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = pathlib.Path(
        tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent)
    )
    try:
        for number, (name, program) in enumerate(programs.items()):
            signatures[name]["file"] = f"program_{number}.bin"
            (folder / signatures[name]["file"]).write_bytes(program)
        index = {
            "format": _FORMAT,
            "towerjax": __version__,
            "jax": jax.__version__,
            "signatures": signatures,
        }
        (folder / "model.json").write_text(json.dumps(index, indent=2) + "\n")
        write_manifest(folder)
        folder.chmod(0o755)
        folder.rename(target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
