"""Find the values that a program changes in place, in its arguments or its function."""

import functools
import hashlib
import operator
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from towerjax.jaxprs.sites import is_library
from towerjax.prover.programs.traced import NUMBER_TYPES
from towerjax.types.trees import is_deleted

_WHOLE = type | types.ModuleType | str | bytes  # objects that are not searched
_ARRAYS_OWN = "jax", "jaxlib", "numpy"  # of their objects only ``__wrapped__`` is read
_FN = "fn"


class Held:
    """The arrays, numbers and Refs that a program can reach before it runs, by name.

    While tracing, ``no_refs`` leaves Refs out, because reading one would add an
    equation to the program.
    """

    def __init__(
        self, fn: Callable[..., Any], args: Sequence[Any], *, no_refs: bool = False
    ) -> None:
        self._roots = {f"args[{i}]": x for i, x in enumerate(args)} | {_FN: fn}
        self._no_refs = no_refs
        self._before = {name: (x, _content(x)) for name, x in self._held()}

    def _held(self) -> Iterator[tuple[str, Any]]:
        for name, x in _leaves(self._roots):
            if not (self._no_refs and _is_ref(x)):
                yield name, x

    def changed(self) -> dict[str, Any]:
        """Find the values that are different from before, by name."""
        now = dict(self._held())
        unread = {name for name, x in now.items() if self._is_kept(name, x)}
        return {name: _read_now(x) for name, x in now.items() if name not in unread}

    def gone(self) -> list[str]:
        """Name the values that the program can no longer reach."""
        now = dict(self._held())
        return [name for name in self._before if name not in now]

    def was_given(self, name: str) -> bool:
        """Return whether the trace got the value with this name as an argument."""
        return isinstance(self._before.get(name, (None,))[0], Tracer)

    def _is_kept(self, name: str, x: Any) -> bool:
        if name not in self._before:
            return False
        old, content = self._before[name]
        if isinstance(x, jax.Array):
            return old is x or is_deleted(x)
        return content == _content(x)


class Watched:
    """A function to trace, which notes the values that it changes in place.

    Attributes:
      new: The new values of arrays that the trace was given as arguments, by name.
      unseen: The names of other values that it changes. Their old value is a constant
        of the trace, so the trace does not show the change.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._fn = fn
        self.new: dict[str, Any] = {}
        self.unseen: list[str] = []

    def __call__(self, *args: Any) -> tuple[Any, list[Any]]:
        """Call the function, and return its result and the new values."""
        held = Held(self._fn, args, no_refs=True)
        structure = jax.tree.structure(args)
        out = self._fn(*args)
        changed = held.changed()
        self.new = {name: x for name, x in changed.items() if held.was_given(name)}
        self.unseen = [x for x in changed if x not in self.new] + held.gone()
        if jax.tree.structure(args) != structure:
            self.unseen.append("the structure of args")
        return out, [*self.new.values()]


def _content(x: Any) -> Any:
    """Make a fingerprint of a value, by which a change in place is noticed.

    It is None for a JAX array, which cannot be changed in place.
    """
    if isinstance(x, jax.Array):
        return None
    x = _read_now(x)
    if isinstance(x, jax.Array | np.ndarray):
        return hashlib.sha256(np.asarray(x).tobytes()).digest()
    return x


def _read_now(x: Any) -> Any:
    return x[...] if _is_ref(x) else x


def _is_ref(x: Any) -> bool:
    return isinstance(x, jax.Ref) and not isinstance(x, jax.Array)


def _leaves(roots: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the arrays, numbers and Refs that can be reached, with their names."""
    todo = [*roots.items()][::-1]
    seen = dict[int, Any]()
    names = set[str]()
    while todo:
        name, x = todo.pop()
        if isinstance(x, NUMBER_TYPES) or _is_ref(x):
            if name not in names:
                names.add(name)
                yield name, x
        elif id(x) not in seen and not isinstance(x, _WHOLE):
            seen[id(x)] = x  # the reference keeps its id from being used again
            todo += [(name + key, part) for key, part in _held_in(name, x)][::-1]


def _held_in(name: str, x: Any) -> list[tuple[str, Any]]:
    """List the values that an object holds, each with what it adds to the name.

    An attribute adds its name, an item its key.
    """
    if isinstance(x, types.MethodType):
        return [(".self", x.__self__), ("", x.__func__)]
    if isinstance(x, functools.partial):
        bound = {"args": x.args, **x.keywords}
        return [("", x.func), *[(f".{key}", part) for key, part in bound.items()]]
    if isinstance(x, types.FunctionType):
        cells = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        parts = [(f".{key}", _content_of(cell)) for key, cell in cells]
        return [*parts, ("", vars(x).get("__wrapped__"))]
    if isinstance(x, dict):  # not by JAX, which cannot flatten one with unsortable keys
        return [(f"[{key!r:.60}]", part) for key, part in x.items()]
    is_leaf = functools.partial(operator.is_not, x)
    if not isinstance(x, Iterator) and not jax.tree_util.all_leaves([x]):
        nodes = jax.tree_util.tree_leaves_with_path(x, is_leaf=is_leaf)
        return [(jax.tree_util.keystr(path), part) for path, part in nodes]
    attributes = getattr(x, "__dict__", {})
    if type(x).__module__.partition(".")[0] in _ARRAYS_OWN:
        return [("", attributes.get("__wrapped__"))]
    # A library's objects inside a function, such as caches, may depend on the number of
    # devices without any effect on results. So they are left out.
    is_kept = name.startswith(_FN) and ".self" not in name and _is_of_library(type(x))
    return [] if is_kept else [(f".{key}", part) for key, part in attributes.items()]


def _content_of(cell: types.CellType) -> Any:
    """Read the value in a cell of a closure; None if the cell is still empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _is_of_library(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    return is_library(getattr(module, "__file__", None) or "")
