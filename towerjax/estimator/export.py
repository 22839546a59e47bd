"""Export a trained model as serialized programs that contain its variables."""

import dataclasses
import functools
import operator
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import InconclusiveDimensionOperation

from towerjax.data.shard import fit_shapes, refuse_other_than_rows, refuse_wrapping
from towerjax.estimator.model_fn import ClassNames, Mode, ModelSpec, PredictOutput
from towerjax.estimator.replicate import MAKE_MODEL, ReplicatedModel
from towerjax.estimator.variables import as_state
from towerjax.loop.checkpoint.folder import check_manifest, commit, read_manifest
from towerjax.mesh.placement import TowerAxes, readable
from towerjax.mesh.processes import call_on_first_process
from towerjax.step.state import TrainState
from towerjax.step.state_checks import check_num_towers
from towerjax.towers.strategies import OneDevice
from towerjax.towers.tower import tower_of
from towerjax.towers.tower_axis import lower_tower_axis
from towerjax.towers.variables import TowerLocal, plain, read_local
from towerjax.types import PyTree
from towerjax.types.leaves import key_data, like_key, map_parts, native
from towerjax.types.options import check_choice, check_methods, require

_ABOUT = ("exported model", "Export the model anew.")
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
            shapes or dtypes, or have no rows.
        """
        if signature is None and len(self._programs) == 1:
            (signature,) = self._programs
        check_choice("signature", signature, sorted(self._programs))
        refuse_wrapping({"features": features})
        features = jax.tree.map(lambda x: jnp.asarray(native(x)), features)
        return self._programs[str(signature)].call(features)


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
    without ``export_outputs`` the predictions become one, ``"predictions"``. The
    directory appears whole or not at all; of several processes the first writes it.

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
      ValueError: The directory exists, an argument is wrong, or the package
        flatbuffers, with which JAX writes programs, is missing.

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
    check_methods("model", model, "model_fn", MAKE_MODEL)
    known = (*_PLATFORMS, "rocm")
    if isinstance(platforms, str) or not set(platforms) <= set(known):
        raise ValueError(
            f"platforms={platforms!r} must be a list of some of {list(known)}."
        )
    target = pathlib.Path(directory)
    several = model.strategy.placement.num_processes > 1
    on_first = call_on_first_process if several else operator.call
    if on_first(target.exists):
        raise ValueError(f"directory={str(target)!r} exists. Export into a new one.")
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
    except (InconclusiveDimensionOperation, TypeError) as error:
        if isinstance(error, TypeError) and "_DimExpr" not in str(error):
            raise
        error.add_note(
            "An exported program is for any number of rows, b: write x.reshape(-1, 10)"
            " or x.reshape(x.shape[0], -1), no len(x), and no if on x.shape[0]."
        )
        raise
    on_first(functools.partial(_write, target, programs, signatures))


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
      >>> load_exported("nowhere")  # doctest: +IGNORE_EXCEPTION_DETAIL
      Traceback (most recent call last):
      CheckpointError: The exported model 'nowhere' is not what was written: ...
    """
    _require_flatbuffers()
    source = pathlib.Path(directory)
    check_manifest(source, *_ABOUT)
    signatures = read_manifest(source, *_ABOUT)["record"]["signatures"]
    files = (source / f"program_{number}.bin" for number in range(len(signatures)))
    programs = [jax.export.deserialize(bytearray(x.read_bytes())) for x in files]
    return Exported(signatures, dict(zip(signatures, programs, strict=True)))


def _require_flatbuffers() -> None:
    require("flatbuffers", "A program that JAX writes or reads", "'towerjax[export]'")


def _as_one_tower(variables: PyTree, num_towers: int) -> PyTree:
    """The variables as one tower sees them in PREDICT, on the default device.

    JAX arrays, because NumPy arrays take no traced index, as in ``table[ids]``.
    """
    check_num_towers(as_state(variables), num_towers)

    def one(x: TowerLocal) -> TowerLocal:
        return dataclasses.replace(x, value=read_local(x))

    def on_host(x: Any) -> Any:
        return like_key(jax.device_put(jax.device_get(readable(key_data(x)))), x)

    return jax.tree.map(on_host, map_parts(TowerLocal, one, variables))


def _symbolic_shapes(features: PyTree) -> PyTree:
    """Shapes with a symbolic number of rows."""
    (rows,) = jax.export.symbolic_shape("b")
    refuse_other_than_rows(features, "features")
    shapes = fit_shapes({"features": features}, 1, "error")["features"]
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), shapes
    )


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


def _describe_output(output: Any) -> tuple[dict[str, Any], PyTree]:
    kind = type(output).__name__.removesuffix("Output").lower()
    about: dict[str, Any] = {"kind": kind}
    if isinstance(output, PredictOutput):
        outputs = output.outputs
        outputs = dict(outputs) if isinstance(outputs, Mapping) else {"output": outputs}
        return about, outputs
    parts = {name: part for name, part in vars(output).items() if part is not None}
    if isinstance(parts.get("classes"), ClassNames):
        about["classes"] = list(parts.pop("classes"))
    return about, parts


def _write(
    target: pathlib.Path, programs: dict[str, bytes], signatures: dict[str, Any]
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    around = tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent)
    with around as parent:
        folder = pathlib.Path(parent) / "model"
        folder.mkdir()
        for number, program in enumerate(programs.values()):
            (folder / f"program_{number}.bin").write_bytes(program)
        commit(folder, target, {"jax": jax.__version__, "signatures": signatures})
