"""How do results look? As lines with bands around them, in panels."""

from collections.abc import Sequence
from typing import Any


def check_matplotlib() -> None:
    """Raise where plots cannot be drawn."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise ValueError(
            "Plots need Matplotlib, which is not installed. Install"
            " 'towerjax[examples]', or leave them out."
        ) from None


def figure(labels: Sequence[str], unit: str) -> tuple[Any, list[Any]]:
    """A picture, and its panels: one for each label of a horizontal axis."""
    check_matplotlib()
    from matplotlib.figure import Figure

    size = (max(5.0, 3.2 * len(labels)), 3.4)
    picture = Figure(figsize=size, layout="constrained", dpi=70)
    panels = list(picture.subplots(1, len(labels), squeeze=False)[0])
    for panel, label in zip(panels, labels, strict=True):
        panel.set_xlabel(label)
    panels[0].set_ylabel(unit)
    return picture, panels


def line_with_band(
    panel: Any, at: Any, middle: Any, band: tuple[Any, Any], label: str, **style: Any
) -> None:
    """A line, and how far around it the values lie."""
    [line] = panel.plot(at, middle, label=label, **style)
    panel.fill_between(at, *band, color=line.get_color(), alpha=0.2, lw=0)
