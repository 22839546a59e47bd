"""Record where a run is, and go on from there, on these or on other devices."""

from typing import Literal

from towerjax.data.stream import Position, Source
from towerjax.loop.checkpoint import record
from towerjax.loop.checkpoint.folder import CheckpointError
from towerjax.loop.checkpoint.record import CheckpointRecord
from towerjax.loop.stopping import Point
from towerjax.step.state.train_state import TrainState
from towerjax.step.step import Step

Resume = Literal["cursor", "count", "anew"]


def record_of(step: Step, point: Point, source: Source) -> CheckpointRecord:
    """Record a run's state and its position in the batches."""
    strategy = step.strategy
    last = source.last
    return CheckpointRecord(
        step=point.number,
        strategy=repr(strategy),
        towers=strategy.placement.num_towers,
        devices=strategy.placement.devices,
        leaves=tuple(record.leaves_of(point.state)),
        batches={"used": last.used, "cursor": record.encode_cursor(last.cursor)},
        batch_rows=tuple(sorted(step.placer.batch_rows)),
        evaluation_due=point.is_evaluation_due,
        stopping={name: {**x} for name, x in point.watch.values.items()},
        versions=record.library_versions(),
    )


def go_on(
    step: Step,
    point: Point,
    source: Source,
    state: TrainState,
    saved: CheckpointRecord,
    batches: Resume = "cursor",
) -> None:
    """Move a run to a state that lies on its devices, and to the record of that state.

    ``batches`` says how the position in the batches is found, as in a `Checkpointer`.
    """
    point.state = state
    point.number = saved.step
    point.is_evaluation_due = saved.evaluation_due
    point.watch.go_on(saved.stopping)
    step.placer.expect(saved.batch_rows, told=True)
    used = saved.batches["used"]
    cursor = saved.batches["cursor"]
    if batches == "anew":
        return
    has_cursor = source.has_cursor
    if batches == "cursor" and has_cursor != (cursor is not None):
        here, there = ("have", "did not") if has_cursor else ("lack", "had them")
        raise CheckpointError(
            f"These batches {here} get_state and set_state, but the batches of the"
            f" checkpoint of step {saved.step} {there}. Pass batches like those, or"
            f" write batches='count' to skip the first {used} batches."
        )
    uses_cursor = batches == "cursor" and has_cursor
    cursor = record.decode_cursor(cursor) if uses_cursor else None
    source.go_to(Position(used, cursor))
