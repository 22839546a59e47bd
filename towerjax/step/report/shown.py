"""What can every report do? It is text, HTML, rich tables, JSON, and itself again."""

from typing import Any, Self

from towerjax.step.report.plain import as_json, from_json
from towerjax.step.report.tables import Table, as_html, as_rich, as_text


class Shown:
    """The base of a dataclass that says with ``tables`` how it is shown."""

    def tables(self) -> tuple[Table, ...]:
        """What is shown.

        Raises:
          NotImplementedError: The report does not say it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no tables().")

    def to_json(self) -> str:
        """One JSON object with all fields; `from_json` makes the report of it again."""
        return as_json(self)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The report that ``to_json`` wrote.

        Args:
          text: One JSON object.

        Raises:
          ValueError: It is of something else.
        """
        return from_json(cls, text)

    def __str__(self) -> str:
        return as_text(self.tables())

    def _repr_html_(self) -> str:
        return as_html(self.tables())

    def __rich__(self) -> Any:
        return as_rich(self.tables())
