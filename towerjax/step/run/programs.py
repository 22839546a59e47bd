"""The compiled programs of a step: one for each kind of batch."""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence

import jax

from towerjax.collectives.reduce import take_first
from towerjax.collectives.sparse_rows import dense_shape, is_sparse
from towerjax.data.batch_rows import Signature, batch_signature, explain_change
from towerjax.data.placer import PlacedBatch
from towerjax.jaxprs.tags import DEVICE_AXIS
from towerjax.mesh.devices import bound_in_flight, one_thread_at_a_time
from towerjax.mesh.placement import Placement
from towerjax.mesh.private_jax import FoundNonFinite
from towerjax.mesh.processes import begun
from towerjax.mesh.transfer import has_sharding, place_own, wait_on_cpus
from towerjax.step.plan import Plan
from towerjax.step.run.compile import Program, compile_step, inline, require_jit
from towerjax.step.run.masks import refuse_unmasked
from towerjax.step.run.trace import Traced
from towerjax.step.state.checks import refuse_donated_twice
from towerjax.towers import executors
from towerjax.types import Layout, PyTree
from towerjax.types.boundary import warn
from towerjax.types.trees import key_data, like_key

_MOST_PROGRAMS = 8


def admit(
    batch: PlacedBatch, seen: Sequence[Signature], max_programs: int | None
) -> Signature:
    """Take the batch's signature; refuse a new one if ``max_programs`` exist.

    ``seen`` are the signatures of the batches that have a program.
    """

    def dense(x: PyTree) -> PyTree:
        if not is_sparse(x):
            return x
        rows, *shape = dense_shape(x)  # the rows that one tower sees
        shape = (len(batch.counts) * rows, *shape)
        dtype = jax.tree.leaves(x)[0].dtype
        return jax.ShapeDtypeStruct(shape, dtype)

    arrays = jax.tree.map(dense, batch.arrays, is_leaf=is_sparse)
    signature = batch_signature(arrays, batch.args[2])
    if not seen or signature in seen:
        return signature
    difference = explain_change(seen[-1], signature)
    change = f"The batch has changed since the step was compiled:\n{difference}\n"
    most = max_programs or _MOST_PROGRAMS
    if len(seen) >= most:
        raise ValueError(
            change + "Give all batches the shapes of the first one: remainder='pad'"
            " fills up a smaller last batch, and tj.batches(..., drop_remainder=True)"
            " leaves it out. If batches of several shapes are meant, build the step or"
            f" the model with max_programs=... (now {most}). Each shape compiles once."
        )
    if max_programs is None and len(seen) == 1:
        warn(
            change + "The step compiles anew. It does so for up to"
            f" {most} kinds of batch, without a further warning. Give all batches one"
            " shape. If several shapes are meant, build the step or the model with"
            " max_programs=2 (or more)."
        )
    return signature


@dataclasses.dataclass(frozen=True, eq=False)
class Programs:
    """The programs of a plan; one program is compiled for each kind of batch."""

    plan: Plan
    placement: Placement
    max_programs: int | None
    leaves_out_weights: bool  # a program for full batches has no weights
    # Not an argument, so that a copy by ``dataclasses.replace`` starts without
    # programs.
    compiled: dict[tuple[Signature, Hashable], Program] = dataclasses.field(
        default_factory=dict, init=False
    )
    # For each kind of state: the signatures of the batches so far.
    _seen: dict[Hashable, list[Signature]] = dataclasses.field(
        default_factory=dict, init=False
    )

    @functools.cached_property
    def _on_cpus(self) -> bool:
        return self.placement.platform == "cpu" and len(self.placement.devices) > 1

    @property
    def last(self) -> Program | None:
        """The program that was compiled last; None if there is none yet."""
        return next(reversed(self.compiled.values()), None)

    def known(self, batch: PlacedBatch, kind: Hashable) -> Program | None:
        """Find the program for a batch of this signature; None if none exists."""
        return self.compiled.get((batch.signature, kind))

    def program(
        self,
        first: tuple[PyTree, ...],
        batch: PlacedBatch,
        kind: Hashable = None,
        before_first: Callable[[Traced], None] | None = None,
    ) -> Program:
        """Find the program for a batch of this signature; compile it at first use.

        ``before_first`` gets the traced step before it is compiled, and may refuse it.
        """
        key = batch.signature, kind
        program = self.compiled.get(key)
        if program is not None and not (program.is_full and batch.padded):
            if batch.padded:
                refuse_unmasked(batch.num_examples, program.traced.proof.unmasked())
            return program
        seen = self._seen.setdefault(kind, [])
        signature = admit(batch, seen, self.max_programs)
        if self.placement.num_processes > 1:
            self.placement.processes.require_same(
                "The global batch",
                batch.fingerprint or repr(batch.signature),
                "A step takes the whole batch on every process and places its own"
                " towers' part. Give the input one seed, or feed each process a part of"
                " its own with strategy.distribute_dataset(lambda context: ...).",
            )
        is_full = self.leaves_out_weights and not (batch.may_pad or batch.padded)

        def check(traced: Traced) -> None:
            if batch.padded:
                refuse_unmasked(batch.num_examples, traced.proof.unmasked())
            if before_first is not None:
                before_first(traced)

        self.compiled[key] = compile_step(
            self.plan,
            self.placement,
            (*first, *batch.args),
            full_rows=batch.rows if is_full else None,
            before_first=check,
        )
        if signature not in seen:
            seen.append(signature)
        if before_first is not None:
            self.compiled[key].checked_for.add(batch.num_examples)
        return self.compiled[key]

    def trace(
        self,
        first: tuple[PyTree, ...],
        batch: PlacedBatch,
        before_first: Callable[[Traced], None] | None = None,
    ) -> PyTree:
        """Trace the step as a part of another program."""
        args = (*first, *batch.args)
        out, traced = inline(self.plan, self.placement, args, before_first=before_first)
        if batch.padded:
            refuse_unmasked(batch.num_examples, traced.proof.unmasked())
        return out

    def __call__(
        self,
        program: Program,
        first: tuple[PyTree, ...],
        batch: PlacedBatch,
        *step_flag: jax.Array,
    ) -> PyTree:
        """Run one of the programs on a batch, and return its results."""
        is_joint = self._is_joint
        begun.calls += is_joint
        begun.steps += is_joint
        try:
            if not self._on_cpus:
                return self._call(program, first, batch, *step_flag)
            devices = self.placement.devices
            with one_thread_at_a_time(devices):
                out = self._call(program, first, batch, *step_flag)
                # The next call may donate ``out[0]``, so the other results are waited
                # for first.
                bound_in_flight(devices, *out[1:], out[0])
            return out
        except BaseException:  # the call may be repeated
            begun.calls -= is_joint
            begun.steps -= is_joint
            raise

    @functools.cached_property
    def _is_joint(self) -> bool:
        """Whether all processes of the job make the calls."""
        return self.placement.num_processes == jax.process_count()

    def _call(
        self,
        program: Program,
        first: tuple[PyTree, ...],
        batch: PlacedBatch,
        *step_flag: jax.Array,
    ) -> PyTree:
        batch = send_replicated(batch)
        donates = self.plan.donates
        if donates and self._on_cpus:
            refuse_donated_twice(first[0], batch.args[2])
        try:
            return program.call(*first, *batch.args, *step_flag)
        except (RuntimeError, ValueError):
            require_jit()
            known = self._on_cpus or not donates
            donated = () if known else jax.tree.leaves(first[0])
            # If all leaves are deleted, the program had already taken the state when
            # the devices failed. Otherwise the cause may be an array that was donated
            # twice.
            if not all(x.is_deleted() for x in donated):
                refuse_donated_twice(first[0], batch.args[2])
            raise
        except FoundNonFinite as error:
            raise FloatingPointError(
                f"jax_debug_{error.ty}s found {error.ty} in a result of a step. To find"
                " the operation, run a train step on one tower: one ="
                " tj.testing.one_tower(step), then jax.jit(one.fn)(one.init(params),"
                f" batch). Without jax_debug_{error.ty}s the step itself refuses a loss"
                " that is not finite, and step.locate(state, batch) names towers and"
                " leaves."
            ) from None


def send_replicated(batch: PlacedBatch) -> PlacedBatch:
    """Replace the batch's replicated leaves by those of the first process.

    Leaves that are already on devices stay as they are.
    """
    placement = batch.placement
    layout = Layout.MIRRORED
    if placement.num_processes == 1:
        return batch
    leaves, treedef = jax.tree.flatten(batch.args[2])
    here = {
        i: place_own(x, placement, layout)
        for i, x in enumerate(leaves)
        if not has_sharding(x, placement.sharding(layout))
    }
    if not here:
        return batch
    for i, x in wait_on_cpus(_first_of(here, placement)).items():
        leaves[i] = x
    args = (*batch.args[:2], treedef.unflatten(leaves))
    return dataclasses.replace(batch, args=args)


@functools.partial(jax.jit, static_argnums=1)
def _first_of(values: PyTree, placement: Placement) -> PyTree:
    """Copy the first device's values to all devices."""

    def of_device(values: PyTree) -> PyTree:
        number = jax.lax.axis_index(DEVICE_AXIS)
        return jax.tree.map(lambda x: take_first(x, number, (DEVICE_AXIS,)), values)

    layout = Layout.MIRRORED
    first = executors.over_devices(of_device, placement, (layout,), layout)
    return jax.tree.map(like_key, first(jax.tree.map(key_data, values)), values)
