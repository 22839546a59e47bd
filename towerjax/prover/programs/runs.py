"""Run a user's program: its results, call by call, and the devices that it uses."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from towerjax.mesh.devices import Device
from towerjax.prover.comparison import as_reals, rounded
from towerjax.prover.programs.in_place import Held, Watched
from towerjax.prover.programs.traced import (
    ARRAY_TYPES,
    NUMBER_TYPES,
    TracedProgram,
    devices_in,
    flatten,
    is_iterator,
    state_places,
    trace_or_say_why,
)
from towerjax.types import PyTree
from towerjax.types.refusals import types_of
from towerjax.types.trees import is_deleted, is_key, key_data, named_leaves

CALLS = 3  # how often a program that returns or changes a state is called
_KEY_WORDS = 2, 4  # the numbers of words that a raw key may have


class Value(NamedTuple):
    """One leaf of what a call returns or changes in place."""

    numbers: np.ndarray | None  # its elements; None if these are not numbers
    is_state: bool  # whether it is an argument's new value, or is changed in place
    is_key: bool
    is_returned: bool  # whether it is returned; otherwise it is changed in place


class Seen(NamedTuple):
    """The results of a program's calls, and the devices and dtypes that it used."""

    calls: tuple[dict[str, Value], ...]
    devices: frozenset[Device]  # the devices of arguments and results
    dtypes: frozenset[str]  # the dtypes of arguments and results
    is_changed: bool  # whether it changes something in place
    has_arguments: bool  # whether any argument is an array


class _Call(NamedTuple):
    """The results of one call."""

    out: Any
    changed: dict[str, Any]  # the values that were changed in place, by name
    values: dict[str, Value]  # the returned and the changed values, by name


class UserProgram:
    """The function and its arguments that a user's ``make`` returned.

    It is run first and traced afterwards, because after a trace it may hold tracers.
    """

    def __init__(self, form: str, program: Any) -> None:
        self._form = form
        match program:
            case (fn, tuple() | list() as args) if callable(fn):
                self.fn = fn
                self.args = tuple(args)
            case _:
                raise ValueError(
                    f"{form} returned {types_of(program)}, but must return (fn, args),"
                    " a function and the tuple of its arguments."
                )
        leaves, self._treedef = flatten(self.args)
        arrays = [id(x) for x in leaves if isinstance(x, ARRAY_TYPES)]
        self._is_shared = len({*arrays}) < len(arrays)
        self._leaves = [x.copy() if isinstance(x, ARRAY_TYPES) else x for x in leaves]
        self._given = self._treedef.unflatten(self._leaves)
        self._is_new = True
        self.traced_args = self.args  # the arguments that it was traced with
        self._trace: tuple[TracedProgram | None, str] | None = None
        self.unseen: tuple[str, ...] = ()  # values whose changes no trace follows

    def with_arrays(self, change: Callable[[int, Any], Any]) -> "UserProgram":
        """Replace each array that the program takes by ``change(place, array)``.

        An array that is several arguments is changed once, and stays one array.
        """
        leaves, treedef = flatten(self.args)
        places = {id(x): i for i, x in reversed([*enumerate(leaves)])}
        changed = {
            i: change(i, leaves[i])
            for i in places.values()
            if isinstance(leaves[i], ARRAY_TYPES)
        }
        new = [changed.get(places[id(x)], x) for x in leaves]
        return UserProgram(self._form, (self.fn, treedef.unflatten(new)))

    @property
    def is_plain(self) -> bool:
        """Whether its arguments are only arrays, numbers and functions."""
        return all(
            isinstance(x, NUMBER_TYPES | str) or callable(x) for x in self._leaves
        )

    def run(self, by: float = 0.0) -> Seen:
        """Call the program, and return its results.

        ``by`` is a relative amount by which its arguments are rounded; with 0 they are
        not. The first run uses the arguments themselves, which may share arrays.
        """
        args = self.args if self._is_new and not by else self._copies(by)
        self._is_new = False
        calls = self._calls(args)
        taken, _ = flatten(self._given)
        results, _ = flatten([(x.out, x.changed) for x in calls])
        dtypes = {str(x.dtype) for x in taken + results if isinstance(x, ARRAY_TYPES)}
        # JAX moves an uncommitted argument to the devices of the program. So only
        # committed arguments say where the program runs.
        taken = [x for x in taken if isinstance(x, jax.Array) and x.committed]
        return Seen(
            tuple([x.values for x in calls]),
            frozenset(_where_are(taken + results)),
            frozenset(dtypes),
            bool(calls[-1].changed),
            any(isinstance(x, ARRAY_TYPES) for x in self._leaves),
        )

    def _calls(self, args: Sequence[Any]) -> list[_Call]:
        """Call the program, and again with its new state if it returns one."""
        held = Held(self.fn, args)
        calls = list[_Call]()
        for _ in range(CALLS):
            try:
                out = self.fn(*args)
            except StopIteration:  # an iterator may have the rows of one call only
                if not calls:
                    raise
                break
            changed = held.changed()
            places = state_places(self._given, out)
            # The values are read now, because the next call may donate these arrays.
            calls.append(_Call(out, changed, _values(out, places, changed)))
            if not (changed or places):
                break
            args = self._after(args, out, places)
        return calls

    def release(self) -> None:
        """Release the arguments' memory on devices; the program is not run again."""
        self.args = self.traced_args = ()
        self._leaves = [_let_go(x) for x in self._leaves]
        self._given = self._treedef.unflatten(self._leaves)

    def trace(self) -> tuple[TracedProgram | None, str]:
        """Trace the program; or give None, and why it cannot be traced."""
        if any(isinstance(x, Iterator) for x in self._leaves):
            return None, "an argument is an iterator"
        if self._trace is None:
            self._trace = self._traced_with(self._copies())
            self.traced_args = self._copies()  # a run may have changed the originals
            for kinds in (float | complex, ()):
                args = self._with_numbers_as_arrays(self._trace[0], kinds)
                if args is None:
                    continue
                again = self._traced_with(args)
                if again[0] is not None:
                    self._trace = again
                    self.traced_args = args
                    break
        return self._trace

    def _traced_with(self, args: tuple[Any, ...]) -> tuple[TracedProgram | None, str]:
        """Trace the program with these arguments, and note what it changes in place."""
        watched = Watched(self.fn)
        traced, why = trace_or_say_why(watched, args)
        # A trace has separate copies of arrays that two arguments share, so it does not
        # show that a change in one of them changes the other.
        new = watched.new if self._is_shared else ()
        if traced is None:
            return None, why
        self.unseen = (*watched.unseen, *new)
        out, new = traced.out
        changed = dict(zip(watched.new, new, strict=True))
        return TracedProgram(traced.jaxpr, out, changed), ""

    def _with_numbers_as_arrays(
        self, traced: TracedProgram | None, kinds: Any
    ) -> tuple[Any, ...] | None:
        """Turn Python numbers in the arguments into arrays; None if there are none.

        Numbers in a state always become arrays, because they change in the next call.
        Of other arguments, only numbers of the types ``kinds`` do.
        """
        places = {} if traced is None else state_places(self.args, traced.out)
        copies = self._copies()
        all_kinds = int | float | complex
        args = []
        for i, x in enumerate(copies):
            of_arg = all_kinds if i in places else kinds
            leaves, treedef = flatten(x)
            args.append(treedef.unflatten([_as_array(v, of_arg) for v in leaves]))
        leaves = flatten(args)[0]
        before = flatten(copies)[0]
        is_same = all(type(x) is type(y) for x, y in zip(leaves, before, strict=True))
        return None if is_same else tuple(args)

    def devices_named(self) -> frozenset[Device]:
        """List the devices of its arguments, and those that its trace names."""
        laid = [x for x in self._leaves if isinstance(x, jax.Array) and x.committed]
        return frozenset(_where_are(laid)) | meshes_of_trace(self.trace()[0])

    def _copies(self, by: float = 0.0) -> tuple[Any, ...]:
        """Copy the arguments as they were before the first run.

        Each float array is changed by the relative amount ``by``, as if it were
        rounded; 0 leaves it as it was.
        """
        leaves = [
            _near(x, by) if isinstance(x, ARRAY_TYPES) else x for x in self._leaves
        ]
        return self._treedef.unflatten(leaves)

    def _after(
        self, args: Sequence[Any], out: PyTree, places: dict[int, int | None]
    ) -> list[Any]:
        """Make the arguments of the next call: the returned state, and the others.

        ``places`` are those of `state_places`. Other arguments that were donated are
        replaced by copies.
        """
        copies = self._copies()
        again = list[Any]()
        for i, x in enumerate(args):
            if i in places:
                at = places[i]
                new = out if at is None else out[at]
                again.append(jax.tree.map(_given_as, copies[i], new))
            else:
                is_gone = any(is_deleted(leaf) for leaf in flatten(x)[0])
                again.append(copies[i] if is_gone else x)
        return again


def _as_array(x: Any, kinds: Any) -> Any:
    """Make an array of a Python number of the types ``kinds``; keep others.

    The array has the dtype that JAX gives to such a number.
    """
    is_python = isinstance(x, kinds) and not isinstance(x, ARRAY_TYPES)
    return jnp.asarray(x) if is_python else x


def _let_go(x: Any) -> Any:
    """Keep only an array's shape, which holds no memory; keep other values."""
    if not isinstance(x, ARRAY_TYPES):
        return x
    is_laid = isinstance(x, jax.Array) and x.committed
    sharding = x.sharding if is_laid else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _near(x: Any, by: float) -> Any:
    """Copy an array to the devices on which it lies.

    Its floats are changed by the relative amount ``by``, as if they were rounded; 0
    leaves them as they are.
    """
    changed = rounded(x, by, only_broken=True) if by else x
    is_placed = isinstance(x, jax.Array) and changed is not x
    return jax.device_put(changed, x.sharding) if is_placed else x.copy()


def _given_as(old: Any, new: Any) -> Any:
    """Give a leaf of a new state the type and devices of the old leaf."""
    if not isinstance(old, NUMBER_TYPES):
        return old
    if isinstance(old, jax.Array) and old.committed:
        return jax.device_put(new, old.sharding)
    if is_key(new):
        words = jnp.asarray(np.asarray(key_data(new)))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(new))
    host = np.asarray(new)
    if isinstance(old, jax.Array):
        return jnp.asarray(host)
    return host if isinstance(old, np.ndarray) else host.item()


def _values(
    out: PyTree, places: dict[int, int | None], changed: dict[str, Any]
) -> dict[str, Value]:
    """Collect, by name, the leaves that a call returned or changed in place.

    ``places`` tell which results are new states; see `state_places`.
    """
    indices = {*places.values()}
    states = {(jax.tree_util.SequenceKey(i),) for i in indices if i is not None}
    returned = named_leaves("result", out, is_iterator)
    paths = jax.tree_util.tree_leaves_with_path(out, is_leaf=is_iterator)
    values = {
        name: _value(x, is_state=True, is_returned=False) for name, x in changed.items()
    }
    for (name, x), (path, _) in zip(returned, paths, strict=True):
        is_state = None in indices or path[:1] in states
        values[name] = _value(x, is_state=is_state, is_returned=True)
    return values


def _value(x: Any, *, is_state: bool, is_returned: bool) -> Value:
    """Wrap a leaf in a `Value`, without elements if these are not numbers."""
    none = Value(None, is_state=is_state, is_key=False, is_returned=is_returned)
    if not isinstance(x, NUMBER_TYPES):
        return none
    data = key_data(x)
    dtype = np.asarray(data).dtype
    if dtype.kind != "b" and not jnp.issubdtype(dtype, jnp.number):
        return none
    is_raw = dtype == np.uint32 and np.ndim(data) in (1, 2)
    is_one_key = is_key(x) or (is_raw and np.shape(data)[-1] in _KEY_WORDS)
    return none._replace(numbers=as_reals(data), is_key=is_one_key)


def _where_are(leaves: Iterable[Any]) -> Iterable[Device]:
    for x in leaves:
        if isinstance(x, jax.Array):
            yield from x.sharding.device_set


def meshes_of_trace(traced: TracedProgram | None) -> frozenset[Device]:
    """List the devices of a program's meshes; none if it cannot be traced."""
    return frozenset(devices_in(traced.jaxpr)) if traced else frozenset()
