"""Hashes of a run's programs, which show whether a later run has the same programs."""

from collections.abc import Mapping, Sequence

from towerjax.check.audit.kept import hash_of_programs
from towerjax.step.step import Step

_WORDS = {
    "towers": "the loss function or the shapes of its batches",
    "update": "the optimizer, its numbers or another part of the update",
}


class ProgramsOfRun:
    """The programs that a step has compiled, for the record of a checkpoint."""

    def __init__(self, step: Step) -> None:
        self._step = step
        # The number of programs that are hashed, and their hashes.
        self._known: tuple[int, dict[str, list[str]]] = 0, {}

    def hashes(self) -> dict[str, list[str]]:
        """Hash the towers' programs and the updates.

        The dict is empty before any program exists. A program that calls Python has no
        hash, because the program does not show whether the Python code has changed.
        """
        traces = [x.traced for x in self._step.programs.compiled.values()]
        if len(traces) != self._known[0]:
            programs = {
                "towers": [
                    [of_pass.towers.jaxpr for of_pass in x.passes] for x in traces
                ],
                "update": [[x.finish] for x in traces],
            }
            hashes = {
                name: sorted(
                    {x for x in (hash_of_programs(p, {}) for p in of_pass) if x}
                )
                for name, of_pass in programs.items()
            }
            self._known = len(traces), hashes
        return self._known[1]

    def other_than(self, saved: Mapping[str, Sequence[str]]) -> str:
        """Tell how programs differ from the ``saved`` hashes; or "".

        A run with several programs is not compared, because each shape of batch may
        have its own program.
        """
        now = self.hashes()
        pairs = {x: ([*saved.get(x, ())], now.get(x, [])) for x in _WORDS}
        differ = [
            _WORDS[name]
            for name, (before, after) in pairs.items()
            if len(before) == len(after) == 1 and before != after
        ]
        return "; ".join(f"{words} changed since then" for words in differ)
