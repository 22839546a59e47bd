"""Notes on errors: what to write for a missing name, and what JAX's errors mean."""

import contextlib
import difflib
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from opcode import opmap
from typing import Any, TypeVar

import jax
from jax.core import Tracer

from towerjax.types.version import page

_Class = TypeVar("_Class", bound=type)
_IN_PARTS = "To process rows in several parts write micro_batches=3."
_PRECISION = (
    "Write tj.contrib.train_step(..., compute_dtype='bfloat16'), or cast in the loss,"
    f" x.astype(jnp.bfloat16): {page('how_to/mixed_precision')}"
)
_SAVES = (
    "a run saves its state between steps. In a loop of your own write"
    " checkpointer.save(step, state, batches). For parameters alone see"
    f" {page('checkpoints', 'Parameters alone')}"
)
_NAMES = {
    "MirroredStrategy": (
        f"Write tj.Mirrored(); for each name see {page('reference/mirrored_strategy')}"
    ),
    "fit": "For a loop over batches write tj.run(step, state, batches).",
    "apply_gradients": "Write tj.apply_gradients(optimizer, state, grads).",
    "state": "A step holds no state. Write state = step.init(params); each call returns"
    " the next state: state, metrics = step(state, batch).",
    "epochs": "Give the epochs to the batches: tj.batches(data, batch_size, epochs=3).",
    "batch_size": (
        "Give the batch size to the batches: tj.batches(data, batch_size, epochs=3)."
    ),
    "validation_data": "Write evaluate=tj.build_eval_step(metric_fn, strategy),"
    " eval_batches=lambda: tj.batches(data, batch_size).",
    "steps_per_call": "For several steps in one program write jax.lax.scan(step.fn,"
    " state, batches) with stacked batches; the metrics of all steps"
    " come back stacked.",
    "best": "Write checkpointer=tj.Checkpointer(folder, best='loss'); then"
    " checkpointer.restore(step, state, number=checkpointer.best_step).",
    "profile": "Write jax.profiler.trace(folder) around a run of a few steps.",
    "WandB": f"Write tj.loop.Curves(function): {page('how_to/wandb_and_mlflow')}",
    "callbacks": "Write hooks=[hook], each called as hook(number, metrics).",
    "Trainer": "Write step = tj.build_train_step(loss_fn, optimizer, tj.Mirrored()),"
    " and for a loop over batches tj.run(step, state, batches).",
    "DataParallel": "Write tj.Mirrored(), and give it to tj.build_train_step.",
    "EstimatorSpec": "Write tj.estimator.ModelSpec(mode, loss=..., train_op=...).",
    "ModeKeys": "Write tj.estimator.Mode.TRAIN, EVAL or PREDICT.",
    "key": "A key is called rng here: step.init(params, rng=jax.random.key(0)).",
    "shuffle": "Give a seed, with which each epoch is shuffled: tj.batches(data,"
    " batch_size, seed=0).",
    "accumulate": _IN_PARTS,
    "accum_steps": _IN_PARTS,
    "gradient_accumulation_steps": _IN_PARTS,
    "clip_norm": "Write optimizer=optax.chain(optax.clip_by_global_norm(1.0), optimizer"
    ").",
    "mixed_precision": _PRECISION,
    "precision": _PRECISION,
    "dtype": _PRECISION,
    "drop_last": "Write drop_remainder=True.",
    "max_to_keep": "Write keep=3.",
    "monitor": "Write the metric's name first: tj.EarlyStopping('loss', patience=3).",
    "log_dir": "Write logdir=...",
    "aux": "Write metrics={...} for values to merge over towers, and extra=... for the"
    " next value of state.extra.",
    "save": f"Write tj.run(..., checkpointer=tj.Checkpointer(folder)): {_SAVES}",
    "load": "Write checkpointer.restore(step, state) for a state. For parameters alone"
    f" see {page('checkpoints', 'Parameters alone')}",
    "lower": "Write step.program(state, batch).call.as_text() for the compiled program,"
    " and step.report(state, batch) for what it sends and holds.",
    "train": "Write tj.run(step, state, batches), where step ="
    " tj.build_train_step(loss_fn, optimizer, tj.Mirrored()).",
    "pmean": "A loss needs no collective: return tj.Weighted.mean(values,"
    " tower.weight). Elsewhere in a tower write tower.mean(values, tower.weight).",
    "psum": "A loss needs no collective: return tj.Sum(value), or tj.Weighted.mean(..."
    "). Elsewhere in a tower write tower.reduce(tj.Reduction.SUM, value).",
    "f1": "Write 2 * p * r / (p + r) of the values of tj.metrics.precision and recall,"
    " which have been merged; or a tj.metrics.Additive of your own.",
}
"""What to write here, by a name or a keyword argument of another library."""

_NO_EXTRA = (
    "extra is None, because it was never given. Write step.init(params, extra=...)."
)
_NO_PLATFORM = (
    "JAX_PLATFORMS (or jax_platforms) names a platform that this machine lacks, or"
    " whose driver JAX cannot use. Leave it out, or write JAX_PLATFORMS=cpu."
)
# Advice on errors of JAX, by a pattern of the error's text.
_TEXTS = {
    r"RESOURCE_EXHAUSTED|[Oo]ut of memory": (
        "Out of memory: build the step with micro_batches=2 or more; use jax.checkpoint"
        " in the loss; shard the state with tj.Mirrored(state='sharded'); run a"
        " device's towers one after another with tower_loop='scan'; keep donate=True."
        " step.report(state, batch) shows what takes the memory."
    ),
    r"^Array has been deleted": (
        "A call of a step donated this array, which was in the state it was given. Go"
        " on with the state that the step returned, copy the array before"
        " (jnp.copy(x)), or build the step with donate=False."
    ),
    r"^Comparator raised exception while sorting pytree dictionary keys": (
        "A dict has keys of several types, such as 0 and 'x', which JAX cannot sort:"
        " make all keys strings."
    ),
    r"numpy.ndarray conversion method __array__": (
        "NumPy cannot compute with values of a tower, which has none while it is"
        " traced: write jnp.square(x) in place of np.square(x), and so on."
    ),
    r"Tracer' object is not callable": (
        "A value was called. tower.rng, tower.weight and the like are values: write"
        " them without ()."
    ),
    r"^unsupported operand type.*'list'|^'list' object has no attribute|, not list$": (
        "A list of numbers is a tree with a leaf for each, and no array. Write"
        " np.array([...]) for it, in the parameters or in the batch."
    ),
    r"^(grad|jac\w+) requires real- or complex-valued inputs": (
        "Whole numbers and keys have no gradient, and a state has both. Differentiate"
        " by state.params alone: jax.grad(of_params)(state.params)."
    ),
    r"Unable to initialize backend": _NO_PLATFORM,
    r"unexpected tracer|(?s:^Abstract tracer value(?!.*depends on the values))": (
        "A tower function stored a value in a list, a global or an attribute, and the"
        " value is read after the function returned. Return it instead: from a loss"
        " function as tj.TowerOutput(loss, metrics={...})."
    ),
}


def says(error: BaseException, pattern: str) -> re.Match[str] | None:
    """Match a pattern in an error's text; None for an error of our own.

    Our own errors already have their remedy.
    """
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    if trace is not None:
        code = trace.tb_frame.f_code
        module = trace.tb_frame.f_globals.get("__name__", "")
        # The error is our own if our last frame is at a ``raise``. If JAX has dropped
        # its frames from an error of JAX, our last frame is at a call.
        raises = code.co_code[trace.tb_lasti] == opmap["RAISE_VARARGS"]
        if raises and module.partition(".")[0] == "towerjax":
            return None
    return re.search(pattern, str(error))


def explain(error: BaseException, fn: Callable[..., Any]) -> None:
    """Add advice, as a note, to an error that does not say what to write."""
    frames = traceback.extract_tb(error.__traceback__)
    text = str(error)
    line = (frames[-1].line or "") if frames else ""
    notes = [note for why, note in _TEXTS.items() if says(error, why)]
    if isinstance(error, AssertionError) and frames and frames[-1].name == "backends":
        notes.append(_NO_PLATFORM)  # this error of JAX has no text
    if "'NoneType' object" in text and "extra" in line:
        notes.append(_NO_EXTRA)
    if isinstance(error, TypeError):
        notes.append(_of_arguments(text, fn))
    if isinstance(error, AttributeError) and fn.__name__ == "__getattr__":
        notes.append(_NAMES.get(str(error.name), ""))
    if isinstance(error, TypeError | ValueError) and not any(notes):
        notes.append(_of_unpacked(error))
    if isinstance(error, KeyError | AttributeError | TypeError) and not any(notes):
        notes.append(_of_value(error))
    for note in notes:
        if note and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    if told := getattr(error, "__notes__", ()):
        # Put JAX's note on removed frames last. It begins with a line of hyphens.
        error.__notes__ = sorted(told, key=_is_of_frames)


def _is_of_frames(note: str) -> bool:
    """Return whether a note is JAX's, on frames that are not shown."""
    return note.startswith("-----")


def _of_arguments(text: str, fn: Callable[..., Any]) -> str:
    """Advise on a function that was called with wrong arguments, or ""."""
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
    if called == "Step.__call__" and "positional arguments but" in rest:
        return "A batch is one tree: write step(state, (x, y)), and x, y = batch there."
    if by_name and "positional arguments but" in rest:
        names = [x.name for x in parameters if x.kind == x.POSITIONAL_OR_KEYWORD]
        return (
            f"Write {called}({', '.join(names)}, {by_name[0]}=...): pass the arguments"
            " after that by name, in any order."
        )
    return ""


def _example_of(fn: Callable[..., Any]) -> str:
    """Find a call of a function or its class in the docstring's example."""
    from doctest import DocTestParser  # imports a debugger, which is slow

    name, is_method, _ = fn.__qualname__.partition(".")
    doc = inspect.getdoc(fn.__globals__.get(name) if is_method else fn) or ""
    calls = [x.source for x in DocTestParser().get_examples(doc)]
    called = name if fn.__name__ == "__init__" else fn.__name__
    return next((" ".join(x.split()) for x in calls if f"{called}(" in x), "")


def _of_unpacked(error: Exception) -> str:
    """Advise if the user's line unpacks a dict, which yields keys; else ""."""
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        if frame.f_globals.get("__name__", "").partition(".")[0] in ("towerjax", "jax"):
            continue
        lines = [linecache.getline(code.co_filename, n + 1) for n in range(number)]
        for line in lines[code.co_firstlineno - 1 :]:
            match = re.match(r"\s*(\w+(?: *, *\w+)+) *= *(\w+)\s*$", line)
            held = frame.f_locals.get(match[2]) if match else None
            if match and isinstance(held, Mapping):
                values = ", ".join(f"{match[2]}[{key!r}]" for key in held)
                return (
                    f"{match[2]} is a dict, and unpacking it gives its keys. Write"
                    f" {match[1]} = {values}."
                )
    return ""


def _of_value(error: Exception) -> str:
    """Tell what a value has, if the user's line asks for what it lacks; else "".

    For a missing key these are the keys; for a missing attribute, what the value is.
    """
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
    """Add a note, unless it is None, to an AttributeError raised in this block."""
    try:
        yield
    except AttributeError as error:
        if note:
            error.add_note(note)
        raise


def explain_missing(note: str | None = None, **notes: str) -> Callable[[Any, str], Any]:
    """Make a ``__getattr__`` whose error says what to write for a missing name.

    Hide it from type checkers, which would accept every name.
    """

    def get(self: Any, name: str) -> Any:
        # The attribute is read again, because the error may come from a property's own
        # code.
        with noted(notes.get(name) or note or _NAMES.get(name)):
            return object.__getattribute__(self, name)

    return get


def advice_on_name(name: str) -> str:
    """Say what to write here for a name of another library; "" if unknown."""
    return _NAMES.get(name, "")


_MORE = (
    "To get more metrics, let the loss function return tj.TowerOutput(loss,"
    " metrics={...}). The metrics of an evaluation are history.final and"
    " history.evaluations."
)
_OF_NO_STEP = (
    "This run did no step, so there are no metrics of steps. A run that is resumed"
    " after its last step has nothing to do. history.evaluations holds its evaluations."
)


class Named(dict[str, Any]):
    """A dict of metrics, whose error for a missing name lists the names that it has."""

    def __init__(self, metrics: Any = (), *, num_steps: int = 1) -> None:
        super().__init__(metrics)
        self._note = _MORE if num_steps else _OF_NO_STEP

    def __getattr__(self, name: str) -> Any:
        with noted(f"Write metrics[{name!r}]." if name in self else None):
            return object.__getattribute__(self, name)

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
    """Change the frozen dataclass ``cls`` to give advice in one error.

    The error for an assignment to a field then says to use ``replace``.
    """
    refuse: Any = cls.__setattr__

    def assign(self: Any, name: str, value: Any) -> None:
        with noted(
            f"A state is never changed. Write state = state.replace({name}=...), which"
            " makes a new one."
        ):
            refuse(self, name, value)

    setattr(cls, "__setattr__", assign)  # noqa: B010
    return cls
