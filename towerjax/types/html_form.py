"""How does a value look in a notebook? Tables of HTML, which need no scripts."""

import dataclasses
import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

_MOST_ROWS = 40
_MOST_DEVICES = 16
_LONGEST_CAPTION = 200
_CELL = "text-align:left;padding:1px 8px"
_SQUARE = "display:inline-block;width:10px;height:10px;margin:1px"


@dataclasses.dataclass(frozen=True)
class Markup:
    """HTML as it stands; every other text is escaped."""

    text: str


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[Any]],
    *,
    last: Sequence[Any] = (),
) -> str:
    """A table, of which a long one shows the first rows."""
    shown = [_row("td", row) for row in rows[:_MOST_ROWS]]
    if len(rows) > _MOST_ROWS:
        shown.append(_row("td", [f"… {len(rows) - _MOST_ROWS:,} more"]))
    if last:
        shown.append(_row("th", last))
    body = (_row("th", head) if head else "") + "".join(shown)
    if len(caption) > _LONGEST_CAPTION:
        caption = f"{caption[:_LONGEST_CAPTION]} …"
    title = f"<div><code>{html.escape(caption)}</code></div>"
    return f"<div>{title}<table>{body}</table></div>"


def _row(tag: str, cells: Iterable[Any]) -> str:
    texts = [x.text if isinstance(x, Markup) else html.escape(str(x)) for x in cells]
    return "".join(
        ["<tr>", *(f'<{tag} style="{_CELL}">{x}</{tag}>' for x in texts), "</tr>"]
    )


def leaf_table(caption: str, leaves: Iterable[tuple[str, Any, str | None]]) -> str:
    """A row a leaf: shape, dtype, bytes, layout, and which device has which part."""
    leaves = list(leaves)
    head = ("leaf", "shape", "dtype", "bytes", "on each device", "layout", "where")
    rows = [
        (
            name,
            list(np.shape(leaf)),
            getattr(leaf, "dtype", type(leaf).__name__),
            _readable(_num_bytes(leaf)),
            _readable(_bytes_a_device(leaf)),
            layout if layout and _is_there(leaf) else layout_of(leaf),
            Markup(_squares(leaf)),
        )
        for name, leaf, layout in leaves
    ]
    sums = [
        _readable(sum(count(leaf) for _, leaf, _ in leaves))
        for count in (_num_bytes, _bytes_a_device)
    ]
    return table(caption, head, rows, last=(f"{len(rows)} leaves", "", "", *sums))


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
    """A small picture of a column of numbers."""
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


def _readable(num_bytes: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} B"


def _squares(leaf: Any) -> str:
    """One square a device, in the color of the part that it has."""
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
    """A part of an array as one writes it."""
    if all(part == slice(None) for part in index):
        return "all"
    texts = [
        ":" if part == slice(None) else f"{part.start or 0}:{part.stop}"
        for part in index
    ]
    return f"[{', '.join(texts)}]"
