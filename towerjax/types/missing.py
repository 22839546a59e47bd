"""Say what to write where there is no such name, or where JAX says only what failed."""

import contextlib
import pkgutil
import re
import traceback
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax

from towerjax.types.version import page

_Class = TypeVar("_Class", bound=type)
_NAMES = {
    "MirroredStrategy": f"Write tj.Mirrored(); each name: {page('mirrored_strategy')}",
    "fit": "A loop over batches is tj.run(step, state, batches).",
    "replace": "Write dataclasses.replace(state, params=...), a new state.",
    "apply_gradients": "Write tj.apply_gradients(optimizer, state, grads).",
    "state": "A step holds no state: state = step.init(params), and each call returns"
    " the next one, state, metrics = step(state, batch).",
    "epochs": "Epochs are of the batches: tj.batches(data, batch_size, epochs=3).",
    "batch_size": "It is of the batches: tj.batches(data, batch_size, epochs=3).",
    "validation_data": "Write evaluate=tj.build_eval_step(metric_fn, strategy),"
    " eval_batches=lambda: tj.batches(data, batch_size).",
    "steps_per_call": "Several steps in one program are jax.lax.scan(step.fn, state,"
    " batches), of stacked batches; each step's metrics come back stacked.",
    "callbacks": "Write hooks=[hook], each called as hook(number, metrics).",
}
"""By a name, or a keyword argument, of other libraries: what to write here."""

# By what an error says, and what the user's line holds, if anything.
_TEXTS = [
    (
        r"RESOURCE_EXHAUSTED|[Oo]ut of memory",
        "",
        "Out of memory: build the step with micro_batches=2 or more; let jax.checkpoint"
        " compute again in the loss; share the state by tj.Mirrored(state='sharded');"
        " run a device's towers in turn, local='scan'; leave donate=True."
        " step.report(state, batch) says what takes the memory.",
    ),
    (
        r"^Array has been deleted",
        "",
        "An array was donated to an earlier step: go on with the state that the step"
        " returned, copy before (jnp.copy(x)), or build the step with donate=False.",
    ),
    (
        r"'NoneType' object",
        r"\bextra\b",
        "extra is None, since it was never given: step.init(params, extra=...).",
    ),
    (r"unexpected keyword argument '(\w+)'", "", _NAMES),
]


def explain(error: BaseException) -> None:
    """Add what to do, where an error of Python or JAX says only what failed."""
    frames = traceback.extract_tb(error.__traceback__)
    for pattern, in_line, note in _TEXTS:
        match = re.search(pattern, str(error))
        if match is None or not re.search(in_line, (frames[-1].line or "")):
            continue
        note = note if isinstance(note, str) else note.get(match[1], "")
        if note and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


@contextlib.contextmanager
def noted(note: str) -> Iterator[None]:
    """The context that adds a note to the error of a missing attribute."""
    try:
        yield
    except AttributeError as error:
        error.add_note(note)
        raise


def explain_missing(note: str | None = None) -> Callable[[Any, str], Any]:
    """A ``__getattr__`` that adds a note, or what `_NAMES` says. Hide it from types."""

    def get(self: Any, name: str) -> Any:
        known = note or _NAMES.get(name)
        # Again: a property may have raised the error.
        with noted(known) if known else contextlib.nullcontext():
            return object.__getattribute__(self, name)

    return get


def later_in_module(module: str, **places: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``: imports a name from its place, ``module:name``."""

    def get(name: str) -> Any:
        if name in places:
            return pkgutil.resolve_name(places[name])
        error = AttributeError(
            f"module {module!r} has no attribute {name!r}", name=name
        )
        if name in _NAMES:
            error.add_note(_NAMES[name])
        raise error

    return get


class Named(dict[str, Any]):
    """Metrics by their names; says which there are where one is not."""

    def __missing__(self, name: str) -> Any:
        error = KeyError(name)
        error.add_note(
            f"There are {', '.join(map(repr, self)) or 'none'}. A loss function returns"
            " more, tj.TowerOutput(loss, metrics={...}); those of an evaluation are"
            " history.final and history.evaluations."
        )
        raise error


jax.tree_util.register_pytree_node(
    Named,
    lambda x: (tuple(x.values()), tuple(x)),
    lambda *x: Named(zip(*x, strict=True)),
)


def frozen(cls: _Class) -> _Class:
    """The frozen dataclass; an assignment to a field says what to write."""
    refuse: Any = cls.__setattr__

    def assign(self: Any, name: str, value: Any) -> None:
        with noted(f"Write state = dataclasses.replace(state, {name}=...), a new one."):
            refuse(self, name, value)

    setattr(cls, "__setattr__", assign)  # noqa: B010
    return cls
