"""Save parameters as a safetensors file, and load such files."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.loop.checkpoint.folder import CheckpointError
from towerjax.mesh.placement import is_split
from towerjax.types import PyTree, readable_leaves
from towerjax.types.leaves import differing_texts, listed
from towerjax.types.options import require

_DTYPES: Mapping[str, Any] = {
    "BOOL": np.bool_,
    **{f"I{n}": f"int{n}" for n in (8, 16, 32, 64)},
    **{f"U{n}": f"uint{n}" for n in (8, 16, 32, 64)},
    **{f"F{n}": f"float{n}" for n in (16, 32, 64)},
    "BF16": jnp.bfloat16,
    "F8_E4M3": jnp.float8_e4m3fn,
    "F8_E5M2": jnp.float8_e5m2,
    "C64": "complex64",
}


def save_safetensors(
    params: PyTree,
    path: str | os.PathLike[str],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write parameters as a safetensors file, by an atomic rename.

    A leaf's name is its path, such as ``"Dense_0/kernel"``. Of several processes
    one calls it.

    Args:
      params: A pytree of arrays, e.g. ``state.params``; with variables in it, or
        sharded over several processes, pass ``tj.towers.saved_values(params)``.
      path: The file; an existing one is replaced.
      metadata: Text by name, kept in the file's header.

    Raises:
      CheckpointError: The format has no such dtype, two leaves have one name, or a
        leaf is split over several processes.
      ValueError: The package safetensors is not installed.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = pathlib.Path(folder) / "model.safetensors"
      ...     save_safetensors({"layer": {"w": jnp.ones(2, jnp.bfloat16)}}, file)
      ...     load_safetensors(file)["layer"]["w"].tolist()
      [1.0, 1.0]
    """
    names: dict[str, Any] = {}
    dtypes, problems = {np.dtype(x) for x in _DTYPES.values()}, []
    for name, x in _named_leaves(params):
        if name in names or name == "__metadata__":
            problems.append(f"{name} is the name of two leaves, or of the metadata")
        elif getattr(x, "dtype", None) not in dtypes:
            kind = getattr(x, "dtype", type(x).__name__)
            problems.append(f"{name} is {kind}, which the format does not have")
        elif is_split(x):
            advice = "let every process call tj.towers.saved_values(params) before"
            problems.append(f"{name} is split over several processes; {advice}")
        names[name] = x
    if problems:
        raise CheckpointError(f"save_safetensors: {listed(problems)}.")
    path = pathlib.Path(path)
    being_made = path.with_name(path.name + ".saving")
    arrays = {name: np.asarray(x, order="C") for name, x in names.items()}
    _import("safetensors.numpy").save_file(
        arrays, being_made, dict(metadata or {}) or None
    )
    with being_made.open("rb") as file:
        os.fsync(file.fileno())
    being_made.replace(path)


def _import(module: str) -> Any:
    """A module of the package safetensors, or an error that says how to install it."""
    return require(module, "Such a file", "'towerjax[safetensors]'")


def load_safetensors(path: str | os.PathLike[str], like: PyTree = None) -> PyTree:
    """The arrays of a safetensors file, as NumPy arrays.

    Args:
      path: A file that any library wrote.
      like: A pytree of arrays or shapes, e.g. ``state.params``, whose leaves are found
        by their paths. None makes nested dicts of the names' parts between ``/``.

    Returns:
      A pytree of NumPy arrays, for ``step.init`` or `restored_values`.

    Raises:
      CheckpointError: The file is truncated or of another format; a leaf is missing,
        not in ``like``, or has another shape or dtype (names all of them).
      ValueError: The package safetensors is not installed.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = pathlib.Path(folder) / "model.safetensors"
      ...     save_safetensors([np.float32(1), np.arange(2)], file)
      ...     load_safetensors(file, [np.float32(0), np.zeros(2, int)])
      [array(1., dtype=float32), array([0, 1])]
    """
    path = pathlib.Path(path)
    found = _read_arrays(path)
    if like is None:
        return _nest(found, path)
    there, wanted = (
        {name: f"{x.dtype}{list(x.shape)}" for name, x in pairs}
        for pairs in (found.items(), _named_leaves(like))
    )
    if problems := differing_texts(there, wanted, "{} is {} there and {} in like"):
        raise CheckpointError(f"{str(path)!r}: {listed(problems)}.")
    return jax.tree.unflatten(jax.tree.structure(like), [found[x] for x in wanted])


def _named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    return [(name or "value", leaf) for name, leaf in readable_leaves("", tree)]


def _read_arrays(path: pathlib.Path) -> dict[str, np.ndarray]:
    # Not by safetensors.numpy, which does not read float8.
    library, data = _import("safetensors"), path.read_bytes()
    try:
        leaves = library.deserialize(data)
        return {
            name: np.frombuffer(x["data"], _DTYPES[x["dtype"]]).reshape(x["shape"])
            for name, x in leaves
        }
    except (library.SafetensorError, KeyError) as error:
        raise CheckpointError(
            f"{str(path)!r} is no whole safetensors file of JAX's dtypes: {error}."
        ) from error


def _nest(found: Mapping[str, np.ndarray], path: pathlib.Path) -> PyTree:
    tree: dict[str, Any] = {}
    for name, x in found.items():
        *parts, last = name.split("/")
        node = tree
        for part in parts:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                break
        if not isinstance(node, dict) or last in node:
            raise CheckpointError(
                f"{str(path)!r}: {name} is an array and a part of another name. Say"
                " load_safetensors(path, like)."
            )
        node[last] = x
    return tree
