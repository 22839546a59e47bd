"""Notes on errors: what to write for a missing name, and what JAX's errors mean."""

import contextlib
import difflib
import inspect
import linecache
import pkgutil
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from opcode import opmap
from typing import Any, TypeVar

import jax
from jax.core import Tracer

from towerjax.types.version import page

_Class = TypeVar("_Class", bound=type)
_NAMES = {
    "MirroredStrategy": f"Write tj.Mirrored(); each name: {page('mirrored_strategy')}",
    "fit": "A loop over batches is tj.run(step, state, batches).",
    "apply_gradients": "Write tj.apply_gradients(optimizer, state, grads).",
    "state": "A step holds no state: state = step.init(params), and each call returns"
    " the next one, state, metrics = step(state, batch).",
    "epochs": "Epochs are of the batches: tj.batches(data, batch_size, epochs=3).",
    "batch_size": "It is of the batches: tj.batches(data, batch_size, epochs=3).",
    "validation_data": "Write evaluate=tj.build_eval_step(metric_fn, strategy),"
    " eval_batches=lambda: tj.batches(data, batch_size).",
    "steps_per_call": "Several steps in one program are jax.lax.scan(step.fn, state,"
    " batches), of stacked batches; each step's metrics come back stacked.",
    "Best": "Say checkpointer=tj.Checkpointer(folder, best='loss') in tj.run.",
    "best": "Say checkpointer=tj.Checkpointer(folder, best='loss'); then"
    " checkpointer.restore(step, state, number=checkpointer.best_step).",
    "profile": "Write jax.profiler.trace(folder) around a run of a few steps.",
    "WandB": f"A writer of 15 lines: {page('how_to/wandb_and_mlflow')}",
    "callbacks": "Write hooks=[hook], each called as hook(number, metrics).",
    "Trainer": "Write step = tj.build_train_step(loss_fn, optimizer, tj.Mirrored()); a"
    " loop over batches is tj.run(step, state, batches).",
    "DataParallel": "Write tj.Mirrored(), and give it to tj.build_train_step.",
    "EstimatorSpec": "Write tj.estimator.ModelSpec(mode, loss=..., train_op=...).",
    "ModeKeys": "Write tj.estimator.Mode.TRAIN, EVAL or PREDICT.",
    "key": "Keys are rng: step.init(params, rng=jax.random.key(0)).",
    "shuffle": "Give a seed, by which each epoch has an order of its own:"
    " tj.batches(data, batch_size, seed=0).",
    "accumulate": "To process rows in several parts write micro_batches=3.",
}
"""By a name, or a keyword argument, of other libraries: what to write here."""

_NO_EXTRA = "extra is None, since it was never given: step.init(params, extra=...)."
# By what an error of JAX says.
_TEXTS = {
    r"RESOURCE_EXHAUSTED|[Oo]ut of memory": (
        "Out of memory: build the step with micro_batches=2 or more; let jax.checkpoint"
        " compute again in the loss; share the state by tj.Mirrored(state='sharded');"
        " run a device's towers in turn, tower_loop='scan'; leave donate=True."
        " step.report(state, batch) says what takes the memory."
    ),
    r"^Array has been deleted": (
        "A call of a step took over the arrays of the state that it was given, and this"
        " is one of them: go on with the state that the step returned, copy before"
        " (jnp.copy(x)), or build the step with donate=False."
    ),
    r"^Comparator raised exception while sorting pytree dictionary keys": (
        "A dict has keys of several types, such as 0 and 'x', which JAX cannot sort:"
        " make them all texts."
    ),
    r"UnexpectedTracerError|unexpected tracer": (
        "A value that a tower function has computed was put aside, in a list, a global"
        " or an attribute, and is read after the function has returned. Return it: of"
        " a loss function tj.TowerOutput(loss, metrics={...})."
    ),
}


def says(error: BaseException, pattern: str) -> re.Match[str] | None:
    """The groups that a pattern finds in an error of JAX, Python or another library.

    Nothing in one of ours, which has its remedy where it is raised.
    """
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    if trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_globals.get("__name__", "")
        # JAX may have dropped its own frames, and what is left of ours is a call.
        raises = code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]
        if raises and module.partition(".")[0] == "towerjax":
            return None
    return re.search(pattern, str(error))


def explain(error: BaseException, fn: Callable[..., Any]) -> None:
    """Add advice to the error of a call that says only what failed."""
    frames = traceback.extract_tb(error.__traceback__)
    text = str(error)
    line = (frames[-1].line or "") if frames else ""
    notes = [note for why, note in _TEXTS.items() if says(error, why)]
    if "'NoneType' object" in text and "extra" in line:
        notes.append(_NO_EXTRA)
    if isinstance(error, TypeError):
        notes.append(_of_arguments(text, fn))
    if isinstance(error, KeyError | AttributeError | TypeError) and not any(notes):
        notes.append(_of_value(error))
    for note in notes:
        if note and note not in getattr(error, "__notes__", ()):
            error.add_note(note)


def _of_arguments(text: str, fn: Callable[..., Any]) -> str:
    """The arguments of a function that was called with wrong ones."""
    called, _, rest = text.partition("() ")
    if called != fn.__qualname__:
        return ""
    parameters = [*inspect.signature(fn).parameters.values()]
    by_name = [x.name for x in parameters if x.kind == x.KEYWORD_ONLY]
    if wrong := re.match(r"got an unexpected keyword argument '(\w+)'", rest):
        near = difflib.get_close_matches(wrong[1], [x.name for x in parameters])
        return _NAMES.get(wrong[1], f"Write {near[0]}=..." if near else "")
    if rest.startswith("missing ") and (example := _example_of(fn)):
        return f"As in {example}"
    if by_name and "positional arguments but" in rest:
        given = [x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD]
        return (
            f"Write {called}({', '.join(given)}, {by_name[0]}=...): what follows has a"
            " name, in any order."
        )
    return ""


def _example_of(fn: Callable[..., Any]) -> str:
    """The call of a function, or of its class, in the example of its docstring."""
    from doctest import DocTestParser  # with a debugger, which imports are too long for

    name, is_method, _ = fn.__qualname__.partition(".")
    doc = inspect.getdoc(fn.__globals__.get(name) if is_method else fn) or ""
    calls = [x.source for x in DocTestParser().get_examples(doc)]
    called = name if fn.__name__ == "__init__" else fn.__name__
    return next((" ".join(x.split()) for x in calls if f"{called}(" in x), "")


def _of_value(error: Exception) -> str:
    """The keys that exist, for a user's line that asks for a missing one."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    places = traceback.extract_tb(error.__traceback__)
    for frame, at in zip(frames[::-1], places[::-1], strict=True):
        line = linecache.getline(at.filename, at.lineno or 0)
        evaluated = line[at.colno or 0 : at.end_colno].strip()
        name = re.match(r"([\w.]+)[.\[]", evaluated)
        if name is None:
            continue
        first, *fields = name[1].split(".")
        x = frame.f_locals.get(first, error)
        for field in fields:
            x = getattr(x, field, error)
        if isinstance(error, KeyError) and isinstance(x, Mapping):
            if error.args and error.args[0] not in x:
                return f"{name[1]} has {', '.join(map(repr, x)) or 'no keys'}."
        elif x is None:
            return f"{name[1]} is None here."
        elif isinstance(error, AttributeError) and isinstance(x, Tracer):
            return f"{name[1]} is {jax.typeof(x)} here."
    return ""


@contextlib.contextmanager
def noted(note: str | None) -> Iterator[None]:
    """The context that adds a note, if any, to the error of a missing attribute."""
    try:
        yield
    except AttributeError as error:
        if note:
            error.add_note(note)
        raise


def explain_missing(note: str | None = None, **notes: str) -> Callable[[Any, str], Any]:
    """A ``__getattr__`` that notes what to write for a missing name.

    Hide it from types.
    """

    def get(self: Any, name: str) -> Any:
        # Again: a property may have raised the error.
        with noted(notes.get(name) or note or _NAMES.get(name)):
            return object.__getattribute__(self, name)

    return get


def later_in_module(module: str, **places: str) -> Callable[[str], Any]:
    """A module's ``__getattr__``: imports a name from its place, ``module:name``."""

    def get(name: str) -> Any:
        if name in places:
            return pkgutil.resolve_name(places[name])
        with noted(_NAMES.get(name)):
            text = f"module {module!r} has no attribute {name!r}"
            raise AttributeError(text, name=name)

    return get


_MORE = (
    "A loss function returns more, tj.TowerOutput(loss, metrics={...}); those of an"
    " evaluation are history.final and history.evaluations."
)
_OF_NO_STEP = (
    "This run did no step, so no step has metrics; history.evaluations has what it"
    " evaluated. A run that is resumed after its last step has none to do."
)


class Named(dict[str, Any]):
    """Metrics by name; the error for a missing name lists the others."""

    def __init__(self, metrics: Any = (), *, num_steps: int = 1) -> None:
        super().__init__(metrics)
        self._note = _MORE if num_steps else _OF_NO_STEP

    def __missing__(self, name: str) -> Any:
        error = KeyError(name)
        there = ", ".join(map(repr, self)) or "none"
        error.add_note(f"There are {there}. {self._note}")
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
        with noted(f"Write state = state.replace({name}=...), a new one."):
            refuse(self, name, value)

    setattr(cls, "__setattr__", assign)  # noqa: B010
    return cls
