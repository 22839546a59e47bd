"""Tables shown as text, as HTML without scripts or by rich, and stored as JSON."""

import dataclasses
import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

_MOST_ROWS = 40
_MOST_DEVICES = 16
_LONGEST_CAPTION = 200
_SQUARE = "display:inline-block;width:10px;height:10px;margin:1px"


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table: named columns of text cells."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""  # under it

    @property
    def is_number(self) -> tuple[bool, ...]:
        """For each column, whether every cell begins like a number."""
        cells = zip(*self.rows, strict=True) if self.rows else [()] * len(self.head)
        return tuple(all(map(_is_number, column)) for column in cells)


def as_text(tables: Sequence[Table]) -> str:
    """Tables as plain lines."""
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
    """Tables as HTML complete in itself: no script, no outside style."""
    return "".join(
        in_html(x.title, x.head, x.rows, note=x.note, most_rows=len(x.rows))
        for x in tables
    )


@dataclasses.dataclass(frozen=True)
class Markup:
    """HTML that is not escaped; every other text is."""

    text: str


def in_html(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    last: Sequence[Any] = (),
    note: str = "",
    most_rows: int = _MOST_ROWS,
) -> str:
    """A table; a long one shows its first rows."""
    shown = [_row("th", head)] if head else []
    shown += [_row("td", row) for row in rows[:most_rows]]
    if len(rows) > most_rows:
        shown.append(_row("td", [f"… {len(rows) - most_rows:,} more"]))
    if last:
        shown.append(_row("th", last))
    if len(caption) > _LONGEST_CAPTION:
        caption = f"{caption[:_LONGEST_CAPTION]} …"
    under = f"<p>{html.escape(note)}</p>" if note else ""
    title = f"<h4>{html.escape(caption)}</h4>"
    return f"<div>{title}<table>{''.join(shown)}</table>{under}</div>"


def _row(tag: str, cells: Iterable[Any]) -> str:
    texts = [x.text if isinstance(x, Markup) else html.escape(str(x)) for x in cells]
    sides = ["right" if _is_number(x) else "left" for x in texts]
    inside = [
        f'<{tag} style="text-align:{side};padding:1px 8px">{x}</{tag}>'
        for x, side in zip(texts, sides, strict=True)
    ]
    return f"<tr>{''.join(inside)}</tr>"


def _is_number(text: str) -> bool:
    return text[:1].isdecimal() or text[:1] in ("+", "-")


def as_rich(tables: Sequence[Table]) -> Any:
    """What ``rich.print`` shows; rich calls it, so rich is installed."""
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
    return _with_unit(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def in_flops(count: float) -> str:
    """A number of FLOPs for a person."""
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
    return _with_unit(count, 1000, units)


def in_seconds(seconds: float) -> str:
    """A time for a person."""
    if seconds >= 1 or seconds == 0:
        return f"{seconds:.3g} s"
    return _with_unit(seconds * 1e9, 1000, ("ns", "us", "ms"))


def _with_unit(count: float, base: int, units: tuple[str, ...]) -> str:
    number, unit = float(count), 0
    # Take the next unit as soon as three digits would round up to it.
    while float(f"{number:.3g}") >= base and unit < len(units) - 1:
        number, unit = number / base, unit + 1
    shown = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return f"{shown} {units[unit]}"


class Shown:
    """Base of classes whose ``tables()`` say how they are shown."""

    def tables(self) -> tuple[Table, ...]:
        """The tables that are shown."""
        raise NotImplementedError(f"{type(self).__name__} has no tables().")

    def __str__(self) -> str:
        return as_text(self.tables())

    def _repr_html_(self) -> str:
        return as_html(self.tables())

    def __rich__(self) -> Any:
        return as_rich(self.tables())


class Stored(Shown):
    """Base of dataclasses that are shown as tables and stored as JSON."""

    def to_json(self) -> str:
        """One JSON object with all fields."""
        fields: Any = self
        return json.dumps(dataclasses.asdict(fields), indent=2, allow_nan=False)


def leaf_table(caption: str, leaves: Iterable[tuple[str, Any, str | None]]) -> str:
    """A row for each leaf: shape, dtype, bytes, layout, and each device's part."""
    leaves = list(leaves)
    head = ("leaf", "shape", "dtype", "bytes", "on each device", "layout", "where")
    rows = [
        (
            name,
            list(np.shape(leaf)),
            getattr(leaf, "dtype", type(leaf).__name__),
            in_bytes(_num_bytes(leaf)),
            in_bytes(_bytes_a_device(leaf)),
            layout if layout and _is_there(leaf) else layout_of(leaf),
            Markup(_squares(leaf)),
        )
        for name, leaf, layout in leaves
    ]
    sums = [
        in_bytes(sum(count(leaf) for _, leaf, _ in leaves))
        for count in (_num_bytes, _bytes_a_device)
    ]
    return in_html(caption, head, rows, last=(f"{len(rows)} leaves", "", "", *sums))


def layout_of(leaf: Any) -> str:
    """How a leaf lies on its devices, in a word or two."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "shape only"
    if not isinstance(leaf, jax.Array):
        return "host"
    if leaf.is_deleted():
        return "donated"
    if len(leaf.sharding.device_set) == 1:
        return "one device"
    return "mirrored" if leaf.sharding.is_fully_replicated else "sharded"


def curve(name: str, values: np.ndarray) -> Markup:
    """A small SVG line chart of a column of numbers."""
    values = np.asarray(values, np.float64)
    places = np.flatnonzero(np.isfinite(values))
    if len(places) < 2:
        return Markup("")
    chosen = places[np.unique(np.linspace(0, len(places) - 1, 200).astype(int))]
    y = values[chosen]
    height = np.ptp(y) or 1.0
    x = 200 * (chosen - chosen[0]) / (chosen[-1] - chosen[0])
    y = 38 - 36 * (y - y.min()) / height
    points = " ".join(f"{a:.0f},{b:.0f}" for a, b in zip(x, y, strict=True))
    return Markup(
        f'<svg width="200" height="40"><title>{html.escape(name)}</title>'
        f'<polyline points="{points}" fill="none" stroke="currentColor"/></svg>'
    )


def _is_there(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not leaf.is_deleted()


def _num_bytes(leaf: Any) -> int:
    if hasattr(leaf, "dtype"):
        return math.prod(leaf.shape) * leaf.dtype.itemsize
    return 0


def _bytes_a_device(leaf: Any) -> int:
    if not _is_there(leaf):
        return 0
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def _squares(leaf: Any) -> str:
    """One square for each device, in the color of the part that it holds."""
    if not _is_there(leaf):
        return ""
    parts = leaf.sharding.devices_indices_map(leaf.shape)
    named = sorted(
        ((device.id, f"{device.platform}:{device.id}"), str_of_index(index))
        for device, index in parts.items()
    )
    hues = {part: i for i, part in enumerate(dict.fromkeys(p for _, p in named))}
    squares = "".join(
        f'<span title="{name}: {part}" style="{_SQUARE};'
        f'background:hsl({round(210 + 360 * hues[part] / len(hues)) % 360},55%,60%)">'
        "</span>"
        for (_, name), part in named[:_MOST_DEVICES]
    )
    more = len(named) - _MOST_DEVICES
    return squares + (f" … {more:,} more" if more > 0 else "")


def str_of_index(index: tuple[slice, ...]) -> str:
    """An index as Python writes it, such as ``[0:4, :]``."""
    if all(part == slice(None) for part in index):
        return "all"
    texts = [
        ":" if part == slice(None) else f"{part.start or 0}:{part.stop}"
        for part in index
    ]
    return f"[{', '.join(texts)}]"
