"""Trees and their leaves: names, parts, dtypes, random keys."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from towerjax.types.values import PyTree


def leaf_name(root: str, path: tuple[Any, ...]) -> str:
    """Name a leaf for errors, e.g. ``batch['image']``."""
    return f"{root}{jax.tree_util.keystr(path)}"


def key_name(entry: Any) -> str:
    """Write one entry of a key path as text: the key, index or attribute."""
    return jax.tree_util.keystr((entry,), simple=True)


def name_by_key(path: tuple[Any, ...]) -> str:
    """Name a leaf whose first key already names the value.

    Unlike `leaf_name` it needs no root.
    """
    name = leaf_name("", path)
    if name.startswith("['"):
        return name.removeprefix("['").replace("']", "", 1)
    return f"result{name}"


def names_by_key(tree: PyTree) -> list[str]:
    """Name each leaf by `name_by_key`, in tree order."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [name_by_key(path) for path, _ in leaves]


def named_leaves(root: str, tree: PyTree, is_leaf: Any = None) -> list[tuple[str, Any]]:
    """List ``(name, leaf)`` of every leaf, in tree order."""
    try:
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_leaf)
    except ValueError:
        refuse_unsortable(root, tree)
        raise
    keystr = jax.tree_util.keystr
    return [(f"{root}{keystr(path)}", leaf) for path, leaf in leaves]


def readable_leaves(root: str, tree: PyTree) -> list[tuple[str, Any]]:
    """List ``(name, leaf)`` of every leaf in tree order, with ``/`` between keys."""
    keystr = jax.tree_util.keystr
    return [
        ("/".join(filter(None, [root, keystr(path, simple=True, separator="/")])), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


@contextlib.contextmanager
def sorted_keys(root: str, tree: PyTree) -> Iterator[None]:
    """Explain JAX's error in this block if a dict has keys that cannot be sorted.

    The error then names the dict.
    """
    try:
        yield
    except ValueError:
        refuse_unsortable(root, tree)
        raise


def refuse_unsortable(root: str, tree: PyTree) -> None:
    """Raise if a dict has keys that JAX cannot sort."""
    named = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_unsortable)
    for path, x in named:
        if _is_unsortable(x):
            raise ValueError(
                f"{leaf_name(root, path)} is a dict with keys of several types,"
                f" {', '.join(map(repr, x)):.200}, which JAX cannot sort. Make all keys"
                " strings."
            )


def _is_unsortable(x: Any) -> bool:
    """Return whether ``x`` is a dict with keys of several types."""
    try:
        sorted(x if isinstance(x, dict) else ())
    except TypeError:
        return True
    return False


def _is_of(kind: Any) -> Callable[[Any], bool]:
    """Make a test for instances of ``kind`` that runs no code of their class."""
    return getattr(kind, "__instancecheck__", lambda x: isinstance(x, kind))


def map_parts(kind: Any, fn: Callable[[Any], Any], tree: PyTree) -> PyTree:
    """Apply ``fn`` to each node of class ``kind`` in a tree."""
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_of(kind))
    return treedef.unflatten([fn(x) if isinstance(x, kind) else x for x in leaves])


def parts_of(kind: Any, tree: PyTree) -> list[Any]:
    """List the nodes of class ``kind``, in tree order."""
    nodes = jax.tree.leaves(tree, is_leaf=_is_of(kind))
    return [x for x in nodes if isinstance(x, kind)]


def put_parts(kind: Any, tree: PyTree, new: Iterable[Any]) -> PyTree:
    """Replace the nodes of class ``kind`` in a tree, in tree order.

    ``new`` has the nodes to put in their places.
    """
    left = iter(new)
    return map_parts(kind, lambda _: next(left), tree)


def has_tracers(tree: PyTree) -> bool:
    """Return whether any leaf is a tracer."""
    return any([isinstance(x, Tracer) for x in jax.tree.leaves(tree)])


def is_traced(tree: PyTree) -> bool:
    """Return whether a leaf is a tracer, or JAX is tracing a function.

    While it traces, each new array is a tracer, too.
    """
    return has_tracers((tree, jax.device_put(np.int32(0))))


def is_deleted(x: Any) -> bool:
    """Return whether ``x`` is an array whose buffers were donated."""
    is_array = isinstance(x, jax.Array) and not isinstance(x, Tracer)
    return is_array and x.is_deleted()


def held_dtype(dtype: Any) -> Any:
    """Find the dtype that an array of ``dtype`` gets when placed on a device."""
    return _device_dtype_of(dtype, jax.config.read("jax_enable_x64"))


@functools.cache  # the second argument is jax_enable_x64
def _device_dtype_of(dtype: Any, _: bool) -> Any:
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return dtype
    return jax.dtypes.canonicalize_dtype(np.dtype(dtype).newbyteorder("="))


def shapes_of(tree: PyTree) -> PyTree:
    """Replace each array by the shape and dtype that it has on a device."""

    def of(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, held_dtype(x.dtype))

    return jax.tree.map(of, tree)


def native(leaf: Any) -> Any:
    """Bring an array to the machine's byte order, which JAX requires."""
    if isinstance(leaf, np.ndarray) and not leaf.dtype.isnative:
        return leaf.astype(leaf.dtype.newbyteorder("="))
    return leaf


def own_array(leaf: Any) -> jax.Array:
    """Make a JAX array that shares no memory with a NumPy array."""
    # ``jnp.asarray`` alone would compile a program for each shape and dtype.
    is_host = isinstance(leaf, np.ndarray | np.generic)
    return jax.device_put(np.array(leaf)) if is_host else jnp.asarray(leaf)


def widen_dtype(dtype: Any) -> Any:
    """Choose the dtype in which to add values of ``dtype``: float32 or wider."""
    if jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4:
        return jnp.dtype(jnp.float32)  # JAX would not promote a float of 8 bits
    return promote_dtypes(dtype, jnp.float32)


def promote_dtypes(*dtypes: Any) -> Any:
    """Find the dtype that holds values of all these dtypes, as JAX promotes them."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def is_key(x: Any) -> bool:
    """Return whether ``x`` is a typed random key, or an array of them."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)


def key_data(x: jax.Array) -> jax.Array:
    """Take the words out of a typed key; leave any other array unchanged.

    Collectives can send the words, but not a key.
    """
    return jax.random.key_data(x) if is_key(x) else x


def like_key(data: jax.Array, x: jax.Array) -> jax.Array:
    """Make ``data`` a random key if ``x`` is one; the inverse of `key_data`."""
    if not is_key(x):
        return data
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))


def names_from(roots: Sequence[str], values: Sequence[PyTree]) -> list[str]:
    """Name all leaves of several trees, each with its root in front.

    If a root is "", the tree's first keys name its leaves.
    """
    names = list[str]()
    for root, value in zip(roots, values, strict=True):
        named = [name for name, _ in named_leaves(root, value)]
        names += named if root else names_by_key(value)
    return names
