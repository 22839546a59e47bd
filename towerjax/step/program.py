"""When is a step proved and compiled? Once for each kind of batch, then only called."""

import dataclasses
import functools
import hashlib
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr

from towerjax.data.kinds import Kinds
from towerjax.data.placer import PlacedBatch
from towerjax.mesh.devices import in_flight_on
from towerjax.mesh.interrupt import InterruptGuard
from towerjax.mesh.placement import Placement
from towerjax.mesh.private_jax import FoundNonFinite
from towerjax.mesh.processes import require_same
from towerjax.proof.equation import arrays_in
from towerjax.step.proving import Proof, Proving, Recipe
from towerjax.towers.executors import compile_on_devices, lower_on_devices, shapes_of
from towerjax.types import PyTree, named_leaves
from towerjax.types.leaves import key_data, listed


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step: the executable, proof, recipe, trace, and how long it took."""

    call: Any
    proof: Proof
    recipe: Recipe
    jaxpr: Jaxpr
    seconds: float


def prepare(
    recipe: Recipe, placement: Placement, args: tuple[PyTree, ...]
) -> tuple[Proof, Callable[[], Program]]:
    """The step proved, and a function that compiles it."""
    _require_jit()
    start = time.perf_counter()
    proving = Proving(placement, on_devices=True)
    given = dict(zip(recipe.in_layouts, args, strict=True))
    ins = {
        name: placement.shardings(layout, given[name])
        for name, layout in recipe.in_layouts.items()
    }
    outs = jax.tree.map(placement.sharding, {**recipe.out_layouts, "state": ()})
    # The next state lies as the state does, leaf by leaf.
    outs["state"] = ins.get("state")
    jitted = jax.jit(
        functools.partial(recipe.fn, proving),
        in_shardings=tuple(ins.values()),
        out_shardings=tuple(outs[name] for name in recipe.out_layouts),
        donate_argnums=(0,) if recipe.donate else (),
    )
    traced = jitted.trace(*shapes_of(args))
    _refuse_put_aside(traced)
    proof = proving.proof()

    def compile_it() -> Program:
        lowered = lower_on_devices(traced, placement)
        if placement.num_processes > 1:
            require_same(
                "The step's program",
                _fingerprint(traced, lowered),
                "Loss, optimizer with its numbers, options and what functions close"
                " over must be the same on all.",
            )
        # An interrupt inside the compiler can end the process (JAX 0.10).
        guard = InterruptGuard()
        with guard.installed(), guard:
            compiled = compile_on_devices(lowered, placement)
        seconds = time.perf_counter() - start
        return Program(compiled, proof, recipe, traced.jaxpr.jaxpr, seconds)

    return proof, compile_it


def _require_jit() -> None:
    """Raise under ``jax.disable_jit``, in which nothing can be compiled."""
    config: Any = jax.config  # whose options are not in the stub
    if config.jax_disable_jit:
        raise ValueError(
            "A step is one compiled program, and jax_disable_jit is set. Unset it; to"
            " see values write jax.debug.print in a tower function, and to go through"
            " a step line by line call tj.testing.one_tower."
        )


def _fingerprint(traced: Any, lowered: Any) -> str:
    """The program, with what is in the arrays that its text calls arguments."""
    digest = hashlib.sha256()
    for array in arrays_in(traced.jaxpr):
        array = key_data(array)
        # An array over several processes is one already.
        if getattr(array, "is_fully_addressable", True) or array.is_fully_replicated:
            digest.update(np.asarray(array).tobytes())
    return f"{lowered.as_text()}{digest.hexdigest()}"


class Runner:
    """A step's programs: finds the one for a batch, and makes it the first time."""

    def __init__(
        self, recipe: Recipe, placement: Placement, *, max_programs: int | None
    ) -> None:
        self.recipe, self.placement = recipe, placement
        self.programs: dict[Any, Program] = {}
        self._masked: set[Any] = set()  # kinds of batch that may be padded
        self._kinds = Kinds(max_programs)
        self._in_flight = in_flight_on(placement.devices)
        several_cpus = placement.platform == "cpu" and placement.num_devices > 1
        self._aborts = recipe.donate and several_cpus

    def program(self, first: tuple[PyTree, ...], batch: PlacedBatch) -> Program:
        """The program for such a batch, compiled if it is the first of its kind."""
        program = self.programs.get(batch.signature)
        if program is not None:
            if batch.padded and batch.signature not in self._masked:
                refuse_unread_weight(min(batch.num_examples), program.proof)
                self._masked.add(batch.signature)
            return program
        kind = self._kinds.allowed(batch)
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
        if batch.padded:
            refuse_unread_weight(min(batch.num_examples), proof)
        self._kinds.seen[kind] = None
        self.programs[batch.signature] = program = compile_it()
        return program

    def __call__(self, first: tuple[PyTree, ...], batch: PlacedBatch) -> Any:
        """The step's results."""
        program = self.program(first, batch)
        donated = first[0], batch.args[2]
        if self._aborts:
            _refuse_donated_twice(*donated)
        try:
            out = program.call(*first, *batch.args)
        except (RuntimeError, ValueError):
            if self.recipe.donate:
                _refuse_donated_twice(*donated)
            raise
        except FoundNonFinite as error:
            raise FloatingPointError(
                f"jax_debug_{error.ty}s found {error.ty} in what a step returned. With"
                " one = tj.testing.one_tower(step) of a train step,"
                " jax.jit(one.fn)(one.init(params), batch) names the operation. Without"
                " it the step itself refuses a loss that is not finite, and"
                " step.locate(state, batch) names towers and leaves."
            ) from None
        self._in_flight.add(*out[1:], out[0])  # the first of several is donated
        return out


def _refuse_put_aside(traced: Any) -> None:
    """Raise where a function reads what another has put aside while it was traced."""
    found = traced.jaxpr.in_avals  # what was put aside comes first, as further inputs
    if kept := found[: len(found) - len(jax.tree.leaves(traced.in_avals))]:
        raise ValueError(
            "A value that one function of the step has computed,"
            f" {listed(map(str, kept))}, is read by another from where it was put"
            " aside, such as a global or an attribute. Return it from the tower, as"
            " tj.Weighted, tj.Sum, tj.Rows or tj.PerTower: the next pass and update_fn"
            " are given what was merged."
        )


def refuse_unread_weight(num_examples: int, proof: Proof) -> None:
    """Raise where padded rows would count."""
    if unmasked := proof.unmasked():
        unmasked.sort(key=len)  # so that losses come before gradients
        shown = ", ".join(unmasked[:8]) + " ..." * (len(unmasked) > 8)
        raise ValueError(
            f"A batch of {num_examples} examples was padded, but {shown} does not"
            " depend on tower.weight, so padding would count. Write tj.Weighted.mean("
            "losses, tower.weight), tj.Sum(tower.weight @ values), tj.Rows({'x': x,"
            " 'weight': tower.weight}), tower.all_gather((x, tower.weight)), or use"
            " remainder='drop' or 'error'."
        )


def _refuse_donated_twice(donated: PyTree, shared: PyTree) -> None:
    """Raise where two leaves are one array, or one was donated before.

    JAX does so by itself, without a name; on several CPU devices it aborts the process.
    """
    leaves = jax.tree.leaves((donated, shared))
    if any([x.is_deleted() for x in leaves if hasattr(x, "is_deleted")]):
        raise ValueError("An array was donated to an earlier step.")
    if len(set(map(id, leaves))) == len(leaves):
        return
    seen: dict[int, str] = {}
    pairs = [*named_leaves("", donated), *named_leaves("tj.Shared", shared)]
    for name, leaf in pairs:
        if id(leaf) in seen:
            raise ValueError(
                f"{name} is the same array as {seen[id(leaf)]}, and one buffer cannot"
                " be donated twice. Make it a copy, jnp.copy(...), or say donate=False."
            )
        seen[id(leaf)] = name
