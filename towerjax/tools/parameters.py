"""Parameters of any library as a plain dict, a safetensors file, or a table."""

import os
import sys
from typing import Any

import jax
import numpy as np

from towerjax.loop.files import checked_path, replace_file
from towerjax.mesh.processes import call_on_first_process
from towerjax.towers.saved import saved_values
from towerjax.types import PyTree
from towerjax.types.boundary import api_boundary
from towerjax.types.options import check_text, check_whole, opening, require
from towerjax.types.refusals import listed, refuse_unheld, unlike
from towerjax.types.tables import as_text, leaf_table
from towerjax.types.trees import is_key


@api_boundary
def flat_parameters(params: PyTree, *, separator: str = "/") -> dict[str, np.ndarray]:
    """Return the parameters by name, as arrays on the host.

    A name joins the keys of a leaf, as in ``"dense/kernel"`` for a dict or
    ``"layers/0/weight"`` for an Equinox module or a Flax NNX state. Flax's boxes around
    an array (``nnx.Variable``, ``nn.Partitioned``) do not appear in it.
    ``unflatten_dict(flat, sep="/")`` of ``flax.traverse_util`` makes nested dicts.

    Args:
      params: A pytree of arrays, such as ``state.params``, ``nnx.split(model)[1]`` or
        ``eqx.filter(model, eqx.is_array)``. Arrays that are sharded over processes are
        gathered, so all processes must call this function.
      separator: The text between keys.

    Returns:
      A dict of names and arrays, in tree order.

    Raises:
      ValueError: A leaf is not an array, or is a random key; or two leaves have the
        same name.

    Example:
      >>> import jax.numpy as jnp
      >>> params = {"dense": [jnp.ones((2, 3)), jnp.zeros(3)], "scale": jnp.ones(())}
      >>> {name: x.shape for name, x in flat_parameters(params).items()}
      {'dense/0': (2, 3), 'dense/1': (3,), 'scale': ()}
    """
    check_text("separator", separator, "the text between keys, such as '/'")
    named = _named(params, separator)
    values = jax.device_get(saved_values([x for _, x in named]))
    names = [name for name, _ in named]
    return dict(zip(names, map(np.asarray, values), strict=True))


@api_boundary
def save_parameters(path: str | os.PathLike[str], params: PyTree) -> None:
    """Write parameters to a safetensors file, which any framework can read.

    Args:
      path: The file, local or like ``"gs://bucket/model.safetensors"``. Its folder is
        created, and an existing file is replaced. If there are several processes, all
        must call this function, and the first one writes.
      params: The parameters, as for `flat_parameters`. The file has the same names.

    Raises:
      ValueError: safetensors is not installed; the file cannot be written; or
        `flat_parameters` raises.

    Example:
      >>> import jax.numpy as jnp, tempfile
      >>> from safetensors.flax import load_file
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_parameters(f"{folder}/a.safetensors", {"w": jnp.ones(3)})
      ...     print(load_file(f"{folder}/a.safetensors"))
      {'w': Array([1., 1., 1.], dtype=float32)}
    """
    files = require("safetensors.numpy", "save_parameters", "'towerjax[safetensors]'")
    where = checked_path("path", path, "a file")
    flat = flat_parameters(params)
    content = files.save({k: np.asarray(x, order="C") for k, x in flat.items()})

    def write() -> None:
        with opening("path", where):
            where.parent.mkdir(parents=True, exist_ok=True)
            replace_file(where, content)

    call_on_first_process(write)


@api_boundary
def load_parameters(path: str | os.PathLike[str], like: PyTree) -> PyTree:
    """Read parameters from a file of `save_parameters`, in the structure of ``like``.

    Args:
      path: The file, as for `save_parameters`.
      like: A tree of arrays or of ``jax.ShapeDtypeStruct``. Its structure, names,
        shapes and dtypes are used, its values are not.

    Returns:
      A tree like ``like`` with arrays on the host, as ``step.init`` accepts.

    Raises:
      ValueError: The file cannot be read; or a name, shape or dtype differs. The error
        names all differences.

    Example:
      >>> import jax.numpy as jnp, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     save_parameters(f"{folder}/a.safetensors", {"w": jnp.ones(3)})
      ...     load_parameters(f"{folder}/a.safetensors", {"w": jnp.zeros(3)})
      {'w': array([1., 1., 1.], dtype=float32)}
    """
    files = require("safetensors", "load_parameters", "'towerjax[safetensors]'")
    where = checked_path("path", path, "a file")
    try:
        stored = dict(files.deserialize(where.read_bytes()))
    except (OSError, files.SafetensorError) as error:
        raise ValueError(
            f"path={str(where)!r} cannot be read: {error}. Name a file of"
            " save_parameters."
        ) from error
    named = _named(like, "/", shapes=True)
    there = {
        name: f"{_DTYPES.get(x['dtype'], x['dtype'])}{list(x['shape'])}"
        for name, x in stored.items()
    }
    if problems := unlike(there, {name: _kind(x) for name, x in named}):
        raise ValueError(
            f"The parameters in {str(where)!r} do not fit like: {listed(problems)}."
            " Pass a tree with the names, shapes and dtypes that were saved."
        )
    arrays = [
        np.frombuffer(stored[name]["data"], x.dtype).reshape(x.shape).copy()
        for name, x in named
    ]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


@api_boundary
def parameter_table(params: PyTree, *, max_rows: int = 40) -> str:
    """Return a table of parameters: shape, dtype, bytes, bytes per device and layout.

    Args:
      params: The parameters, as for `flat_parameters`; or a whole state, or shapes.
      max_rows: The largest number of rows to show.

    Returns:
      The table as text, for ``print``.

    Example:
      >>> import jax.numpy as jnp
      >>> print(parameter_table({"dense": {"kernel": jnp.ones((2, 3))}}))
      Parameters
        leaf          shape   dtype    bytes  on each device  layout
        dense/kernel  [2, 3]  float32   24 B            24 B  one device
        1 leaf, 24 B; 24 B on each device
    """
    check_whole("max_rows", max_rows)
    named = _named(params, "/", shapes=True, keys=True)
    leaves = [(name, x, None) for name, x in named]
    return as_text([leaf_table("Parameters", leaves, max_rows)])


def _named(
    params: PyTree, separator: str, *, shapes: bool = False, keys: bool = False
) -> list[tuple[str, Any]]:
    """Return ``(name, array)`` of each leaf, in tree order."""
    refuse_unheld("params", params, shapes=shapes)
    named = []
    for path, box in jax.tree_util.tree_leaves_with_path(params, is_leaf=_is_box):
        [leaf] = jax.tree.leaves(box)
        name = jax.tree_util.keystr(path, simple=True, separator=separator)
        if is_key(leaf) and not keys:
            raise ValueError(
                f"params has a random key, {name!r}, which a file of numbers cannot"
                " hold. Pass the parameters alone, such as nnx.split(model, nnx.Param,"
                " ...)[1], or pass jax.random.key_data of the key."
            )
        named.append((name or "params", leaf))
    names = [name for name, _ in named]
    if twice := sorted({x for x in names if names.count(x) > 1}):
        raise ValueError(
            f"Two parameters have the name {twice[0]!r}, because their keys contain"
            f" {separator!r}. Give flat_parameters another separator=, or rename a key."
        )
    return named


# This maps safetensors' names to dtypes. Its own reader knows only NumPy's dtypes.
_DTYPES = {
    "BOOL": "bool",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    "C64": "complex64",
}

# These are Flax's boxes around an array. There are none if Flax's modules are not
# imported.
_BOXES = {"flax.nnx": "Variable", "flax.core.meta": "AxisMetadata"}


def _is_box(x: Any) -> bool:
    """Return whether ``x`` is one of Flax's boxes around one array."""
    there = [getattr(sys.modules[k], v) for k, v in _BOXES.items() if k in sys.modules]
    return isinstance(x, tuple(there)) and len(jax.tree.leaves(x)) == 1


def _kind(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}"
