"""Train the configurations of a grid; members of one program together or in turn."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import jax
import numpy as np

from towerjax.data.stream import as_reusable
from towerjax.loop.direction import Direction, sign_of
from towerjax.loop.history import History
from towerjax.loop.run import run
from towerjax.loop.writers import json_value
from towerjax.make.members import Members, Numbers
from towerjax.step.state.train_state import TrainState
from towerjax.step.step import Step
from towerjax.sweeps import grid as of_grid
from towerjax.sweeps.grid import Config, Grid, Line, RowTable
from towerjax.types import PyTree
from towerjax.types.boundary import api_boundary, warn
from towerjax.types.options import (
    check_choice,
    check_function,
    check_list,
    check_number,
    check_takes,
)
from towerjax.types.refusals import listed, refuse_unheld
from towerjax.types.tables import picture
from towerjax.types.trees import held_dtype

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Order = Literal["in_turn", "together"]
Build = Callable[..., tuple[Step, TrainState]]
Evaluate = Callable[..., Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Member:
    """One training of a sweep."""

    config: Config  # the arguments of build
    metrics: dict[str, np.ndarray] = dataclasses.field(repr=False)  # by name, [n, ...]
    evaluation: dict[str, Any]  # metrics of the last state; may be empty
    order: str  # "together", "in_turn", or "alone" if no other shared its program
    seconds: float  # its share of the time of training and compiling

    @classmethod
    def of(cls, record: dict[str, Any], config: Config) -> "Member":
        """Make a member from the record of a configuration.

        JSON records have infinity as a text, which is converted.
        """
        metrics = {name: _to_numbers(x) for name, x in record["metrics"].items()}
        values = record["evaluation"] or {}
        evaluation = {name: _to_numbers(x)[()] for name, x in values.items()}
        return cls(config, metrics, evaluation, record["order"], record["seconds"])

    @property
    def final(self) -> dict[str, Any]:
        """The evaluation, and the last step's metrics with other names."""
        last = {name: x[-1] for name, x in self.metrics.items()}
        return {**last, **self.evaluation}


def _to_numbers(values: Any) -> np.ndarray:
    array = np.asarray(values)
    return array if array.dtype.kind in "biu" else array.astype(float)


@dataclasses.dataclass(frozen=True, eq=False)
class Sweep(RowTable):
    """The members of a sweep, in the grid's order.

    Attributes:
      members: A tuple of `Member`.
    """

    members: tuple[Member, ...]
    title = "members"

    @property
    def configs(self) -> list[Config]:
        """The configurations of the members."""
        return [member.config for member in self.members]

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for x in self.members:
            numbers = {k: v for k, v in x.final.items() if np.ndim(v) == 0}
            rows += [x.config | numbers | {"order": x.order, "seconds": x.seconds}]
        return rows

    def best(self, metric: str, *, mode: Direction | None = None) -> Member:
        """Choose the member with the best last value.

        A missing or non-finite value is the worst.

        Args:
          metric: The name of a metric, or of a value of the evaluation.
          mode: ``"min"`` if less is better, ``"max"`` if more is. None takes it from
            the metric's name, as `EarlyStopping` does.

        Raises:
          ValueError: No member has such a metric; or ``mode`` is None, and the metric's
            name does not tell.
        """
        finals = [member.final for member in self.members]
        check_choice("metric", metric, list({k: 0 for final in finals for k in final}))
        sign = sign_of("mode", metric, mode)
        values = np.array([float(final.get(metric, np.nan)) for final in finals])
        costs = np.where(np.isfinite(values), sign * values, np.inf)
        return self.members[int(costs.argmin())]

    def curves(
        self, metric: str = "loss", *, over: str | Sequence[str] = "seed"
    ) -> dict[str, np.ndarray]:
        """Stack the learning curves of members that differ in ``over`` only.

        Returns:
          A dict of arrays ``[members, n]``. A key is the text of the members' other
          configuration values. Members without the metric have no curve.
        """
        names = {name: 0 for member in self.members for name in member.metrics}
        check_choice("metric", metric, list(names))
        over = [over] if isinstance(over, str) else over
        first = self.configs[0]
        for name in over:
            check_choice("over", name, list(first))
        others = [name for name in first if name not in over]
        shown = [x for x in others if any(c[x] != first[x] for c in self.configs)]
        by_label: dict[str, list[np.ndarray]] = {}
        for member in self.members:
            if metric in member.metrics:
                label = ", ".join(f"{name}={member.config[name]}" for name in shown)
                by_label.setdefault(label, []).append(member.metrics[metric])
        return {label: np.stack(rows) for label, rows in by_label.items()}

    def plot(
        self, metric: str = "loss", *, over: str | Sequence[str] | None = None
    ) -> "Figure":
        """Draw the `curves`: each mean, in a band from lowest to highest.

        Args:
          metric: The name of a metric that is one number in each step.
          over: As for `curves`. None is ``"seed"`` if the grid has it.

        Returns:
          A ``matplotlib.figure.Figure``, which a notebook shows.

        Raises:
          ValueError: Matplotlib is not installed, or the metric has arrays.
        """
        if over is None:
            over = [name for name in self.configs[0] if name == "seed"]
        figure, (panel,) = picture()
        panel.set(xlabel="step", ylabel=metric)
        for label, rows in self.curves(metric, over=over).items():
            if rows.ndim != 2:
                raise ValueError(
                    f"metric={metric!r} is an array {rows.shape[2:]} in each step. Plot"
                    " a metric with one number, or draw the result of curves()."
                )
            steps = np.arange(1, rows.shape[1] + 1)
            label = f"{label or metric}, mean of {len(rows)}"
            panel.plot(steps, rows.mean(0), lw=1.5, label=label)
            panel.fill_between(steps, rows.min(0), rows.max(0), alpha=0.25, lw=0)
        panel.legend(fontsize=8)
        return figure


@api_boundary
def sweep(
    build: Build,
    grid: Grid,
    batches: Iterable[PyTree] | Callable[..., Iterable[PyTree]],
    *,
    steps: int | None = None,
    static: Sequence[str] = (),
    order: Order = "in_turn",
    evaluate: Evaluate | None = None,
    results: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
) -> Sweep:
    """Train every configuration of a grid; configurations of one program compile once.

    A name of the grid is *traced* if all its values are numbers. ``build`` gets an
    array ``()`` for it, so one program serves all its values. All other names, and
    those in ``static``, are passed as they are. Each combination of their values needs
    a program. Each member has the result of training alone, up to rounding. A member
    whose loss is not finite keeps the state before that step; others are not affected.

    Args:
      build: ``build(**config) -> (step, state)``, a pure function that returns a step
        of `build_train_step` or `build_step`, and a state from its ``init``.
      grid: ``{name: values}``, of which every combination is trained, or a list of
        configurations. Values are numbers, texts, bools and None.
      batches: Batches as for `run` that can be iterated again, such as a list or
        `batches`. Or a function ``batches(**static) -> iterable``, which gets the names
        that are not traced.
      steps: The number of steps of each member; None runs to the end of the data.
      static: Names of numbers that change the program, such as widths, towers or batch
        sizes.
      order: The way to train the members of a program. ``"in_turn"`` trains one after
        the other, and records each when it ends. ``"together"`` trains them with
        ``vmap``. This takes the memory of all members, and is faster if steps are
        small.
      evaluate: ``evaluate(state, **config) -> {name: number}``, called on the host with
        each member's last state. If it raises, everything is recorded first.
      results: A file of JSON lines, written as members end. Members in the file are not
        trained again, so a killed sweep can be continued. With ``evaluate``, members
        without an evaluation are trained again.
      progress: None shows a bar on a terminal and in a notebook, and otherwise a plain
        line now and then. True always shows a bar, False nothing.

    Returns:
      A `towerjax.tools.Sweep`, in the grid's order.

    Raises:
      ValueError: The grid is malformed; the file holds another sweep; ``build`` needs
        the value of a traced number; there are several processes; or `run` raises.

    A warning names each traced name whose values made no difference.

    Any exception has ``error.sweep``, the members so far. An exception of ``evaluate``
    also has ``error.states``. It lists ``(configuration, state)`` for each member that
    was not evaluated.

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
        raise ValueError(
            "tj.sweep is for one process, but this job has several. Run a part of the"
            " grid in each job."
        )
    configs = of_grid.configs_of(grid)
    traced = traced_names(configs, static)
    check_function("build", build, "build(**config)", takes=False)
    check_takes("build(**config)", build, **configs[0])
    if evaluate is not None:  # checked now, and not after the training
        form = "evaluate(state, **config)"
        check_function("evaluate", evaluate, form, takes=False)
        check_takes(form, evaluate, None, **configs[0])
    name = f"{build.__module__}.{getattr(build, '__qualname__', 'build')}"
    about = {"build": name, "steps": steps, "names": sorted(configs[0])}
    file = of_grid.RecordFile(results, {"sweep": about}, _check_record)
    work = _Work(build, batches, steps, order, evaluate, traced)
    try:
        _train_all(work, configs, file, progress)
    except BaseException as error:
        vars(error)["sweep"] = _swept(configs, file)
        error.add_note("error.sweep has the members that were trained.")
        raise
    found = _swept(configs, file)
    _warn_if_unused(traced, found.members)
    return found


def _check_record(record: Line) -> None:
    """Raise unless a record has all that a `Member` has."""
    member = Member.of(record, dict(record["config"]))
    check_choice("order", member.order, (*get_args(Order), "alone"))
    check_number("seconds", member.seconds, "a number of seconds")
    Sweep((member,)).tables()


def _swept(configs: Sequence[Config], file: of_grid.RecordFile) -> Sweep:
    """Collect the members whose records the file has."""
    records = [(file.get(config), config) for config in configs]
    return Sweep(tuple(Member.of(*pair) for pair in records if pair[0]))


def _warn_if_unused(traced: Iterable[str], members: Sequence[Member]) -> None:
    """Warn of each traced name whose values made no difference to any member.

    The first steps do not tell: a learning rate acts on the second loss, and momentum
    on the third.
    """
    steps = min((len(x) for m in members for x in m.metrics.values()), default=0)
    for name in traced if steps > 2 else ():
        outcomes: dict[str, list[str]] = {}
        for member in members:
            others = {key: x for key, x in member.config.items() if key != name}
            outcome = of_grid.key_text(
                [_as_lists(member.metrics), _as_lists(member.evaluation)]
            )
            outcomes.setdefault(of_grid.key_text(others), []).append(outcome)
        is_varied = any(len(same) > 1 for same in outcomes.values())
        if is_varied and all(len({*same}) == 1 for same in outcomes.values()):
            warn(
                f"tj.sweep: {name} made no difference. Members that differ in it alone"
                f" have the same metrics in {steps} steps. Use it in build; or, if it"
                f" cuts the data, write static=[{name!r}] and a function"
                f" batches({name})."
            )


def _as_lists(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(x).tolist() for name, x in metrics.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class _Work:
    """The options of a sweep, and how its members are trained; see `sweep`."""

    build: Build
    batches: Iterable[PyTree] | Callable[..., Iterable[PyTree]]
    steps: int | None
    order: Order
    evaluate: Evaluate | None
    traced: Mapping[str, Any]

    def is_done(self, record: Line | None) -> bool:
        """Return whether a record of the file has all that this sweep asks for."""
        if not record:
            return False
        return not self.evaluate or record["evaluation"] is not None

    def records(self, fixed: Config, todo: Sequence[Config]) -> Iterator[Line]:
        """Train members that differ in traced numbers only; yield a record for each."""
        order = self.order if len(todo) > 1 else "alone"
        columns = {
            name: np.array([config[name] for config in todo], dtype)
            for name, dtype in self.traced.items()
        }
        groups = _groups_of(columns, todo, order)
        build = functools.partial(self._build, fixed)
        with _explain_tracing(self.traced):
            members = Members.of(build, groups[0][0])
        train = functools.partial(self._train, fixed)
        for numbers, configs in groups:
            for record in _trained(members, numbers, configs, train, self.evaluate):
                yield record | {"order": order}

    def _build(self, fixed: Config, numbers: Numbers) -> tuple[Step, TrainState]:
        return self.build(**fixed, **numbers)

    def _train(
        self, fixed: Config, step: Step, state: TrainState
    ) -> tuple[TrainState, History]:
        """Train one group of members; return the last state and the history."""
        source: Any = as_reusable("batches", self.batches, "every training needs all")
        if callable(source):
            names = fixed if source is self.batches else {}
            source = source(**names)
        with _explain_tracing(self.traced):
            return run(step, state, source, steps=self.steps, progress=False)


def _train_all(
    work: _Work,
    configs: Sequence[Config],
    file: of_grid.RecordFile,
    progress: bool | None,
) -> None:
    """Train the members that the file lacks, and add each one's record to it."""
    done = sum(work.is_done(file.get(config)) for config in configs)
    with of_grid.counted(progress, "member", done, len(configs)) as (show, _):
        for fixed, members in _programs(configs, work.traced):
            todo = [x for x in members if not work.is_done(file.get(x))]
            show(done, of_grid.describe(fixed))
            if not todo:
                continue
            for record in work.records(fixed, todo):
                file.add(record)
                done += 1


def _groups_of(
    columns: Numbers, todo: Sequence[Config], order: str
) -> list[tuple[Numbers, Sequence[Config]]]:
    """Group the members that one call trains, with their traced numbers."""
    if order == "together":
        return [(columns, todo)]
    groups: list[tuple[Numbers, Sequence[Config]]] = []
    for i, config in enumerate(todo):
        numbers = {k: x[i] for k, x in columns.items()}
        groups.append((numbers, [config]))
    return groups


def _programs(
    configs: Sequence[Config], traced: Mapping[str, Any]
) -> Iterable[tuple[Config, list[Config]]]:
    """Group the members that share a program.

    Members of a group differ in traced numbers only. Each group comes with the values
    that its members have in common.
    """
    programs: dict[str, tuple[Config, list[Config]]] = {}
    for config in configs:
        fixed = {k: x for k, x in config.items() if k not in traced}
        programs.setdefault(repr(fixed), (fixed, []))[1].append(config)
    return programs.values()


def traced_names(configs: Sequence[Config], static: Iterable[str]) -> dict[str, Any]:
    """Choose the names that are traced, each with its dtype.

    A name is traced if all its values are numbers, and it is not in ``static``.
    """
    for name in (static := check_list("static", static)):
        check_choice("static", name, list(configs[0]))
    traced = {}
    for name in configs[0]:
        kinds = {type(config[name]) for config in configs}
        if name not in static and kinds <= {int, float}:
            traced[name] = held_dtype(float if float in kinds else int)
    refuse_unheld("grid", {k: np.array([x[k] for x in configs]) for k in traced})
    return traced


@contextlib.contextmanager
def _explain_tracing(traced: Iterable[str]) -> Iterator[None]:
    """Explain an error of tracing ``build`` in this block.

    ``build`` gets arrays in place of the grid's numbers.
    """
    try:
        yield
    except Exception as error:
        # Errors of NumPy and Python name the tracer, too, so their text is searched.
        if "Tracer" not in str(error) and not isinstance(
            error, jax.errors.JAXTypeError
        ):
            raise
        raise ValueError(
            f"tj.sweep traces {', '.join(traced)}, so build gets arrays for them. Name"
            " in static=[...] numbers that decide shapes, towers or control flow, and"
            " make keys with jax.random.key(seed). The error is:"
            f" {str(error).splitlines()[0]}"
        ) from error


def _trained(
    members: Members,
    numbers: Numbers,
    configs: Sequence[Config],
    train: Callable[[Step, TrainState], tuple[TrainState, History]],
    evaluate: Evaluate | None,
) -> Iterator[Line]:
    """Train members with these numbers by one call; yield a record for each."""
    start_s = time.perf_counter()
    step = members.step
    # Earlier members had this time of proof and audit counted.
    start_s -= step.checked.seconds
    try:
        state, history = train(step, members.begin(numbers))
    except BaseException as error:
        error.add_note(f"This is the training of {listed(map(str, configs))}.")
        raise
    seconds = (time.perf_counter() - start_s - step.checked.seconds) / len(configs)
    failed: BaseException | None = None
    left: list[tuple[Config, TrainState]] = []
    for i, config in enumerate(configs):
        metrics = {k: members.of_member(x, i) for k, x in history.metrics.items()}
        member = members.member(state, i)
        evaluation = None
        # After Ctrl-C nothing is evaluated.
        if failed is None or isinstance(failed, Exception):
            evaluation, error = _evaluation_or_error(evaluate, member, config)
            is_graver = failed is None or not isinstance(error, Exception)
            if error is not None and is_graver:
                failed = error
        if evaluation is None:
            left.append((config, member))
        yield {
            "config": config,
            "seconds": round(seconds, 3),
            "metrics": {name: json_value(name, x) for name, x in metrics.items()},
            "evaluation": evaluation,
        }
    if failed is not None:
        vars(failed)["states"] = left
        failed.add_note(
            f"There is no evaluation of {listed(x for x, _ in left)}, but training"
            " has ended: its metrics are recorded, and error.states has"
            " (configuration, state) of each. The same sweep trains these again,"
            " or without evaluate leaves them as they are."
        )
        raise failed


def _evaluation_or_error(
    evaluate: Evaluate | None, state: TrainState, config: Config
) -> tuple[Line | None, BaseException | None]:
    """Evaluate a member, and catch the exception that it raises."""
    try:
        return _evaluated(evaluate, state, config), None
    except BaseException as error:
        return None, error


def _evaluated(evaluate: Evaluate | None, state: TrainState, config: Config) -> Line:
    returned: Any = evaluate(state, **config) if evaluate else {}
    try:
        return {name: json_value(name, x) for name, x in returned.items()}
    except (AttributeError, ValueError) as error:
        text = f"evaluate returned {returned!r:.200} for {config}; it returns"
        raise ValueError(text + " {name: number or array}, or {}.") from error
