"""How is a report shown? As text, as HTML, by rich, and as JSON."""

import dataclasses
import html
import json
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Table:
    """What is shown together: cells of text, in columns with names."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""  # under it

    @property
    def is_number(self) -> tuple[bool, ...]:
        """Of each column: does every cell begin like a number?"""
        cells = zip(*self.rows, strict=True) if self.rows else [()] * len(self.head)
        numbers = "0123456789+-"
        return tuple(all(x[:1] and x[0] in numbers for x in column) for column in cells)


def as_text(tables: Sequence[Table]) -> str:
    """Plain lines."""
    return "\n\n".join(_text_of(table) for table in tables)


def _text_of(table: Table) -> str:
    lines = [table.title]
    grid = [table.head, *table.rows]
    widths = [max(len(row[i]) for row in grid) for i in range(len(table.head))]
    for row in grid:
        cells = [
            cell.rjust(width) if is_number else cell.ljust(width)
            for cell, width, is_number in zip(row, widths, table.is_number, strict=True)
        ]
        lines.append(("  " + "  ".join(cells)).rstrip())
    if table.note:
        lines.append(f"  {table.note}")
    return "\n".join(lines)


def as_html(tables: Sequence[Table]) -> str:
    """One ``<div>``, complete in itself: no script, no style from elsewhere."""
    parts = []
    for table in tables:
        parts.append(f"<h4>{html.escape(table.title)}</h4><table>")
        parts.append(_row("th", table.head, table.is_number))
        parts += [_row("td", row, table.is_number) for row in table.rows]
        parts.append("</table>")
        if table.note:
            parts.append(f"<p>{html.escape(table.note)}</p>")
    return f"<div>{''.join(parts)}</div>"


def _row(tag: str, cells: Sequence[str], is_number: Sequence[bool]) -> str:
    inside = [
        f'<{tag} style="text-align:{"right" if number else "left"}">'
        f"{html.escape(cell)}</{tag}>"
        for cell, number in zip(cells, is_number, strict=True)
    ]
    return f"<tr>{''.join(inside)}</tr>"


def as_rich(tables: Sequence[Table]) -> Any:
    """What ``rich.print`` shows. Only rich asks for it, so it is there."""
    from rich import console, text
    from rich import table as rich_table

    shown = []
    for table in tables:
        grid = rich_table.Table(
            title=text.Text(table.title), caption=text.Text(table.note) or None
        )
        for name, is_number in zip(table.head, table.is_number, strict=True):
            grid.add_column(text.Text(name), justify="right" if is_number else "left")
        for row in table.rows:
            grid.add_row(*map(text.Text, row))
        shown.append(grid)
    return console.Group(*shown)


def in_bytes(count: float) -> str:
    """A number of bytes for a person."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def in_flops(count: float) -> str:
    """A number of FLOPs for a person."""
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
    return _scaled(count, 1000, units)


def in_seconds(seconds: float) -> str:
    """A time for a person."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return _scaled(seconds * 1e9, 1000, ("ns", "us", "ms"))


def _scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    number, unit = float(count), 0
    # As soon as three digits would round up to the next unit, that one is taken.
    while float(f"{number:.3g}") >= base and unit < len(units) - 1:
        number, unit = number / base, unit + 1
    shown = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return f"{shown} {units[unit]}"


class Shown:
    """The base of what says with ``tables`` how it is shown."""

    def tables(self) -> tuple[Table, ...]:
        """What is shown.

        Raises:
          NotImplementedError: The report does not say it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no tables().")

    def __str__(self) -> str:
        return as_text(self.tables())

    def _repr_html_(self) -> str:
        return as_html(self.tables())

    def __rich__(self) -> Any:
        return as_rich(self.tables())


class Stored(Shown):
    """The base of a dataclass that is shown, and that JSON holds whole."""

    def to_json(self) -> str:
        """One JSON object with all fields."""
        fields: Any = self
        return json.dumps(dataclasses.asdict(fields), indent=2, allow_nan=False)
