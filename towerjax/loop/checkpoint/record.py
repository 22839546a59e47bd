"""The contents of a checkpoint: a state's arrays, and a record that describes them."""

import base64
import contextlib
import dataclasses
import importlib.metadata
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from towerjax.loop.checkpoint.folder import CheckpointError, write_synced
from towerjax.mesh.placement import Placement
from towerjax.towers.cross_tower.placement import restore_on
from towerjax.towers.tower_local import read_local
from towerjax.towers.variables import TowerLocal, is_variable
from towerjax.types import Layout, PyTree, Reduction, leaf_name
from towerjax.types.leaves import is_key, key_data, like_key, listed
from towerjax.types.options import is_one_real
from towerjax.types.version import __version__


@dataclasses.dataclass(frozen=True)
class Leaf:
    """The description of one leaf of a saved state."""

    name: str  # such as state.params['w']
    shape: tuple[int, ...]  # with the dim over towers, where it has one
    dtype: str  # the dtype's name; for a PRNG key its implementation
    reduction: str | None = None  # of a tower-local variable

    @property
    def description(self) -> str:
        """The leaf in words, without the number of towers."""
        shape = self.shape if self.reduction is None else self.shape[1:]
        words = f"{self.dtype}{list(shape)}"
        return words + (f", tower-local {self.reduction}" if self.reduction else "")


def leaves_of(state: PyTree) -> list[Leaf]:
    """A `Leaf` for each leaf of a state, in tree order."""
    found = []
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable):
        reduction = node.reduction.name if isinstance(node, TowerLocal) else None
        for inner, x in jax.tree_util.tree_leaves_with_path(node):
            name = leaf_name("state", (*path, *inner))
            dtype = f"key of {jax.random.key_impl(x)}" if is_key(x) else str(x.dtype)
            found.append(Leaf(name, tuple(x.shape), dtype, reduction))
    return found


def arrays_by_name(state: PyTree) -> dict[str, jax.Array]:
    """The leaves by name, PRNG keys as their data; leaves of size 0 are left out."""
    leaves = zip(leaves_of(state), jax.tree.leaves(state), strict=True)
    return {leaf.name: _one_copy(key_data(x)) for leaf, x in leaves if x.size}


def _one_copy(x: jax.Array) -> jax.Array:
    """One copy of a replicated array; of more, Orbax would compile and save slices."""
    has_copies = x.is_fully_replicated and x.is_fully_addressable
    return x.addressable_data(0) if has_copies else x


def array_checkpointer() -> Any:
    """Orbax's checkpointer; its import takes longer than that of towerjax."""
    import orbax.checkpoint

    return orbax.checkpoint.StandardCheckpointer()


def check_same_model(
    saved: Sequence[Leaf], state: PyTree, folder: pathlib.Path
) -> None:
    """Raise unless the saved leaves are those of the state, for any towers."""
    old, new = ({leaf.name: leaf for leaf in x} for x in (saved, leaves_of(state)))
    problems = [f"it lacks {name}" for name in new if name not in old]
    problems += [f"it has {name}, which this does not" for name in old.keys() - new]
    problems += [
        f"{name} is {old[name].description} there and {leaf.description} here"
        for name, leaf in new.items()
        if name in old and old[name].description != leaf.description
    ]
    if problems:
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is one of another model:"
            f" {listed(sorted(problems))}. Build the model, optimizer and step as they"
            " were, or name another folder."
        )


def restore_leaves(
    read: Callable[[Mapping[str, jax.ShapeDtypeStruct]], Mapping[str, jax.Array]],
    saved: Sequence[Leaf],
    state: PyTree,
    placement: Placement,
) -> PyTree:
    """The state with saved values, in the shardings of ``state``.

    Tower-local values are restored as they were for the same number of towers.
    For another number the towers' values are reduced to one, which is split over the
    towers (SUM) or copied to each.
    """
    old = {leaf.name: leaf for leaf in saved}
    names = [leaf.name for leaf in leaves_of(state)]
    leaves, treedef = jax.tree.flatten(state)
    pairs = list(zip(names, leaves, strict=True))
    resized = {name for name, x in pairs if old[name].shape != tuple(x.shape)}
    _refuse_unreduced(old, resized)
    shapes = {}
    for name, x in pairs:
        numbers = key_data(x)
        shape, sharding = numbers.shape, numbers.sharding
        if name in resized:
            shape = (old[name].shape[0], *shape[1:])
            sharding = placement.sharding(Layout.MIRRORED)
        if math.prod(shape):
            dtype = numbers.dtype
            shapes[name] = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    found = read(shapes)
    leaves = [like_key(found[name], x) if name in found else x for name, x in pairs]
    new = treedef.unflatten(leaves)
    return _redistribute(new, state, placement) if resized else new


def _refuse_unreduced(old: Mapping[str, Leaf], resized: set[str]) -> None:
    none = Reduction.NONE.name
    bad = [name for name in sorted(resized) if old[name].reduction == none]
    if bad:
        raise CheckpointError(
            f"{', '.join(bad)}: Reduction.NONE, so the {old[bad[0]].shape[0]} towers"
            " that were saved have no one value to split over another number of"
            " towers. Use as many towers, or give it SUM, MEAN or ONLY_FIRST_TOWER."
        )


def _redistribute(new: PyTree, like: PyTree, placement: Placement) -> PyTree:
    """The state with its tower-local variables split over the towers of ``like``."""

    def one(node: Any, old: Any) -> Any:
        sizes = [np.shape(x)[:1] for x in jax.tree.leaves(node)]
        if not isinstance(node, TowerLocal) or sizes == [
            np.shape(x)[:1] for x in jax.tree.leaves(old)
        ]:
            return node
        node = restore_on(placement, old, read_local(node))
        return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), node, old)

    return jax.tree.map(one, new, like, is_leaf=is_variable)


FORMAT = 1
RECORD = "record.json"
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """The description of a checkpoint, besides its arrays.

    Attributes:
      step: The step after which it was saved.
      strategy: The strategy, as text.
      towers: ``T``.
      devices: The names of the ``D`` devices.
      leaves: Name, shape, dtype and reduction of each leaf.
      batches: How many batches were used, and the cursor after them, where the source
        has one.
      batch_rows: The sizes of batches to which smaller ones were padded.
      evaluation: The scalars of the evaluation after this step, if there was one.
      evaluation_due: Whether the run ended before an evaluation due after this step.
      stopping: The counts of early stopping.
      fingerprint: Of the examples that were seen; None where they are not counted.
      versions: Library -> version.
      format: The version of the record's format.

    Example:
      >>> CheckpointRecord(3, "OneDevice()", 1, ("cpu:0",), ()).step
      3
    """

    step: int
    strategy: str
    towers: int
    devices: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    batches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batch_rows: tuple[int, ...] = ()
    evaluation: Mapping[str, float] = dataclasses.field(default_factory=dict)
    evaluation_due: bool = False
    stopping: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fingerprint: str | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: pathlib.Path) -> None:
        """Write the record into the folder of a checkpoint."""
        fields = dataclasses.asdict(self)
        write_synced(folder / RECORD, json.dumps(fields, indent=1, allow_nan=False))

    @classmethod
    def read(cls, folder: pathlib.Path) -> "CheckpointRecord":
        """Read the record of a checkpoint; raise `CheckpointError` if that fails."""
        try:
            fields = json.loads((folder / RECORD).read_text(encoding="utf-8"))
            if fields["format"] != FORMAT:
                raise CheckpointError(
                    f"The checkpoint {str(folder)!r} has format {fields['format']},"
                    f" and this towerjax ({__version__}) reads format {FORMAT}. Use"
                    f" towerjax {fields['versions'].get('towerjax')}, which wrote it."
                )
            fields["leaves"] = tuple(
                Leaf(**{**leaf, "shape": tuple(leaf["shape"])})
                for leaf in fields["leaves"]
            )
            for name in ("devices", "batch_rows"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"The checkpoint {str(folder)!r} is not what was written: {RECORD} is"
                f" missing, cut or changed ({error}). Restore it; or delete the whole"
                " folder to go on from the checkpoint before."
            ) from error


def library_versions(*others: str) -> dict[str, str]:
    """The versions of libraries that change results, and of installed ``others``."""
    found = {"towerjax": __version__}
    for name in (*_LIBRARIES, *others):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def finite_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The real finite scalars of an evaluation."""
    numbers = {k: float(v) for k, v in values.items() if is_one_real(v)}
    return {name: v for name, v in numbers.items() if math.isfinite(v)}


def encode_cursor(cursor: Any) -> Any:
    """Encode a cursor for JSON."""
    if isinstance(cursor, bytes):
        return {"base64": base64.b64encode(cursor).decode()}
    try:
        same = json.loads(json.dumps(cursor, allow_nan=False)) == cursor
    except (TypeError, ValueError):
        same = False
    if not same and isinstance(cursor, dict) and all(type(k) is str for k in cursor):
        return {"fields": {name: encode_cursor(x) for name, x in cursor.items()}}
    if not same:
        raise CheckpointError(
            f"get_state of the batches returned a {type(cursor).__name__}, which JSON"
            " cannot hold exactly; nothing is pickled. Let it return bytes, or finite"
            " numbers, text, lists and dicts of them."
        )
    return {"json": cursor}


def decode_cursor(encoded: Any) -> Any:
    """Invert `encode_cursor`."""
    if "base64" in encoded:
        return base64.b64decode(encoded["base64"])
    if "fields" in encoded:
        return {name: decode_cursor(x) for name, x in encoded["fields"].items()}
    return encoded["json"]
