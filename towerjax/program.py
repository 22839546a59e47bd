"""When is a step proved and compiled? Once for each kind of batch, then only called."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax

from towerjax.executors import (
    jit_on_devices,
    lower_on_devices,
    over_devices,
    shapes_of,
    trace_one_tower,
)
from towerjax.in_flight import in_flight_on
from towerjax.input.placer import PlacedBatch
from towerjax.placement import Placement, TowerAxes
from towerjax.processes import require_same
from towerjax.proof.analysis import (
    Analysis,
    analyse,
    body_of_shard_map,
)
from towerjax.proof.mirrored import prove_mirrored
from towerjax.shard import explain_change
from towerjax.types import Layout, PyTree, named_leaves


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A step before it is compiled.

    Attributes:
      device_fn: ``axes -> f(*args)``: what one device does for its towers.
      in_layouts: Argument name -> a prefix tree of layouts.
      out_layouts: Result name -> a prefix tree of layouts; results are a tuple.
      donate: May the results take over the first argument's buffers?
      counted: ``axes -> f(*args)``: each device's sums in which padded rows would
        count, leaves ``[1, ...]``; None where padding is cut off again.
      advice: What to do where a mirrored result depends on the tower; None says the
        usual.
      proved_alone: Is a reduction missed on one tower too, where it would do nothing?
    """

    device_fn: Callable[[TowerAxes], Callable[..., PyTree]]
    in_layouts: dict[str, PyTree]
    out_layouts: dict[str, PyTree]
    donate: bool
    counted: Callable[[TowerAxes], Callable[..., PyTree]] | None
    advice: str | None = None
    proved_alone: bool = True


@dataclasses.dataclass(frozen=True)
class Proof:
    """What the analysis of a traced step found.

    Attributes:
      analysis: Every output's dependence on the tower, and the collectives.
      unmasked: Gives the counted sums that depend on the rows of the batch and not
        on which of them are examples. Looked for when a batch is padded.
    """

    analysis: Analysis
    unmasked: Callable[[], list[str]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step.

    Attributes:
      call: The executable: global arrays in, global arrays out.
      proof: Why its mirrored results are the same on every tower.
      seconds: How long tracing, proving and compiling took.
    """

    call: Any
    proof: Proof
    seconds: float


def prove(recipe: Recipe, placement: Placement, args: tuple[PyTree, ...]) -> Proof:
    """The proof that what a step declares mirrored is the same on every tower.

    Traces the step for ``T`` towers on a mesh of absent devices.

    Args:
      recipe: The step.
      placement: Its towers.
      args: Arrays or shapes.

    Returns:
      The `Proof`.

    Raises:
      ReplicationError: A mirrored result depends on the tower, or a collective
        stands where not every tower would reach it.
    """
    return prove_traced(recipe, placement, args)[0]


def prove_traced(
    recipe: Recipe, placement: Placement, args: tuple[PyTree, ...]
) -> tuple[Proof, Any]:
    """As `prove`, with what was proved.

    Args:
      recipe: The step.
      placement: Its towers.
      args: Arrays or shapes.

    Returns:
      The `Proof`, and the jaxpr of one tower.

    Raises:
      ReplicationError: As `prove`.
    """
    axes = placement.abstract_axes
    layouts = tuple(recipe.in_layouts.values())
    out_layouts = tuple(recipe.out_layouts.values())
    jaxpr, out = trace_one_tower(
        recipe.device_fn(axes), axes, layouts, out_layouts, args
    )
    proof = _prove_body(recipe, jaxpr, args, out, axes)
    return proof, body_of_shard_map(jaxpr)


def _prove_body(
    recipe: Recipe, jaxpr: Any, args: PyTree, out: PyTree, axes: TowerAxes
) -> Proof:
    body = body_of_shard_map(jaxpr)
    is_free = axes.num_towers == 1 and not recipe.proved_alone
    inputs = _names_where(
        recipe.in_layouts,
        args,
        lambda layout: layout is not Layout.MIRRORED and not is_free,
    )
    outputs = _names_where(
        recipe.out_layouts, out, lambda layout: layout is Layout.MIRRORED
    )
    # Arrays that the user's function closes over come first, the same on all towers.
    closed_over = len(body.invars) - len(inputs)
    names = () if is_free else axes.device_names
    inputs = ["tower.weight" if name == "num_valid" else name for name in inputs]
    found = analyse(body, [None] * closed_over + inputs, names, constants=closed_over)
    prove_mirrored(found, outputs, advice=recipe.advice)

    return Proof(found, functools.partial(_unmasked, recipe, args, axes))


def _unmasked(recipe: Recipe, args: PyTree, axes: TowerAxes) -> list[str]:
    """Counted sums that depend on rows, and not on which rows are examples."""
    if recipe.counted is None:
        return []
    layouts = tuple(recipe.in_layouts.values())
    jaxpr, out = trace_one_tower(
        recipe.counted(axes), axes, layouts, Layout.PER_TOWER, args
    )
    body, names = body_of_shard_map(jaxpr), _all_names(recipe.in_layouts, args)
    names = [""] * (len(body.invars) - len(names)) + names
    by_rows = _depends(body, [n if n.startswith("batch") else None for n in names])
    by_count = _depends(body, [n if n == "num_valid" else None for n in names])
    sums = [
        name.removeprefix("['").replace("']", "", 1)
        for name, _ in named_leaves("", out)
    ]
    return [
        name
        for name, rows, count in zip(sums, by_rows, by_count, strict=True)
        if rows and not count
    ]


def _depends(body: Any, inputs: list[str | None]) -> list[bool]:
    """Which outputs depend on the named inputs, whatever is reduced on the way."""
    no_axis = ("",)  # so that no reduction ends a dependence
    return [found is not None for found in analyse(body, inputs, no_axis).outputs]


def _all_names(layouts: dict[str, PyTree], values: PyTree) -> list[str]:
    return [
        name
        for root, value in zip(layouts, values, strict=True)
        for name, _ in named_leaves(root, value)
    ]


def _names_where(
    layouts: dict[str, PyTree], values: PyTree, wanted: Callable[[Layout], bool]
) -> list[str | None]:
    """Each leaf's name where its layout is wanted, else None; in tree order."""
    flags: list[bool] = []
    for layout, value in zip(layouts.values(), values, strict=True):
        spread = jax.tree.map(
            lambda one, part: jax.tree.map(lambda _, one=one: wanted(one), part),
            layout,
            value,
        )
        flags += jax.tree.leaves(spread)
    names = _all_names(layouts, values)
    return [name if flag else None for name, flag in zip(names, flags, strict=True)]


def prepare(
    recipe: Recipe, placement: Placement, args: tuple[PyTree, ...]
) -> tuple[Proof, Callable[[], Program]]:
    """The step proved, and a function that compiles it.

    Args:
      recipe: The step.
      placement: Its towers and devices.
      args: Arrays or shapes.

    Returns:
      The `Proof`, and what makes the `Program`.

    Raises:
      ReplicationError: As `prove`.
    """
    start = time.perf_counter()
    layouts = tuple(recipe.in_layouts.values())
    out_layouts = tuple(recipe.out_layouts.values())
    axes = placement.axes
    global_fn = over_devices(recipe.device_fn(axes), placement, layouts, out_layouts)
    jitted = jit_on_devices(
        global_fn, placement, layouts, out_layouts, donate=recipe.donate
    )
    shapes = shapes_of(args)
    if placement.runs_one_tower_a_device:
        # What is traced for the devices is one tower's program: prove that one.
        traced = jitted.trace(*shapes)
        proof = _prove_body(recipe, traced.jaxpr, shapes, traced.out_info, axes)
    else:
        proof = prove(recipe, placement, args)
        traced = jitted.trace(*shapes)

    def compile_it() -> Program:
        lowered = lower_on_devices(traced, placement)
        if placement.num_processes > 1:
            require_same(
                "The step's program",
                lowered.as_text(),
                "Loss, optimizer with its numbers, options and what functions close"
                " over must be the same on all.",
            )
        compiled = lowered.compile()
        return Program(compiled, proof, time.perf_counter() - start)

    return proof, compile_it


class Runner:
    """A step's programs: finds the one for a batch, and makes it the first time.

    Args:
      recipe: The step.
      placement: Its towers and devices.
      max_programs: How many kinds of batch there may be.
    """

    def __init__(
        self, recipe: Recipe, placement: Placement, *, max_programs: int
    ) -> None:
        self.recipe, self.placement = recipe, placement
        self.programs: dict[Any, Program] = {}
        self._masked: set[Any] = set()  # kinds of batch that may be padded
        self._max_programs = max_programs
        self._in_flight = in_flight_on(placement.devices)
        several_cpus = placement.platform == "cpu" and placement.num_devices > 1
        self._aborts = recipe.donate and several_cpus

    def program(self, first: tuple[PyTree, ...], batch: PlacedBatch) -> Program:
        """The program for such a batch, compiled if it is the first of its kind.

        Args:
          first: The step's arguments before the batch's.
          batch: The batch.

        Returns:
          The `Program`.

        Raises:
          ValueError: The batch is of another kind than all before, and there may
            be no more; or it is padded and nothing reads ``tower.weight``.
        """
        program = self.programs.get(batch.signature)
        if program is not None:
            if batch.padded and batch.signature not in self._masked:
                self._refuse_unread_weight(batch, program.proof)
                self._masked.add(batch.signature)
            return program
        self._refuse_endless_kinds(batch)
        if self.placement.num_processes > 1:
            require_same(
                "The global batch",
                batch.fingerprint or repr(batch.signature),
                "A step takes the whole batch on every process and places its own"
                " towers' part. Give the input one seed, or feed each process a part of"
                " its own with strategy.distribute_dataset(lambda context: ...).",
            )
        args = (*first, *batch.args)
        proof, compile_it = prepare(self.recipe, self.placement, args)
        self._refuse_unread_weight(batch, proof)
        self.programs[batch.signature] = program = compile_it()
        return program

    def _refuse_unread_weight(self, batch: PlacedBatch, proof: Proof) -> None:
        if not batch.padded or self.recipe.counted is None:
            return
        if unmasked := proof.unmasked():
            raise ValueError(
                f"A batch of {min(batch.num_examples)} examples was padded, but"
                f" {', '.join(unmasked)} does not depend on tower.weight, so padding"
                " would count. Write tj.Weighted.mean(losses, tower.weight), or use"
                " remainder='drop' or 'error'."
            )

    def _refuse_endless_kinds(self, batch: PlacedBatch) -> None:
        if len(self.programs) < self._max_programs:
            return
        last = list(self.programs)[-1]
        raise ValueError(
            "The batch has changed since the step was compiled:\n"
            + explain_change(last, batch.signature)
            + "\nMake it like the first one (a smaller last batch is filled up under"
            " remainder='pad'; tj.batches(..., drop_remainder=True) leaves it out). If"
            " batches of several shapes are meant, build the step or the model with"
            f" max_programs=... (now {self._max_programs}): each shape compiles once."
        )

    def __call__(self, first: tuple[PyTree, ...], batch: PlacedBatch) -> Any:
        """The step's results.

        Args:
          first: The step's arguments before the batch's.
          batch: The batch.

        Returns:
          The results, as in the recipe.

        Raises:
          ValueError: As `program`; or an array is there twice that is donated.
        """
        program = self.programs.get(batch.signature)
        if program is None or (batch.padded and batch.signature not in self._masked):
            program = self.program(first, batch)
        if self._aborts:
            _refuse_twice(first[0])
        out = program.call(*first, *batch.args)
        self._in_flight.add(out[1:] or out)  # the first of several is donated
        return out


def _refuse_twice(donated: PyTree) -> None:
    """Raise where two leaves are one array.

    JAX does so by itself but on several CPU devices, where it aborts the process.
    """
    leaves = jax.tree.leaves(donated)
    if len(set(map(id, leaves))) == len(leaves):
        return
    seen: dict[int, str] = {}
    for name, leaf in named_leaves("", donated):
        if id(leaf) in seen:
            raise ValueError(
                f"{name} is the same array as {seen[id(leaf)]}, and one buffer cannot"
                " be donated twice. Make it a copy, jnp.copy(...), or say donate=False."
            )
        seen[id(leaf)] = name
