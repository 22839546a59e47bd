"""Prove and compile a step once for each kind of batch, and call its program."""

import contextlib
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr

from towerjax.collectives.reduce import take_first
from towerjax.collectives.sparse_rows import dense_shape, is_sparse
from towerjax.data.placer import PlacedBatch
from towerjax.data.shard import Signature, batch_signature, explain_change
from towerjax.mesh.devices import bound_in_flight
from towerjax.mesh.interrupt import InterruptGuard
from towerjax.mesh.placement import DEVICE_AXIS, Placement
from towerjax.mesh.private_jax import FoundNonFinite
from towerjax.mesh.processes import require_same
from towerjax.mesh.transfer import has_sharding, place_own, wait_on_cpus
from towerjax.step.proving import Proof, Proving, Recipe
from towerjax.towers import executors
from towerjax.types import Layout, PyTree, named_leaves
from towerjax.types.leaves import key_data, like_key, listed
from towerjax.types.warning import warn

_MOST_PROGRAMS = 8


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step: the executable, proof, recipe, trace, and how long it took."""

    call: Any
    proof: Proof
    recipe: Recipe
    jaxpr: Jaxpr
    seconds: float
    is_full: bool  # whether it takes all rows for examples


def prepare(
    recipe: Recipe,
    placement: Placement,
    args: tuple[PyTree, ...],
    *,
    full_rows: int | None = None,
) -> tuple[Proof, Callable[[], Program]]:
    """The proof of the step, and a function that compiles it.

    With ``full_rows`` it is for so many rows of each tower, all of them examples.
    """
    _require_jit()
    start = time.perf_counter()
    proving = Proving(placement, on_devices=True)
    given = dict(zip(recipe.in_layouts, args, strict=True))
    pairs, params = recipe.in_layouts.items(), given["state"]["params"]
    ins = {name: placement.shardings(x, given[name], params) for name, x in pairs}
    fn = functools.partial(recipe.fn, proving)
    jitted = jax.jit(
        fn if full_rows is None else _with_full_rows(fn, [*given], full_rows),
        in_shardings=tuple(ins.values()),
        out_shardings=_out_shardings(recipe, placement, ins["state"]),
        donate_argnums=(0,) if recipe.donate else (),
    )
    with _collector_paused():
        traced = jitted.trace(*executors.shapes_of(args))
    _refuse_stored_tracers(traced)
    proof = proving.proof(traced.jaxpr)

    def compile_it() -> Program:
        with _collector_paused():
            lowered = executors.lower_on_devices(traced, placement)
        if placement.num_processes > 1:
            require_same(
                "The step's program",
                executors.fingerprint_of_program(traced, lowered),
                "Loss, optimizer with its numbers, options and what functions close"
                " over must be the same on all.",
            )
        # An interrupt inside the compiler can kill the process (JAX 0.10).
        guard = InterruptGuard()
        with guard.installed(), guard:
            compiled = executors.compile_on_devices(lowered, placement)
        seconds = time.perf_counter() - start
        jaxpr = traced.jaxpr.jaxpr
        is_full = full_rows is not None
        return Program(compiled, proof, recipe, jaxpr, seconds, is_full)

    return proof, compile_it


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause Python's collector of cycles: a trace makes many objects, which all stay.

    It would look through all modules' objects for their sake, a tenth of a first call.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _with_full_rows(
    fn: functools.partial[PyTree], names: list[str], full_rows: int
) -> Callable[..., PyTree]:
    """The function with constant counts, from which XLA sees that all weights are 1."""
    at = names.index("num_valid")

    @functools.wraps(fn.func)
    def run(*args: PyTree) -> PyTree:
        counts = jnp.full_like(args[at], full_rows)
        return fn(*args[:at], counts, *args[at + 1 :])

    run.__wrapped__ = fn  # whose parameters name the program's
    return run


def _out_shardings(recipe: Recipe, placement: Placement, of_state: PyTree) -> PyTree:
    """The shardings of the results; the next state has those of the state."""
    state = recipe.in_layouts["state"]
    return jax.tree.map(
        lambda x: of_state if x is state else placement.sharding(x),
        recipe.out_layouts,
        is_leaf=lambda x: x is state,
    )


def _require_jit() -> None:
    """Raise under ``jax.disable_jit``, in which nothing can be compiled."""
    config: Any = jax.config  # whose options are not in the stub
    if config.jax_disable_jit:
        raise ValueError(
            "A step is one compiled program, and jax_disable_jit is set. Unset it; to"
            " see values write jax.debug.print('{}', x) in a tower function, and to"
            " stop there in a debugger jax.debug.breakpoint()."
        )


def admit(
    batch: PlacedBatch, seen: Sequence[Signature], max_programs: int | None
) -> Signature:
    """The batch's signature; raise where ``seen`` are as many as may compile."""
    towers = batch.counts.shape[-1]
    dense = functools.partial(_shape_over_towers, towers=towers)
    arrays = jax.tree.map(dense, batch.arrays, is_leaf=is_sparse)
    signature = batch_signature(arrays, batch.args[2])
    if not seen or signature in seen:
        return signature
    difference = explain_change(seen[-1], signature)
    change = f"The batch has changed since the step was compiled:\n{difference}\n"
    most = max_programs or _MOST_PROGRAMS
    if len(seen) >= most:
        raise ValueError(
            change + "Make it like the first one (a smaller last batch is filled up"
            " under remainder='pad'; tj.batches(..., drop_remainder=True) leaves it"
            " out). If batches of several shapes are meant, build the step or the"
            f" model with max_programs=... (now {most}): each shape compiles once."
        )
    if max_programs is None and len(seen) == 1:
        warn(
            change + f"It compiles anew, as up to {most} kinds of batch do, without a"
            " further warning. Give all batches one shape, or build the step or the"
            " model with max_programs=2 (or more), where they are meant."
        )
    return signature


def _shape_over_towers(x: Any, towers: int) -> Any:
    if not is_sparse(x):
        return x
    rows, *shape = dense_shape(x)  # rows of a tower, as it sees them
    return jax.ShapeDtypeStruct((towers * rows, *shape), jax.tree.leaves(x)[0].dtype)


@dataclasses.dataclass(frozen=True, eq=False)
class Runner:
    """The programs of a step: compiles one for each kind of batch, and calls it."""

    recipe: Recipe
    placement: Placement
    max_programs: int | None
    leaves_out_weights: bool  # where nothing is padded
    # A copy that ``dataclasses.replace`` makes has none yet; `admit` reads ``_seen``.
    programs: dict[Any, Program] = dataclasses.field(default_factory=dict, init=False)
    _seen: list[Signature] = dataclasses.field(default_factory=list, init=False)

    @functools.cached_property
    def _on_cpus(self) -> bool:
        return self.placement.platform == "cpu" and len(self.placement.devices) > 1

    def program(self, first: tuple[PyTree, ...], batch: PlacedBatch) -> Program:
        """The program for such a batch, compiled if it is the first of its kind."""
        program = self.programs.get(batch.signature)
        if program is not None and not (program.is_full and batch.padded):
            refuse_unread_weight(batch, program.proof)
            return program
        signature = admit(batch, self._seen, self.max_programs)
        if self.placement.num_processes > 1:
            require_same(
                "The global batch",
                batch.fingerprint or repr(batch.signature),
                "A step takes the whole batch on every process and places its own"
                " towers' part. Give the input one seed, or feed each process a part of"
                " its own with strategy.distribute_dataset(lambda context: ...).",
            )
        args = (*first, *batch.args)
        is_full = self.leaves_out_weights and not (batch.may_pad or batch.padded)
        full_rows = batch.rows if is_full else None
        proof, compile_it = prepare(
            self.recipe, self.placement, args, full_rows=full_rows
        )
        refuse_unread_weight(batch, proof)
        if signature not in self._seen:
            self._seen.append(signature)
        self.programs[batch.signature] = program = compile_it()
        return program

    def trace(self, first: tuple[PyTree, ...], batch: PlacedBatch) -> Any:
        """The results in a trace, as a part of another program."""
        _refuse_devices_in_tower(self.placement)
        run = Proving(self.placement, on_devices=True)
        args = (*first, *batch.args)
        out = self.recipe.fn(run, *args)
        refuse_unread_weight(batch, run.prove(self.recipe, args))
        return out

    def __call__(self, first: tuple[PyTree, ...], batch: PlacedBatch) -> Any:
        """The results of the program for this batch."""
        program, batch = self.program(first, batch), send_shared(batch)
        if self.recipe.donate and self._on_cpus:
            _refuse_donated_twice(first[0], batch.args[2])
        try:
            out = program.call(*first, *batch.args)
        except (RuntimeError, ValueError):
            known = self._on_cpus or not self.recipe.donate
            donated = () if known else jax.tree.leaves(first[0])
            # If all are deleted, the devices failed after they had taken the state.
            if not all(x.is_deleted() for x in donated):
                _refuse_donated_twice(first[0], batch.args[2])
            raise
        except FoundNonFinite as error:
            raise FloatingPointError(
                f"jax_debug_{error.ty}s found {error.ty} in what a step returned. With"
                " one = tj.testing.one_tower(step) of a train step,"
                " jax.jit(one.fn)(one.init(params), batch) names the operation. Without"
                " it the step itself refuses a loss that is not finite, and"
                " step.locate(state, batch) names towers and leaves."
            ) from None
        if self._on_cpus:  # the next call may donate out[0]
            bound_in_flight(self.placement.devices, *out[1:], out[0])
        return out


def _refuse_devices_in_tower(placement: Placement) -> None:
    """Raise if a step of several devices is traced in a tower, which has one."""
    if placement.num_devices > 1 and executors.is_inside_tower():
        raise ValueError(
            f"A step of {placement.num_devices} devices is called in a tower, which"
            " runs on one device. Build the inner step for one,"
            f" tj.Mirrored(devices={placement.devices[:1]}, towers="
            f"{placement.num_towers}); it is given the tower's own rows."
        )


def send_shared(batch: PlacedBatch) -> PlacedBatch:
    """The batch with the first process's values of what each one holds on its host."""
    placement, layout = batch.placement, Layout.MIRRORED
    if placement.num_processes == 1:
        return batch
    leaves, treedef = jax.tree.flatten(batch.args[2])
    own = {
        i: place_own(x, placement, layout)
        for i, x in enumerate(leaves)
        if not has_sharding(x, placement.sharding(layout))
    }
    if not own:
        return batch
    for i, x in wait_on_cpus(_first_of(own, placement)).items():
        leaves[i] = x
    args = (*batch.args[:2], treedef.unflatten(leaves), *batch.args[3:])
    return dataclasses.replace(batch, args=args)


@functools.partial(jax.jit, static_argnums=1)
def _first_of(values: PyTree, placement: Placement) -> PyTree:
    """The first device's copies, on all."""

    def of_device(values: PyTree) -> PyTree:
        number = jax.lax.axis_index(DEVICE_AXIS)
        return jax.tree.map(lambda x: take_first(x, number, (DEVICE_AXIS,)), values)

    layout = Layout.MIRRORED
    first = executors.over_devices(of_device, placement, (layout,), layout)
    return jax.tree.map(like_key, first(jax.tree.map(key_data, values)), values)


def _refuse_stored_tracers(traced: Any) -> None:
    """Raise if a function of the step reads a tracer that another one has stored."""
    found = traced.jaxpr.in_avals  # stored tracers come first, as further inputs
    if kept := found[: len(found) - len(jax.tree.leaves(traced.in_avals))]:
        raise ValueError(
            "A value that one function of the step has computed,"
            f" {listed(map(str, kept))}, is read by another from where it was put"
            " aside, such as a global or an attribute. Return it from the tower, as"
            " tj.Weighted, tj.Sum, tj.Rows or tj.PerTower: the next pass and update_fn"
            " are given what was merged."
        )


def refuse_unread_weight(batch: PlacedBatch, proof: Proof) -> None:
    """Raise if padded rows would count in a sum."""
    if batch.padded and (found := proof.unmasked()):
        unmasked = sorted(found, key=len)  # so that losses come before gradients
        shown = ", ".join(unmasked[:8]) + " ..." * (len(unmasked) > 8)
        number = min(batch.num_examples)
        raise ValueError(
            f"A batch of {number} examples was padded, but {shown} does not"
            " depend on tower.weight, so padding would count. Write tj.Weighted.mean("
            "losses, tower.weight), tj.Sum(tower.weight @ values), tj.Rows({'x': x,"
            " 'weight': tower.weight}), tower.all_gather((x, tower.weight)), and"
            " other collectives alike, TowerBatchNorm in place of another batch norm,"
            " or use remainder='drop' or 'error'."
        )


def _refuse_donated_twice(donated: PyTree, shared: PyTree) -> None:
    """Raise if two leaves are one array, or a leaf was donated before.

    JAX raises without a name; on several CPU devices it aborts the process.
    """
    leaves = jax.tree.leaves((donated, shared))
    if any([x.is_deleted() for x in leaves if hasattr(x, "is_deleted")]):
        raise ValueError("An array was donated to an earlier step.")
    if len(set(map(id, leaves))) == len(leaves):
        return
    seen: dict[int, str] = {}
    pairs = [*named_leaves("", donated), *named_leaves("tj.Whole", shared)]
    for name, leaf in pairs:
        if id(leaf) in seen:
            raise ValueError(
                f"{name} is the same array as {seen[id(leaf)]}, and one buffer cannot"
                " be donated twice. Make it a copy, jnp.copy(...), or say donate=False."
            )
        seen[id(leaf)] = name
