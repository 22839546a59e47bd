"""Train the configurations of a grid; those of one program together or in turn."""

import contextlib
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np

from towerjax.data.feed import as_reusable
from towerjax.loop.progress import choose_display
from towerjax.loop.run import run
from towerjax.loop.writers import json_value
from towerjax.step.members import MembersStep
from towerjax.step.report import time_calls
from towerjax.step.state import TrainState
from towerjax.step.step import Step
from towerjax.tools.sweep.result import (
    Config,
    Line,
    Member,
    RecordFile,
    Sweep,
    key_text,
    show_counts,
)
from towerjax.types import PyTree
from towerjax.types.door import door
from towerjax.types.leaves import held_dtype, listed, refuse_unheld
from towerjax.types.options import (
    check_choice,
    check_function,
    check_list,
    check_takes,
)

Order = Literal["fastest", "together", "in_turn"]
Build = Callable[..., tuple[Step, TrainState]]
_CALLS, _ROUNDS = 5, 3  # after one round, which compiles


@door
def sweep(
    build: Build,
    grid: Mapping[str, Iterable[Any]] | Iterable[Mapping[str, Any]],
    batches: Iterable[PyTree] | Callable[..., Iterable[PyTree]],
    *,
    steps: int | None = None,
    static: Sequence[str] = (),
    order: Order = "fastest",
    evaluate: Callable[..., Mapping[str, Any]] | None = None,
    results: str | os.PathLike[str] | None = None,
    steps_per_call: int = 1,
    progress: bool | None = None,
) -> Sweep:
    """Train every configuration of a grid; those of one program compile once.

    Names of the grid whose values are all numbers are *traced*: ``build`` is given
    arrays ``()`` for them, so that one program serves all their values. All others, and
    those that ``static`` names, are given as they are, and each combination of them is
    a program. The members of a program see the same batches in the same order, and each
    gets the result of training alone, up to rounding.

    A member whose loss is not finite keeps its state of before that step and continues
    with the next batch. The others are not affected.

    Args:
      build: ``build(**config) -> (step, state)``, pure: a step of
        `build_train_step` or `build_step`, and what its ``init`` returns.
      grid: ``{name: values}``, of which every combination is trained, or a list of
        configurations. Values are numbers, texts, bools and None.
      batches: Batches as for `run` that can be iterated again: a list, `batches`; or a
        function of the names that are not traced, ``batches(**static) -> iterable``.
      steps: How many steps each does; None runs to the end of the data.
      static: Names of numbers that change the program: widths, towers, batch sizes.
      order: How the members of a program are trained: ``"together"`` by ``vmap``,
        which takes the memory of all; ``"in_turn"``, one after another by one program,
        each recorded when it ends; ``"fastest"`` compiles both, times some steps, and
        takes the faster one.
      evaluate: ``evaluate(state, **config) -> {name: number}``, called on the host
        with each member's last state; it may save that state, too. If it raises, what
        was trained is evaluated and recorded first.
      results: A file of JSON lines, one for each member, written when it ends. Members
        that it has are not trained again, so that a killed sweep can be continued;
        but those without an evaluation are, with ``evaluate``.
      steps_per_call: As for `run`.
      progress: None shows a bar on a terminal, else lines; True always a bar; False
        nothing.

    Returns:
      A `towerjax.tools.Sweep`, in the grid's order.

    Raises:
      ValueError: The grid is malformed, the file holds another sweep, ``build`` needs
        the value of a traced number, there are several processes, or `run` raises.

    Any exception has ``error.sweep``, the members so far. One of ``evaluate`` also has
    ``error.states``, a list of ``(configuration, state)`` of the members without one.

    Example:
      >>> import jax.numpy as jnp, optax, towerjax as tj
      >>> def loss_fn(params, batch, tower):
      ...     return tj.Weighted.mean((params - batch) ** 2, tower.weight)
      >>> def build(rate, seed):
      ...     strategy = tj.Mirrored(towers=2)
      ...     step = tj.build_train_step(loss_fn, optax.sgd(rate), strategy)
      ...     return step, step.init(jax.random.normal(jax.random.key(seed)))
      >>> data = [np.full(4, 2.0, np.float32)] * 20
      >>> grid = {"rate": [0.01, 0.1], "seed": range(3)}
      >>> found = sweep(build, grid, data, order="together", progress=False)
      >>> len(found.members), found.best("loss").config["rate"]
      (6, 0.1)
    """
    check_choice("order", order, get_args(Order))
    if jax.process_count() > 1:
        raise ValueError("tj.sweep is for one process. Share the grid out.")
    configs = configs_of(grid)
    _check_functions(build, evaluate, configs[0])
    traced = traced_names(configs, static)
    name = f"{build.__module__}.{getattr(build, '__qualname__', 'build')}"
    about = {"build": name, "steps": steps, "names": sorted(configs[0])}
    file = RecordFile(results, "config", {"sweep": about})
    swept = functools.partial(_members_in, file, configs)

    def is_done(config: Config) -> bool:
        record = file.get(config)
        return bool(record) and not (evaluate and record["evaluation"] is None)

    programs: dict[str, tuple[Config, list[Config]]] = {}
    for config in configs:
        fixed = {k: x for k, x in config.items() if k not in traced}
        programs.setdefault(repr(fixed), (fixed, []))[1].append(config)
    done = sum(map(is_done, configs))
    with (
        contextlib.closing(choose_display(progress)) as display,
        _attaching_results(swept),
    ):
        show = show_counts(display, "member", len(configs), done)
        for fixed, members in programs.values():
            todo = [config for config in members if not is_done(config)]
            known = {r["order"] for c in members if (r := file.get(c))} - {"alone"}
            program = _Program(
                build, fixed, traced, batches, steps, steps_per_call, evaluate
            )
            chosen = known.pop() if order == "fastest" and known else order
            show(done, ", ".join(f"{k}={x}" for k, x in fixed.items()))
            for record in program.train_members(todo, chosen) if todo else ():
                file.add(record)
                done += 1
        show(done, "done")
    return swept()


def _check_functions(build: Build, evaluate: Any, config: Config) -> None:
    check_function("build", build, "build(**config)", takes=False)
    if evaluate is not None:  # else training would end with the error
        form = "evaluate(state, **config)"
        check_function("evaluate", evaluate, form, takes=False)
        check_takes(form, evaluate, None, **config)


def _members_in(file: RecordFile, configs: Sequence[Config]) -> Sweep:
    records = [(file.get(config), config) for config in configs]
    return Sweep(tuple(Member.of(*pair) for pair in records if pair[0]))


@contextlib.contextmanager
def _attaching_results(swept: Callable[[], Sweep]) -> Iterator[None]:
    """Attach the members so far to an exception."""
    try:
        yield
    except BaseException as error:
        found: Any = error
        found.sweep = swept()
        error.add_note("error.sweep has the members that were trained.")
        raise


def configs_of(grid: Any) -> list[Config]:
    """The configurations of a grid, checked, each once."""
    if isinstance(grid, Mapping):
        lists = (check_list(f"grid[{name!r}]", x) for name, x in grid.items())
        product = itertools.product(*lists)
        grid = [dict(zip(grid, values, strict=True)) for values in product]
    configs = [{name: _as_plain(name, x) for name, x in dict(c).items()} for c in grid]
    if len({frozenset(config) for config in configs}) != 1 or not configs[0]:
        raise ValueError(
            "grid must be {name: [values]}, or configurations that all have the same"
            f" names; it has {len(configs)}, with {list(map(list, configs))}."
        )
    return list({key_text(config): config for config in configs}.values())


def _as_plain(name: str, value: Any) -> Any:
    if isinstance(value, np.generic | jax.Array) and not value.ndim:
        value = value.item()
    if not isinstance(value, str | int | float | bool | None):
        raise ValueError(
            f"grid: {name}={value!r} is a {type(value).__name__}, not a number, text,"
            " bool or None: write a text, and look the rest up in build."
        )
    return value


def traced_names(configs: Sequence[Config], static: Iterable[str]) -> dict[str, Any]:
    """Name -> dtype for each name, not in ``static``, whose values are all numbers."""
    for name in (static := check_list("static", static)):
        check_choice("static", name, list(configs[0]))
    found = {}
    for name in configs[0]:
        kinds = {type(config[name]) for config in configs}
        if name not in static and kinds <= {int, float}:
            found[name] = held_dtype(float if float in kinds else int)
    values = {name: np.array([config[name] for config in configs]) for name in found}
    refuse_unheld("grid", values)
    return found


@contextlib.contextmanager
def _explain_tracing(traced: Iterable[str]) -> Iterator[None]:
    """Explain an error of tracing ``build``: numbers of the grid are arrays there."""
    try:
        yield
    except Exception as error:
        # Errors of NumPy and Python name the tracer, too.
        is_ours = isinstance(error, jax.errors.JAXTypeError)
        if not is_ours and "Tracer" not in str(error):
            raise
        raise ValueError(
            f"tj.sweep traces {', '.join(traced)}: build gets arrays. Name in"
            " static=[...] what decides shapes, towers or control flow, and make keys"
            f" with jax.random.key(seed). Here: {str(error).splitlines()[0]}"
        ) from error


def _with_states(error: Any, left: list[tuple[Config, TrainState]]) -> BaseException:
    """The error of an evaluation, with the states that have none."""
    error.states = left
    configs = listed([str(config) for config, _ in left])
    error.add_note(
        f"There is no evaluation of {configs}, but training has ended: its metrics are"
        " recorded, and error.states has (configuration, state) of each. The same"
        " sweep trains these again, or without evaluate leaves them as they are."
    )
    return error


@dataclasses.dataclass(frozen=True)
class _Program:
    """The program of all members that differ in traced numbers alone."""

    build: Build
    fixed: Config
    traced: Mapping[str, Any]  # name -> dtype
    source: Any
    steps: int | None
    steps_per_call: int
    evaluate: Callable[..., Mapping[str, Any]] | None

    def train_members(self, members: Sequence[Config], order: str) -> Iterator[Line]:
        """Train the members; yield the record of each."""
        numbers = {
            name: np.array([config[name] for config in members], dtype)
            for name, dtype in self.traced.items()
        }
        each = [
            ({name: x[i] for name, x in numbers.items()}, [config])
            for i, config in enumerate(members)
        ]
        groups = {"together": [(numbers, members)], "in_turn": each, "alone": each}

        @functools.cache
        def step_for(order: str) -> MembersStep:
            build = functools.partial(self.build, **self.fixed)
            with _explain_tracing(self.traced):
                return MembersStep(lambda traced: build(**traced), groups[order][0][0])

        order = order if len(members) > 1 else "alone"
        if order == "fastest":
            both = ("together", "in_turn")
            times = [self._seconds(step_for(x), groups[x]) for x in both]
            order = both[int(np.argmin(times))]
        for values, configs in groups[order]:
            yield from self._train_and_record(step_for(order), values, configs, order)

    def _seconds(self, step: MembersStep, groups: Sequence[Any]) -> float:
        """The time of a few calls for all groups, from those of the first."""
        few = functools.partial(self._run, step, few=_CALLS * self.steps_per_call)
        return len(groups) * time_calls(few, step.begin(groups[0][0]), _ROUNDS).step_s

    def _run(self, step: MembersStep, state: Any, few: int | None = None) -> Any:
        """Run all steps, or the first few; return ``(state, history)``."""
        source, steps = self.source, self.steps
        batches: Any = as_reusable("batches", source, "every training needs all of it")
        if callable(batches):
            batches = batches(**(self.fixed if batches is source else {}))
        if few is not None:
            batches, steps = list(itertools.islice(batches, few)), None
        options = {"steps": steps, "steps_per_call": self.steps_per_call}
        with _explain_tracing(self.traced):
            return run(step, state, batches, **options, progress=False)

    def _train_and_record(
        self, step: MembersStep, numbers: Any, configs: Sequence[Config], order: str
    ) -> Iterator[Line]:
        start_s = time.perf_counter()
        try:
            state, history = self._run(step, step.begin(numbers))
        except BaseException as error:
            error.add_note(f"This is the training of {listed(map(str, configs))}.")
            raise
        seconds = (time.perf_counter() - start_s) / len(configs)
        failed: BaseException | None = None
        left: list[tuple[Config, TrainState]] = []
        for i, config in enumerate(configs):
            own = {k: step.of_member(x, i) for k, x in history.metrics.items()}
            member, evaluation = step.member(state, i), None
            try:
                if failed is None or isinstance(failed, Exception):
                    evaluation = self._evaluate(member, config)
            except BaseException as error:
                is_first = failed is None or not isinstance(error, Exception)
                failed = error if is_first else failed
            left += [(config, member)] if evaluation is None else []
            yield {
                "config": config,
                "order": order,
                "seconds": round(seconds, 3),
                "metrics": {name: json_value(name, x) for name, x in own.items()},
                "evaluation": evaluation,
            }
        if failed is not None:
            raise _with_states(failed, left)

    def _evaluate(self, state: TrainState, config: Config) -> Line:
        if self.evaluate is None:
            return {}
        found: Any = self.evaluate(state, **config)
        try:
            return {name: json_value(name, x) for name, x in found.items()}
        except (AttributeError, ValueError) as error:
            text = f"evaluate returned {found!r:.200} for {config}; it returns"
            raise ValueError(text + " {name: number or array}, or {}.") from error
