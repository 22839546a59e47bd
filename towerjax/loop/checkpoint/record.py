"""The contents of a checkpoint: a state's arrays, and a record that describes them."""

import base64
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import operator
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from etils import epath

from towerjax.collectives.reduce import as_bits
from towerjax.loop.checkpoint.folder import (
    CheckpointError,
    explained,
    read_table,
    telling_of_forgery,
)
from towerjax.loop.checkpoint.manager import of_processes
from towerjax.loop.direction import sign_of
from towerjax.loop.writers import as_json
from towerjax.mesh.placement import Placement
from towerjax.towers.saved import restore_on
from towerjax.towers.strategies import Strategy
from towerjax.towers.variables import TowerLocal, is_variable, read_local
from towerjax.types import Layout, PyTree, Reduction
from towerjax.types.options import is_one_real, is_whole
from towerjax.types.refusals import listed, printable, unlike
from towerjax.types.trees import (
    is_key,
    key_data,
    leaf_name,
    like_key,
    parts_of,
    put_parts,
    readable_leaves,
)
from towerjax.types.version import __version__


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One leaf of a saved state: its name, shape, dtype and reduction."""

    name: str  # such as state.params['w']
    shape: tuple[int, ...]  # including a dim over towers
    dtype: str  # the dtype's name; for a PRNG key its implementation
    reduction: str | None = None  # None unless the leaf is a tower-local variable

    @property
    def description(self) -> str:
        """The leaf's dtype, shape and reduction, without the number of towers."""
        shape = self.shape if self.reduction is None else self.shape[1:]
        words = f"{self.dtype}{list(shape)}"
        return words + (f", tower-local {self.reduction}" if self.reduction else "")


def leaves_of(state: PyTree) -> list[Leaf]:
    """Describe each leaf of a state as a `Leaf`, in tree order."""
    leaves = []
    for path, node in jax.tree_util.tree_leaves_with_path(state, is_leaf=is_variable):
        reduction = node.reduction.name if isinstance(node, TowerLocal) else None
        for inner, x in jax.tree_util.tree_leaves_with_path(node):
            name = leaf_name("state", (*path, *inner))
            dtype = f"key of {jax.random.key_impl(x)}" if is_key(x) else str(x.dtype)
            leaves.append(Leaf(name, tuple(x.shape), dtype, reduction))
    return leaves


# Orbax's files lack these dtypes, so the bits are saved as another dtype.
_AS_BITS = {jnp.dtype("float8_e4m3"): jnp.uint8}


def arrays_of(state: PyTree) -> PyTree:
    """Bring the state into Orbax's form: keys as data, None for leaves of size 0."""
    from orbax.checkpoint.tree import serialize_tree  # a slow import, so not at the top

    def numbers(x: jax.Array) -> Any:
        if not x.size:
            return None
        x = key_data(x)
        # Of an array with several copies only one is given to Orbax. Otherwise Orbax
        # would compile a program that slices the copies, and save the slices.
        on_devices = isinstance(x, jax.Array)
        if on_devices and x.is_fully_replicated and x.is_fully_addressable:
            x = x.addressable_data(0)
        return x.view(_AS_BITS[x.dtype]) if x.dtype in _AS_BITS else x

    return serialize_tree(jax.tree.map(numbers, state), keep_empty_nodes=True)


def check_names(state: PyTree) -> None:
    """Raise if Orbax, which joins the keys of a leaf, would confuse two leaves."""
    known: dict[str, str] = {}
    for path, _ in jax.tree_util.tree_leaves_with_path(state):
        name = leaf_name("state", path)
        joined = jax.tree_util.keystr(path, simple=True, separator=".")
        if (other := known.setdefault(joined, name)) != name:
            raise CheckpointError(
                f"{other} and {name} would have the same name in a checkpoint,"
                f" {joined!r}, because Orbax joins keys by dots. Give one of them a key"
                " without a dot."
            )


def check_same_model(saved: Sequence[Leaf], state: PyTree, folder: epath.Path) -> None:
    """Raise unless the saved leaves fit the state, for any number of towers."""
    there, here = (
        {leaf.name: leaf.description for leaf in x} for x in (saved, leaves_of(state))
    )
    if problems := unlike(there, here):
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} belongs to another model:"
            f" {listed(problems)}. Build the model, optimizer and step as they were, or"
            " name another folder."
        )


def restore_leaves(
    arrays: epath.Path, saved: Sequence[Leaf], state: PyTree, placement: Placement
) -> PyTree:
    """Read the saved values, and return them as a state with its shardings.

    For the same number of towers, tower-local values are restored as they were. For
    another number, the towers' values are reduced to one value, which is split over the
    towers (SUM) or copied to each.
    """
    from orbax.checkpoint.tree import deserialize_tree, serialize_tree

    leaves, treedef = jax.tree.flatten(state)
    # `check_same_model` made sure that they match.
    pairs = list(zip(saved, leaves, strict=True))
    resized = [leaf for leaf, x in pairs if leaf.shape != x.shape]
    _refuse_unsplittable(resized)
    wanted = treedef.unflatten([_shape_to_read(*pair, placement) for pair in pairs])
    serialized = serialize_tree(wanted, keep_empty_nodes=True)
    with explained("restored from", arrays), _reader(placement) as files:
        _check_files(arrays, serialized)
        read = files.restore(arrays, serialized)
    read = deserialize_tree(read, wanted, keep_empty_nodes=True)

    def restored(like: jax.Array, x: jax.Array | None) -> jax.Array:
        if x is None:
            return like
        return like_key(x.view(like.dtype) if like.dtype in _AS_BITS else x, like)

    new = jax.tree.map(restored, state, read, is_leaf=lambda x: x is None)
    if not resized:
        return new
    there = parts_of(TowerLocal, state)
    values = parts_of(TowerLocal, new)
    split = restore_on(placement, there, list(map(read_local, values)))
    split = jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), split, there)
    return put_parts(TowerLocal, new, split)


def _reader(placement: Placement) -> Any:
    """Make Orbax's reader for the processes of a placement."""
    from orbax.checkpoint import StandardCheckpointer

    options = of_processes(placement.processes.numbers)
    return StandardCheckpointer(multiprocessing_options=options)


def _check_files(arrays: epath.Path, wanted: PyTree) -> None:
    """Raise unless the files have the tree's containers, and chunks of fitting sizes.

    TensorStore asks the system for memory of a chunk's size. If a damaged file claims a
    huge chunk, that would end the process.
    """
    from orbax.checkpoint import StandardCheckpointHandler

    saved: Any = StandardCheckpointHandler().metadata(arrays).tree
    where = str(arrays.parent)
    there, here = (_containers("state", x) for x in (saved, wanted))
    if problems := unlike(there, here):
        raise CheckpointError(
            f"The checkpoint {where!r} belongs to another model: its leaves are the"
            " same, but not the containers around them:"
            f" {listed(problems)}. Build the optimizer as it was (optax.adam"
            " and optax.adamw have the same leaves), or name another folder."
        )
    files = dict(jax.tree_util.tree_leaves_with_path(saved))
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        chunk = files[path].storage.chunk_shape
        is_other = tuple(files[path].shape) != leaf.shape
        is_large = len(chunk) != leaf.ndim or any(map(operator.gt, chunk, leaf.shape))
        if is_other or is_large:
            found = f"an array {list(files[path].shape)}" * is_other
            raise CheckpointError(
                f"The checkpoint {where!r} was changed after it was"
                f" written: {leaf_name('state', path)} has the shape"
                f" {list(leaf.shape)}, but {found or f'chunks of {list(chunk)}'}."
                " Restore the files, or delete the whole folder."
            )


def _containers(name: str, tree: PyTree) -> dict[str, str]:
    """Count the items of each dict and list in a tree, by name."""
    if not isinstance(tree, dict | list):
        return {}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    sizes = {name: f"a {type(tree).__name__} of {len(tree)}"}
    for key, value in items:
        sizes |= _containers(f"{name}[{key!r}]", value)
    return sizes


def _refuse_unsplittable(resized: Sequence[Leaf]) -> None:
    """Raise if values cannot be converted to another number of towers.

    ``resized`` are the saved leaves with another number of towers.
    """
    if bad := [x for x in resized if x.reduction == Reduction.NONE.name]:
        names = printable(", ".join(x.name for x in bad))
        raise CheckpointError(
            f"{names} cannot be restored for another number of"
            f" towers than the {bad[0].shape[0]} of the checkpoint, because of"
            f" Reduction.NONE. Use {bad[0].shape[0]} towers, on any devices, or give"
            " variables of your own SUM, MEAN or ONLY_FIRST_TOWER."
        )


def _shape_to_read(
    saved: Leaf, leaf: Any, placement: Placement
) -> jax.ShapeDtypeStruct | None:
    """Choose the shape and sharding with which a saved leaf is read.

    Returns None for a leaf without elements, which is not saved.
    """
    if not leaf.size:
        return None
    numbers = key_data(leaf)
    shape = numbers.shape
    sharding = numbers.sharding
    if saved.shape != leaf.shape:  # saved for another number of towers
        shape = (saved.shape[0], *shape[1:])
        sharding = placement.sharding(Layout.MIRRORED)
    dtype = _AS_BITS.get(numbers.dtype, numbers.dtype)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


# More rows and towers than these were never saved, and would take all memory.
_MOST_ROWS = 2**31
_MOST_TOWERS = 2**20
_LIBRARIES = "jax jaxlib flax optax orbax-checkpoint numpy keras tensorflow torch"


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """What describes a checkpoint, beside its arrays.

    Attributes:
      step: The number of the step after which it was saved.
      strategy: The strategy, as text.
      towers: The number of towers ``T``.
      devices: The names of the ``D`` devices.
      leaves: Name, shape, dtype and reduction of each leaf.
      batches: How many batches were used, and the cursor after them if the source has
        one.
      batch_rows: The sizes to which smaller batches were padded.
      evaluation: The scalars of the evaluation after this step, if there was one,
        without NaN.
      evaluation_due: Whether the run ended before the evaluation that was due after
        this step.
      stopping: For each metric of early stopping, its values by step number.
      versions: The version of each library.
      programs: Hashes of the programs that the run had compiled, by ``"towers"`` and
        ``"update"``. They show whether a later run has the same programs.
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
    stopping: Mapping[str, Mapping[int, float]] = dataclasses.field(
        default_factory=dict
    )
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    programs: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, folder: epath.Path) -> "CheckpointRecord":
        """Read the record of a checkpoint; raise `CheckpointError` if it changed."""
        with telling_of_forgery(folder):
            record = cls.of_fields(read_table(folder)["record"])
        if folder.name != (name := str(record.step)):
            raise CheckpointError(
                f"The checkpoint {str(folder)!r} was saved after step {record.step},"
                f" as its record says, so it was copied or renamed. Name it {name!r} or"
                " delete it."
            )
        return record

    @classmethod
    def of_fields(cls, fields: Any) -> "CheckpointRecord":
        """Make the record from its fields in JSON's types; raise if their types differ.

        JSON has lists in place of tuples, and strings for keys and non-finite numbers.
        """
        leaves = [Leaf(**x | {"shape": tuple(x["shape"])}) for x in fields["leaves"]]
        lists = {"leaves": leaves, **{x: fields[x] for x in ("devices", "batch_rows")}}
        values = fields["evaluation"].items()
        stopping = {
            metric: {int(number): float(x) for number, x in known.items()}
            for metric, known in fields["stopping"].items()
        }
        decoded = {"evaluation": {k: float(x) for k, x in values}, "stopping": stopping}
        record = cls(**fields | {k: tuple(x) for k, x in lists.items()} | decoded)
        decode_cursor(record.batches["cursor"])
        numbers = [
            record.step,
            record.towers,
            record.batches["used"],
            *record.batch_rows,
        ]
        numbers += [size for leaf in leaves for size in leaf.shape]
        texts = [record.strategy, *record.devices, *record.versions.values()]
        texts += [text for leaf in leaves for text in (leaf.name, leaf.dtype)]
        texts += [text for hashes in record.programs.values() for text in hashes]
        reductions = (None, *Reduction.__members__)
        if not (
            all(is_whole(number) and number >= 0 for number in numbers)
            and all(number < _MOST_ROWS for number in record.batch_rows)
            and record.towers < _MOST_TOWERS
            and all(isinstance(text, str) for text in texts)
            and all(leaf.reduction in reductions for leaf in leaves)
            and isinstance(record.evaluation_due, bool)
        ):
            raise TypeError("a field of the record has another type or size")
        return record


def check_readable(record: CheckpointRecord) -> None:
    """Raise unless the record is the same after it was written and read."""
    written = as_json(dataclasses.asdict(record))
    try:
        read = CheckpointRecord.of_fields(json.loads(json.dumps(written)))
        is_same = as_json(dataclasses.asdict(read)) == written
        why = "it would be read as another one"
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        is_same = False
        why = f"{type(error).__name__}: {error!s:.200}"
    if not is_same:
        raise CheckpointError(
            f"The record of step {record.step} could not be read again ({why}), so"
            " nothing was saved. Name metrics by texts, and give numbers as values."
        )


def other_leaves(state: PyTree, saved: PyTree) -> list[str]:
    """Name the leaves whose bits differ, on any process.

    ``saved`` has the shardings of ``state``.
    """
    named = list(readable_leaves("", state))
    pairs = [
        (key_data(x), key_data(y))
        for (_, x), y in zip(named, jax.tree.leaves(saved), strict=True)
    ]
    differ = jax.device_get(_differ(pairs))
    return [name for (name, _), is_other in zip(named, differ, strict=True) if is_other]


@jax.jit
def _differ(pairs: Sequence[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    return [(as_bits(x) != as_bits(y)).any() for x, y in pairs]


def costs_of(options: Any) -> dict[int, float]:
    """Compute the cost by ``best`` of each checkpoint that has this metric.

    ``options`` is a `Checkpointer`. The result maps a step number to a cost.
    """
    if options.best is None:
        return {}
    values = {}
    for number in options.steps:
        try:
            values[number] = options.record(number).evaluation.get(options.best)
        except CheckpointError:
            if number in options.steps:  # a checkpoint that still exists is damaged
                raise
    sign = sign_of("mode", options.best, options.mode)
    return {number: sign * x for number, x in values.items() if x is not None}


@functools.cache
def library_versions() -> Mapping[str, str]:
    """Name the versions of Python and of libraries that affect results."""
    versions = {"python": platform.python_version(), "towerjax": __version__}
    for name in _LIBRARIES.split():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def what_was_other(saved: CheckpointRecord, strategy: Strategy) -> list[str]:
    """Tell what differs between a checkpoint's run and this one."""
    before = {"strategy": saved.strategy}
    now = {"strategy": repr(strategy)}
    if before == now:  # equal options may still give other devices
        before = {"towers": saved.towers, "devices": _in_short(saved.devices)}
        devices = _in_short(strategy.placement.devices)
        now = {"towers": strategy.num_towers, "devices": devices}
    before = {**before, **saved.versions}
    now = {**now, **library_versions()}
    names = [x for x in {**before, **now} if before.get(x) != now.get(x)]
    return [
        printable(f"{x} was {before.get(x)}, and is now {now.get(x)}") for x in names
    ]


def _in_short(devices: Sequence[str]) -> str:
    """Count these devices, and name their platform."""
    platforms = dict.fromkeys(name.partition(":")[0] for name in devices)
    return f"{len(devices)} of {' and '.join(platforms)}"


def real_scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """Keep the real scalars of an evaluation, without NaN."""
    numbers = {k: float(v) for k, v in values.items() if is_one_real(v)}
    return {name: v for name, v in numbers.items() if not math.isnan(v)}


def encode_cursor(cursor: Any) -> Any:
    """Write the cursor of batches in JSON's types.

    Raises unless `decode_cursor` gives the same cursor again.
    """

    def as_text(x: Any) -> dict[str, str]:
        return {"base64": base64.b64encode(x).decode()}

    try:
        encoded = json.loads(json.dumps(cursor, default=as_text, allow_nan=False))
        if decode_cursor(encoded) == cursor:
            return encoded
    except (TypeError, ValueError):
        pass  # raised below, with a better text
    raise CheckpointError(
        f"get_state of the batches returned {cursor!r:.200}, which JSON cannot hold"
        " exactly. Let it return bytes, finite numbers, strings, or lists and dicts of"
        " them."
    )


def decode_cursor(encoded: Any) -> Any:
    """Read the cursor that `encode_cursor` converted to JSON's types."""

    def from_text(x: dict[str, Any]) -> Any:
        return base64.b64decode(x["base64"]) if x.keys() == {"base64"} else x

    return json.loads(json.dumps(encoded), object_hook=from_text)
