"""Is everything that is declared MIRRORED the same on every tower?"""

from collections.abc import Sequence

from towerjax.proof.analysis import Analysis

_DIFFERING = "These outputs must be the same on every tower, but are not:"
_REDUCE = """Return tj.Weighted(sum, weight), or tower.reduce(tj.Reduction.MEAN, value),
or keep it per tower in TowerOutput(local=...)."""
_HANGING = "Only some towers reach these collectives, so devices would hang:"
_AGREE = """Make the predicate the same on all towers with tower.reduce, or move the
merge_call or reduction out of the cond or while."""


class ReplicationError(ValueError):
    """A value declared MIRRORED differs between towers, or a collective would hang."""


def prove_mirrored(
    analysis: Analysis, names: Sequence[str | None], *, advice: str | None = None
) -> None:
    """Nothing, when every output declared MIRRORED is proved so and nothing hangs.

    Args:
        analysis: the result of `analyse`.
        names: for each output, its name when it is declared MIRRORED, else None.
        advice: what to do about outputs that differ; None says the usual.

    Raises:
        ReplicationError: lists every output that differs and every hang, with lines.
        ValueError: `names` is longer or shorter than the outputs.
    """
    differing = [
        f"  - {name} depends on {d.source} and is not reduced over all towers; it is "
        + (f"made at {d.line}" if d.line else "returned as it came in")
        for name, d in zip(names, analysis.outputs, strict=True)
        if name is not None and d is not None
    ]
    hanging = [
        f"  - {hang.primitive} at {hang.line}, under the {hang.control} at "
        f"{hang.control_line}, whose predicate differs from tower to tower"
        for hang in analysis.hangs
    ]
    text = differing and [_DIFFERING, *differing, advice or _REDUCE]
    text += hanging and [_HANGING, *hanging, _AGREE]
    if text:
        raise ReplicationError("\n".join(text))
