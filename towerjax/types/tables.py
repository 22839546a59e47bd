"""Tables, shown as text and in notebooks by rich."""

import dataclasses
import io
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from towerjax.types.options import require
from towerjax.types.refusals import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 120
# On a narrow page rows scroll sideways and are not broken.
_FORM = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    'font-family:monospace">{code}</pre>'
)


class Lines(str):
    """A text of several lines, which a notebook shows as these lines."""

    __repr__ = str.__str__


@dataclasses.dataclass(frozen=True)
class Table:
    """A titled table: named columns of cells.

    Its texts may come from files of others, so they are kept `printable`.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""  # shown under the table

    def __post_init__(self) -> None:
        cells = [tuple(map(printable, row)) for row in self.rows]
        object.__setattr__(self, "rows", tuple(cells))
        object.__setattr__(self, "head", tuple(map(printable, self.head)))
        object.__setattr__(self, "title", printable(self.title))

    @property
    def is_number(self) -> tuple[bool, ...]:
        """Whether a column holds numbers: all of its cells begin like one."""
        return tuple(
            all(row[i][:1] in "+-" or row[i][0].isdecimal() for row in self.rows)
            for i in range(len(self.head))
        )


def as_text(tables: Sequence[Table]) -> Lines:
    """Write the tables as plain lines."""
    lines = []
    for table in tables:
        lines += ["", table.title] if lines else [table.title]
        grid = [table.head, *table.rows]
        rights = table.is_number
        widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
        for row in grid:
            cells = zip(row, widths, rights, strict=True)
            shown = [x.rjust(w) if right else x.ljust(w) for x, w, right in cells]
            lines.append(("  " + "  ".join(shown)).rstrip())
        lines += [f"  {table.note}"] if table.note else []
    return Lines("\n".join(lines))


def by_rich(tables: Sequence[Table]) -> dict[str, str]:
    """Draw tables by rich, for ``_repr_mimebundle_``."""
    from rich.table import Table as RichTable
    from rich.text import Text  # In a Text rich does not read brackets as markup.

    shown = []
    for table in tables:
        rich_table = RichTable()
        for name, right in zip(table.head, table.is_number, strict=True):
            justify = "right" if right else "left"
            rich_table.add_column(Text(name), justify=justify, overflow="fold")
        for row in table.rows:
            rich_table.add_row(*map(Text, row))
        # The title and caption of rich would wrap at the width of the columns.
        shown += [Text(table.title, "italic"), rich_table]
        shown += [Text(table.note, "italic dim")] if table.note else []
    return drawn(*shown)


def drawn(*values: Any) -> dict[str, str]:
    """Draw values by rich as text and HTML, for ``_repr_mimebundle_``."""
    from rich.console import Console

    console = Console(
        width=_WIDTH, record=True, file=io.StringIO(), force_jupyter=False
    )
    console.print(*values, sep="\n")
    text = console.export_text(clear=False)
    page = console.export_html(inline_styles=True, code_format=_FORM)
    return {"text/plain": text, "text/html": page}


def picture(panels: int = 1) -> tuple["Figure", Any]:
    """Make a figure for notebooks, and ``panels`` axes side by side.

    It raises a ``ValueError`` if Matplotlib is not installed.
    """
    figures = require("matplotlib.figure", "plot()", "plot")

    class Picture(figures.Figure):
        """A figure that a notebook shows even without ``%matplotlib inline``."""

        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png")
            return buffer.getvalue()

    size = max(6.4, 3.2 * panels), 4.0  # in inches
    figure = Picture(size, layout="constrained", dpi=100)
    return figure, figure.subplots(1, panels, squeeze=False)[0] if panels else ()


def number_of(count: int, one: str, many: str | None = None) -> str:
    """Count things in words, such as "1 device" and "1,024 devices"."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def in_bytes(count: float) -> str:
    """Write a number of bytes with a unit."""
    return _with_unit(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def in_flops(count: float) -> str:
    """Write a number of FLOPs with a unit."""
    units = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
    return _with_unit(count, 1000, units)


def in_seconds(seconds: float) -> str:
    """Write a time with a unit."""
    if seconds == 0:
        return "0 s"
    return _with_unit(seconds * 1e9, 1000, ("ns", "us", "ms", "s"))


def _with_unit(count: float, base: int, units: tuple[str, ...]) -> str:
    number = float(count)
    unit = 0
    # The next unit is taken as soon as three digits would round up to it.
    while max(number, float(f"{number:.3g}")) >= base and unit < len(units) - 1:
        number = number / base
        unit = unit + 1
    shown = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return f"{shown} {units[unit]}"


class Shown:
    """A base class of objects that are shown as their ``tables()``."""

    def tables(self) -> tuple[Table, ...]:
        """List the tables that are shown."""
        raise NotImplementedError

    def __str__(self) -> str:
        return as_text(self.tables())

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return by_rich(self.tables())


def leaf_table(
    title: str, leaves: Iterable[tuple[str, Any, str | None]], most: int = 40
) -> Table:
    """Make a table with a row per leaf: shape, dtype, bytes and layout.

    Bytes are given for the whole leaf and for one device. At most ``most`` rows are
    shown.
    """
    head = ("leaf", "shape", "dtype", "bytes", "on each device", "layout")
    rows = []
    sums = np.zeros(2, np.int64)
    for name, leaf, layout in leaves:
        is_there = isinstance(leaf, jax.Array) and not leaf.is_deleted()
        part = leaf.sharding.shard_shape(leaf.shape) if is_there else (0,)
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        itemsize = getattr(dtype, "itemsize", 0)  # arrays have one
        sizes = [math.prod(x) * itemsize for x in (np.shape(leaf), part)]
        lies = layout if layout and is_there else layout_of(leaf)
        shape = str(list(np.shape(leaf)))
        rows.append((name, shape, str(dtype), *map(in_bytes, sizes), lies))
        sums += sizes
    whole, part = map(in_bytes, sums.tolist())
    count = number_of(len(rows), "leaf", "leaves")
    note = f"{count}, {whole}; {part} on each device"
    if len(rows) > most:
        are = "first is" if most == 1 else f"first {most} are"
        note += f"; the {are} shown"
    return Table(title, head, tuple(rows[:most]), note)


def layout_of(leaf: Any) -> str:
    """Describe a leaf's layout on its devices, in a word or two."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return "shape only"
    if not isinstance(leaf, jax.Array):
        return "host"
    if leaf.is_deleted():
        return "donated"
    if len(leaf.sharding.device_set) == 1:
        return "one device"
    return "mirrored" if leaf.sharding.is_fully_replicated else "sharded"
