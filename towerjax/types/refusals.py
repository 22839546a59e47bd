"""Values that devices cannot hold, how two trees differ, and texts that say so."""

import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from towerjax.types.trees import held_dtype, is_deleted, named_leaves, refuse_unsortable
from towerjax.types.values import PyTree

_NO_ARRAY = (
    "keep values that are not arrays apart, and put them back in the function (Equinox:"
    " params, static = eqx.partition(model, eqx.is_inexact_array), and eqx.combine;"
    " Flax: model.init(key, x)['params'], or nnx.split(model))"
)
_TOO_WIDE = "make it smaller, or say jax.config.update('jax_enable_x64', True)"
_VIEW = "view it as numbers, x.view(np.uint8)"
_WITH_DTYPE = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct


def _is_narrow(kind: Any) -> Callable[[Any], bool]:
    """Make a test for dtypes with elements of less than a byte.

    Several elements then share a byte.
    """
    info = jnp.finfo if kind is jnp.inexact else jnp.iinfo
    return lambda dtype: jnp.issubdtype(dtype, kind) and info(dtype).bits < 8


# A test for dtypes that no device holds, and what to write instead.
_OF_DTYPE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda d: d.names, "take it apart, {name: x[name] for name in x.dtype.names}"),
    (lambda d: d.kind == "m", "divide by a unit, x / np.timedelta64(1, 's')"),
    (lambda d: d.kind == "M", "count from a first date, (x - x.min()) / unit"),
    (lambda d: d.kind == "O", "make one array of numbers, np.stack(x)"),
    (lambda d: d.kind == "f" and d.itemsize > 8, "write x.astype(np.float32)"),
    (lambda d: d.kind == "c" and d.itemsize > 16, "write x.astype(np.complex64)"),
    # The dtypes of ml_dtypes have the kind V, too.
    (lambda d: d.kind == "V" and not jnp.issubdtype(d, jnp.number), _VIEW),
    (lambda d: d.kind not in "biufcV", "give each text a number"),
    (_is_narrow(jnp.inexact), "cast it, x.astype(jnp.bfloat16)"),
    (_is_narrow(jnp.unsignedinteger), "cast it, x.astype(np.uint8)"),
    (_is_narrow(jnp.signedinteger), "cast it, x.astype(np.int8)"),
]
# A test for objects that hold rows but are no arrays, and how to make arrays of them.
_OF_ROWS: list[tuple[Callable[[Any], bool], str]] = [
    (
        lambda x: hasattr(x, "numpy"),
        "pass x.numpy(), as strategy.distribute_dataset(loader) does",
    ),
    (
        lambda x: hasattr(x, "to_numpy"),  # a table of pandas or Polars
        "pass x.to_numpy(), or a dict of columns, each to_numpy()",
    ),
    (
        dataclasses.is_dataclass,
        "register the class, jax.tree_util.register_dataclass, or pass a dict",
    ),
]


def problem_of(leaf: Any, *, shapes: bool = True) -> str | None:
    """Explain why no device can hold a leaf, and what to write.

    Returns None if devices can hold it.
    """
    is_array = isinstance(leaf, _WITH_DTYPE)
    if is_array and not all(isinstance(n, int | np.integer) for n in leaf.shape):
        return f"of shape {leaf.shape}, with a symbol: give a number"
    if isinstance(leaf, jax.ShapeDtypeStruct) and not shapes:
        return "a shape alone: pass an array (step.check takes shapes)"
    if is_deleted(leaf):
        return (
            "an array that was donated and deleted: pass the array that replaced it, or"
            " pass a jnp.copy(x) before"
        )
    if isinstance(leaf, jax.Ref) and not isinstance(leaf, jax.Array):
        return "a jax.Ref, which is written in place: pass its value, jnp.copy(x[...])"
    if isinstance(leaf, np.ma.MaskedArray):
        return "a masked array: pass x.filled(0), and the mask as weights"
    if isinstance(leaf, type | memoryview):
        return "not an array: write np.asarray(x)"
    try:
        dtype = leaf.dtype if is_array else np.asarray(leaf).dtype
    except ValueError:
        return (
            f"{a_type(leaf)} of rows with different lengths: pad all to the longest,"
            " and give the padding weight 0"
        )
    if not is_array and dtype.kind not in "biufc":
        is_wide = isinstance(leaf, int)  # Python's ints may exceed int64
        return f"{a_type(leaf)}: {_TOO_WIDE if is_wide else _NO_ARRAY}"
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return None
    advice = _advice_on(dtype)
    return advice and f"an array of dtype {dtype}: {advice}"


def problem_of_rows(leaf: Any, *, shapes: bool) -> str | None:
    """Explain why a leaf has no row for each example, and what to write.

    Returns None if it has rows.
    """
    if isinstance(leaf, np.ndarray | jax.Array | jax.ShapeDtypeStruct):
        scalar = None if leaf.ndim else f"a scalar of dtype {leaf.dtype}"
        return problem_of(leaf, shapes=shapes) or scalar
    advice = next((text for is_so, text in _OF_ROWS if is_so(leaf)), None)
    return f"{a_type(leaf)}: {advice}" if advice else shown(leaf)


@functools.cache
def _advice_on(dtype: Any) -> str | None:
    return next((text for is_so, text in _OF_DTYPE if is_so(dtype)), None)


def overflow_of(leaf: Any) -> Any:
    """Find an element of the leaf that devices cannot hold, or None.

    An example is 2**40 where devices have 32 bits.
    """
    if not isinstance(leaf, np.ndarray | np.generic | int):
        return None
    leaf = np.asarray(leaf)
    if leaf.dtype.kind not in "iu" or not leaf.size:
        return None
    limits = np.iinfo(held_dtype(leaf.dtype))
    if limits.bits == 8 * leaf.dtype.itemsize:
        return None
    wrong = [x for x in (leaf.min(), leaf.max()) if not limits.min <= x <= limits.max]
    return wrong[0] if wrong else None


def refuse_unheld(root: str, tree: PyTree, *, shapes: bool = False) -> None:
    """Raise unless devices can hold each leaf of a tree."""
    bad = []
    for name, leaf in named_leaves(root, tree):
        problem = problem_of(leaf, shapes=shapes)
        if problem is None and (x := overflow_of(leaf)) is not None:
            kind = np.asarray(leaf).dtype
            problem = (
                f"an array of {kind} that holds {x}, which would wrap around:"
                f" {_TOO_WIDE}"
            )
        bad += [(name, problem)] if problem else []
    if bad:
        raise ValueError(
            f"Devices can hold only arrays of numbers, but {listed(together(bad))}."
        )


def together(named: Iterable[tuple[str, str]]) -> list[str]:
    """Write a text ``"name is problem"`` per leaf.

    Leaves with the same problem, and leaves of one list, share a text.
    """
    lists = collections.defaultdict(list)
    for name, problem in named:
        lists[re.sub(r"\[\d+\]$", "[]", name)].append((name, problem))
    names = collections.defaultdict(list)
    for (name, problem), *rest in lists.values():
        more = f" (and {len(rest)} more of that list)" if rest else ""
        names[problem].append(name + more)
    return [
        f"{', '.join(few(x))} {'is' if len(x) == 1 else 'are each'} {problem}"
        for problem, x in names.items()
    ]


def refuse_no_numbers(name: str, x: Any) -> None:
    """Raise unless ``x`` is a numeric array of JAX, NumPy or another library."""
    ours = np.ndarray | np.generic | jax.ShapeDtypeStruct
    is_array = hasattr(x, "dtype") or hasattr(x, "__jax_array__")
    is_ours = not is_array or isinstance(x, ours)
    if problem := is_ours and problem_of(x, shapes=False):
        raise ValueError(f"{name} is {problem}.")


def a_type(x: Any) -> str:
    """Name a value's type, with its article: ``"an int"``."""
    name = type(x).__name__
    article = "an" if name.startswith((*"aeioAEIO", "nd")) else "a"
    return f"{article} {name}"


def types_of(x: Any) -> str:
    """Name a value's type; for a tuple or list, the types of its elements."""
    if not isinstance(x, tuple | list):
        return a_type(x)
    return f"({', '.join(map(a_type, x))})"


def shown(x: Any) -> str:
    """Show a value and its type as text, on one short line."""
    text = " ".join(repr(x).split())
    text = text if len(text) <= 60 else f"{text[:56]} ..."
    return f"{text} of type {type(x).__name__}"


def printable(text: str) -> str:
    """Write the unprintable characters of a text as ``repr`` does.

    Files may come from others, and a terminal obeys the escapes that it is given.
    """
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() else repr(x)[1:-1] for x in text)


def few(items: Iterable[Any]) -> list[str]:
    """List the first eight items as texts, and how many others there are."""
    texts = [str(x) for x in items]
    more = [f"and {len(texts) - 8} more"] if len(texts) > 8 else []
    return texts[:8] + more


def listed(items: Iterable[Any]) -> str:
    """Join the texts of `few` by semicolons."""
    return "; ".join(few(items))


def unlike(actual: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Write a text for each leaf that differs from what is expected.

    Both arguments map a leaf's name to a description, such as its shape.
    """
    if actual == expected:
        return []
    names = sorted({*actual, *expected})
    both = [(x, actual.get(x, "absent"), expected.get(x, "absent")) for x in names]
    differing = [row for row in both if row[1] != row[2]]
    return [
        f"{printable(x)} is {printable(got)}, expected {printable(want)}"
        for x, got, want in differing
    ]


def kind_of(leaf: Any) -> str:
    """Describe a leaf's dtype on a device, and its shape: ``"float32[4, 3]"``."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
    return f"{held_dtype(dtype)}{list(jnp.shape(leaf))}"


def differences(
    root: str,
    actual: PyTree,
    expected: PyTree,
    describe: Callable[[Any], str] = kind_of,
) -> list[str]:
    """Describe the leaves that differ.

    If no leaf differs, the one text is on the first container that differs.
    """
    try:
        leaves, treedef = jax.tree.flatten(actual)
    except ValueError:
        refuse_unsortable(root, actual)
        raise
    others, other = jax.tree.flatten(expected)
    if treedef == other and _have_one_type(leaves, others):
        return []  # equal trees return early, because naming leaves is slow
    texts = unlike(
        {name: describe(x) for name, x in named_leaves(root, actual)},
        {name: describe(x) for name, x in named_leaves(root, expected)},
    )
    if not texts and treedef != other:
        got, want = _differing(treedef, other)
        anew = ", a class that was defined anew" if str(got) == str(want) else ""
        texts = [f"a container is {got}, expected {want}{anew}"]
    return texts


def _have_one_type(leaves: list[Any], others: list[Any]) -> bool:
    """Return whether arrays have the same shapes and dtypes as ``others``."""
    pairs = zip(leaves, others, strict=True)
    same = [
        getattr(x, "dtype", None) == getattr(y, "dtype", "none") and x.shape == y.shape
        for x, y in pairs
    ]
    return all(same)


def check_like(
    root: str,
    got: PyTree,
    expected: PyTree,
    name_of_both: str,
    advice: str,
    describe: Callable[[Any], str] = kind_of,
) -> None:
    """Raise unless a tree has the expected leaves and containers."""
    if wrong := differences(root, got, expected, describe):
        raise ValueError(f"{name_of_both}: {listed(wrong)}. {advice}")


def check_types(before: PyTree, after: PyTree, root: str, culprit: str) -> PyTree:
    """Drop weak types from ``after``; raise if a type has changed.

    The trees, shapes and dtypes must be those of ``before``. ``culprit`` names the
    function to look at.
    """
    fault = "The step would change the type of its state, and so compile anew each time"
    check_like(root, after, before, fault, f"Look at {culprit}.")
    # JAX gives values that were computed from Python numbers a weak type. It is
    # dropped.
    after = jax.tree.map(jnp.asarray, after)
    return jax.tree.map(lambda x: lax.convert_element_type(x, x.dtype), after)


def _differing(got: Any, expected: Any) -> tuple[Any, Any]:
    """Find the first nodes in which two tree structures differ."""
    if got.node_data() != expected.node_data():
        return got, expected
    pairs = zip(got.children(), expected.children(), strict=False)
    different = (_differing(*two) for two in pairs if two[0] != two[1])
    return next(different, (got, expected))


class Portable(Exception):
    """An error that can be copied and pickled with its text, attributes and notes."""

    def __reduce__(self) -> Any:
        """Copy and pickle by text and attributes.

        The copy is made without a call of the constructor.
        """
        return type(self).__new__, (type(self), *self.args), vars(self)
