"""Tables shown as text, and as HTML without scripts."""

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

_MOST_ROWS = 40
_MOST_DEVICES = 16
_LONGEST_TITLE = 200
_SQUARE = "display:inline-block;width:10px;height:10px;margin:1px"


class Markup(str):
    """HTML that is not escaped; every other text is."""


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table: named columns of cells."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""  # under it
    last: tuple[str, ...] = ()  # in HTML, a row such as that of sums

    @property
    def is_number(self) -> tuple[bool, ...]:
        """For each column, whether every cell begins like a number."""
        return tuple(
            all(_is_number(row[i]) for row in self.rows) for i in range(len(self.head))
        )


def as_text(tables: Sequence[Table]) -> str:
    """Tables as plain lines."""
    return "\n\n".join(_text_of(table) for table in tables)


def _text_of(table: Table) -> str:
    lines, grid = [table.title], [table.head, *table.rows]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    for row in grid:
        cells = zip(row, widths, table.is_number, strict=True)
        shown = [cell.rjust(w) if right else cell.ljust(w) for cell, w, right in cells]
        lines.append(("  " + "  ".join(shown)).rstrip())
    return "\n".join([*lines, *([f"  {table.note}"] if table.note else [])])


def as_html(tables: Sequence[Table]) -> str:
    """Tables as HTML complete in itself: no script, no outside style."""
    return "".join(map(_html_of, tables))


def _html_of(table: Table) -> str:
    rows = [_row("th", table.head), *(_row("td", row) for row in table.rows)]
    title = table.title
    if len(title) > _LONGEST_TITLE:
        title = f"{title[:_LONGEST_TITLE]} …"
    under = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    inside = "".join([*rows, _row("th", table.last)])
    return f"<div><h4>{html.escape(title)}</h4><table>{inside}</table>{under}</div>"


def _row(tag: str, cells: Sequence[str]) -> str:
    inside = ""
    for cell in cells:
        text = cell if isinstance(cell, Markup) else html.escape(cell)
        side = "right" if _is_number(text) else "left"
        inside += f'<{tag} style="text-align:{side};padding:1px 8px">{text}</{tag}>'
    return f"<tr>{inside}</tr>" if cells else ""


def _is_number(text: str) -> bool:
    return text[:1].isdecimal() or text[:1] in ("+", "-")


def first_rows(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The first rows of a long table, and how many more there are."""
    more = len(rows) - _MOST_ROWS
    last = [(f"… {more:,} more",)] if more > 0 else []
    return (*rows[:_MOST_ROWS], *last)


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
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self.tables())

    def _repr_html_(self) -> str:
        return as_html(self.tables())


def leaf_table(title: str, leaves: Iterable[tuple[str, Any, str | None]]) -> str:
    """A row for each leaf: shape, dtype, bytes, layout, and each device's part."""
    head = ("leaf", "shape", "dtype", "bytes", "on each device", "layout", "where")
    rows, sums = [], np.zeros(2, np.int64)
    for name, leaf, layout in leaves:
        is_there = isinstance(leaf, jax.Array) and not leaf.is_deleted()
        part = leaf.sharding.shard_shape(leaf.shape) if is_there else (0,)
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        itemsize = getattr(dtype, "itemsize", 0)  # of an array
        sizes = [math.prod(x) * itemsize for x in (np.shape(leaf), part)]
        rows.append(
            (
                name,
                str(list(np.shape(leaf))),
                str(dtype),
                *map(in_bytes, sizes),
                layout if layout and is_there else layout_of(leaf),
                _squares(leaf) if is_there else "",
            )
        )
        sums += sizes
    last = (f"{len(rows)} leaves", "", "", *map(in_bytes, sums.tolist()))
    return as_html([Table(title, head, first_rows(rows), last=last)])


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
    places = np.flatnonzero(np.isfinite(values))
    if len(places) < 2:
        return Markup("")
    chosen = places[np.unique(np.linspace(0, len(places) - 1, 200).astype(int))]
    y = np.asarray(values, np.float64)[chosen]
    x = 200 * (chosen - chosen[0]) / (chosen[-1] - chosen[0])
    y = 38 - 36 * (y - y.min()) / (np.ptp(y) or 1.0)
    points = " ".join(f"{a:.0f},{b:.0f}" for a, b in zip(x, y, strict=True))
    return Markup(
        f'<svg width="200" height="40"><title>{html.escape(name)}</title>'
        f'<polyline points="{points}" fill="none" stroke="currentColor"/></svg>'
    )


def _squares(leaf: jax.Array) -> Markup:
    """One square for each device, in the color of the part that it holds."""
    parts = leaf.sharding.devices_indices_map(leaf.shape)
    devices = sorted(parts, key=lambda device: device.id)
    texts = [str_of_index(parts[device]) for device in devices]
    found, squares = list(dict.fromkeys(texts)), ""
    for device, text in zip(devices[:_MOST_DEVICES], texts, strict=False):
        hue = round(210 + 360 * found.index(text) / len(found)) % 360
        title = f"{device.platform}:{device.id}: {text}"
        style = f"{_SQUARE};background:hsl({hue},55%,60%)"
        squares += f'<span title="{title}" style="{style}"></span>'
    more = len(devices) - _MOST_DEVICES
    return Markup(squares + (f" … {more:,} more" if more > 0 else ""))


def str_of_index(index: tuple[slice, ...]) -> str:
    """An index as Python writes it, such as ``[0:4, :]``; of the whole array "all"."""
    whole = slice(None)
    texts = [":" if x == whole else f"{x.start or 0}:{x.stop}" for x in index]
    return "all" if all(x == whole for x in index) else f"[{', '.join(texts)}]"
