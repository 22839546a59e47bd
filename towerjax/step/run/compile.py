"""Compile a plan: trace it, prove it, lower it to the devices."""

import contextlib
import dataclasses
import functools
import gc
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from towerjax.jaxprs.flops import Flops
from towerjax.lowering import xla
from towerjax.mesh.interrupt import uninterrupted
from towerjax.mesh.placement import Placement
from towerjax.step.plan import Plan
from towerjax.step.run.prove import Proof
from towerjax.step.run.step_flags import next_step_flag
from towerjax.step.run.trace import Traced, trace
from towerjax.step.state.train_state import TrainState, join_state
from towerjax.towers import executors
from towerjax.types import Layout, PyTree
from towerjax.types.refusals import listed


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step: the executable, its trace, and how long both took to make."""

    call: Any  # a `jax.stages.Compiled`; Any, since JAX's stub types its texts as None
    traced: Traced
    seconds: float
    is_full: bool  # whether it takes all rows for examples
    # The numbers of examples for which the checks have passed on a batch of this shape.
    checked_for: set[int] = dataclasses.field(default_factory=set, init=False)

    @property
    def plan(self) -> Plan:
        """The plan that it was compiled from."""
        return self.traced.plan

    @property
    def proof(self) -> Proof:
        """The proof of the plan."""
        return self.traced.proof

    @functools.cached_property
    def flops(self) -> Flops:
        """The arithmetic of one step, of all towers."""
        return self.traced.flops

    @property
    def state(self) -> TrainState:
        """The shapes of the state that it was compiled for."""
        return join_state(*self.call.args_info[0][:2])


def lower(
    traced: Traced,
    placement: Placement,
    *,
    full_rows: int | None = None,
) -> jax.stages.Lowered:
    """Lower the traced step to its devices.

    ``full_rows`` is the number of rows of each tower if all of them are examples, and
    None if some may be padding. A training program takes the step flag of the call
    before as its last argument.
    """
    plan = traced.plan
    args = traced.args
    in_shardings = _in_shardings(traced, placement)
    if plan.gives_step_flag:
        in_shardings["step_flag"] = placement.sharding(Layout.MIRRORED)
        args = (*args, jax.ShapeDtypeStruct((), jnp.int32))

    def sharding_of(out: str | Layout) -> PyTree:
        return in_shardings[out] if isinstance(out, str) else placement.sharding(out)

    jitted = jax.jit(
        _step_of(traced, [*in_shardings], full_rows),
        in_shardings=tuple(in_shardings.values()),
        out_shardings=jax.tree.map(sharding_of, traced.outs),
        donate_argnums=(0,) if plan.donates else (),
    )
    in_trace = jitted.trace(*args)
    lowered = xla.lower_on_devices(in_trace, placement)
    if placement.num_processes > 1:
        placement.processes.require_same(
            "The step's options",
            f"{plan.options}",
            "Build the step with the same options on all processes.",
        )
        placement.processes.require_same(
            "The step's program",
            executors.fingerprint_of_program(in_trace, lowered),
            "Give all processes the same loss, the same optimizer with the same"
            " numbers, the same options, and the same values in what functions close"
            " over.",
        )
    return lowered


def _in_shardings(traced: Traced, placement: Placement) -> dict[str, PyTree]:
    """Find the shardings of each argument, by the argument's name."""
    params = traced.args[0]["params"]
    named = zip(traced.plan.ins.items(), traced.args, strict=True)
    return {
        name: placement.shardings(layouts, arg, params)
        for (name, layouts), arg in named
    }


def compile_step(
    plan: Plan,
    placement: Placement,
    args: tuple[PyTree, ...],
    *,
    full_rows: int | None = None,
    before_first: Callable[[Traced], None] | None = None,
) -> Program:
    """Trace, prove, lower and compile the step.

    ``before_first`` gets the traced step before it is compiled, and may refuse it.
    """
    require_jit()
    start = time.perf_counter()
    with collector_paused():
        traced = trace(plan, args)
        _refuse_stored_tracers(traced)
        _ = traced.proof  # raises if the proof fails
    if before_first is not None:
        begun = time.perf_counter()
        before_first(traced)
        start += time.perf_counter() - begun
    with collector_paused():
        lowered = lower(traced, placement, full_rows=full_rows)
    # An interrupt inside the compiler can kill the process (JAX 0.10).
    compile_it = functools.partial(xla.compile_on_devices, lowered, placement)
    compiled = uninterrupted(compile_it)
    seconds = time.perf_counter() - start
    return Program(compiled, traced, seconds, full_rows is not None)


def inline(
    plan: Plan,
    placement: Placement,
    args: tuple[PyTree, ...],
    *,
    before_first: Callable[[Traced], None] | None = None,
) -> tuple[PyTree, Traced]:
    """Trace a step as a part of another program; return its results and its trace."""
    if placement.num_devices > 1 and executors.is_inside_tower():
        raise ValueError(
            f"A step of {placement.num_devices} devices is called in a tower, which"
            " runs on one device. Build the inner step for one device, with"
            f" tj.Mirrored(devices={placement.devices[:1]}, towers="
            f"{placement.num_towers}). It is given the tower's own rows."
        )
    traced = trace(plan, args)
    _ = traced.proof  # raises if the proof fails
    if before_first is not None:
        before_first(traced)
    return traced(*args), traced


def _step_of(
    traced: Traced, names: Sequence[str], full_rows: int | None
) -> Callable[..., PyTree]:
    """Build the function to compile, whose arguments have readable ``names``.

    With ``full_rows`` each tower has this constant number of examples.
    """
    at = [*traced.plan.ins].index("num_valid")

    def step(*args: PyTree) -> PyTree:
        operands = [*args]
        before = None
        if traced.plan.gives_step_flag:
            *operands, before = args
        if full_rows is not None:  # XLA then sees that all weights are 1
            operands[at] = jnp.full_like(operands[at], full_rows)
        out: Any = traced(*operands)
        if before is None:
            return out
        return out._replace(step_flag=next_step_flag(before, out.step_flag))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in names]
    step.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return step


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause Python's garbage collector within a ``with`` block, or in a function.

    A trace makes many objects, and all of them stay alive. In search of garbage, Python
    would visit them and the objects of all modules again and again, which takes a tenth
    of a first call, and a fifth of a check.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def require_jit() -> None:
    """Raise under ``jax.disable_jit``, in which nothing can be compiled."""
    config: Any = jax.config  # the stub lacks its options
    if config.jax_disable_jit:
        raise ValueError(
            "A step cannot run while jax_disable_jit is set, because it is one compiled"
            " program. Unset jax_disable_jit. To see values in a tower function, write"
            " jax.debug.print('{}', x); to stop there in a debugger, write"
            " jax.debug.breakpoint()."
        )


def _refuse_stored_tracers(traced: Traced) -> None:
    """Raise if a function of the step reads a tracer that another function stored."""
    consts = [x.towers.jaxpr.consts for x in traced.passes], traced.finish.consts
    if tracers := [x for x in jax.tree.leaves(consts) if isinstance(x, Tracer)]:
        raise ValueError(
            "A value that one function of the step has computed,"
            f" {listed([str(x.aval) for x in tracers])}, is read by another, although"
            " the tower did not return it: it was put aside, such as in a global or an"
            " attribute. Return it from the tower, as tj.Weighted, tj.Sum, tj.Rows or"
            " tj.PerTower. The next pass and update_fn are given the merged value. If"
            " the rule of a jax.custom_vjp closes over it, make it an argument of the"
            " function."
        )
