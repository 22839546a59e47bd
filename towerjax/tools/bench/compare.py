"""Is it faster than before? A verdict only where the intervals part."""

import dataclasses
import enum
from collections.abc import Sequence

from towerjax.tools.bench.grid import Trial
from towerjax.tools.bench.protocol import Interval
from towerjax.tools.bench.results import Result


class Verdict(enum.Enum):
    """What two results of one trial say."""

    FASTER = "faster"
    SLOWER = "slower"
    OPEN = "intervals overlap"
    NEWLY_FAILED = "failed, and did not before"
    NEWLY_OK = "ok, and was not before"
    STILL_NOT_OK = "not ok, as before"
    ONLY_OLD = "only in the old results"
    ONLY_NEW = "only in the new results"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two results of one trial.

    Attributes:
      trial: What was measured.
      verdict: What they say.
      ratio: The new step time over the old one; its ends are as far apart as both
        intervals allow. None where one of them has no time.
    """

    trial: Trial
    verdict: Verdict
    ratio: Interval | None = None

    @property
    def is_worse(self) -> bool:
        """Slower, or failed and did not before?"""
        return self.verdict in (Verdict.SLOWER, Verdict.NEWLY_FAILED)


def compare(old: Sequence[Result], new: Sequence[Result]) -> list[Comparison]:
    """Each trial's new step time against its old one.

    Args:
      old: Such as ``read_results("old.jsonl")``.
      new: The results to judge.

    Returns:
      One `Comparison` for each trial of either, the new ones first.

    Example:
      >>> step = {"median": 1.0, "low": 0.9, "high": 1.1}
      >>> slow = {"median": 1.5, "low": 1.2, "high": 1.6}
      >>> trial = Trial("mlp", 64)
      >>> old = Result(trial, "ok", {"step_s": step})
      >>> [found] = compare([old], [Result(trial, "ok", {"step_s": slow})])
      >>> found.verdict.value, found.ratio.median
      ('slower', 1.5)
    """
    before = {result.trial: result for result in old}
    after = {result.trial: result for result in new}
    found = [_judge(result, before.get(trial)) for trial, result in after.items()]
    gone = [trial for trial in before if trial not in after]
    return found + [Comparison(trial, Verdict.ONLY_OLD) for trial in gone]


def _judge(new: Result, old: Result | None) -> Comparison:
    if old is None:
        return Comparison(new.trial, Verdict.ONLY_NEW)
    after, before = new.interval("step_s"), old.interval("step_s")
    if after is None or before is None:
        verdict = Verdict.STILL_NOT_OK if after is None else Verdict.NEWLY_OK
        verdict = verdict if before is None else Verdict.NEWLY_FAILED
        return Comparison(new.trial, verdict)
    verdict = Verdict.FASTER if after.high < before.low else Verdict.OPEN
    verdict = Verdict.SLOWER if after.low > before.high else verdict
    return Comparison(new.trial, verdict, after.over(before))


def differences(old: Sequence[Result], new: Sequence[Result]) -> list[str]:
    """In what the two sets of results were not measured alike."""
    lines = []
    for name in ("machine", "timing", "versions") if old and new else ():
        before, after = (x[0].record.get(name, {}) for x in (old, new))
        for key in dict.fromkeys([*before, *after]):
            was, now = before.get(key, "none"), after.get(key, "none")
            lines += [] if was == now else [f"{name}: {key} {was}, now {now}"]
    return lines
