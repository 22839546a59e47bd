"""Draw the pictures of pages, from tables on the pages and from a sweep.

Run: ``python -m benchmarks.pictures``, which writes ``PICTURES`` into docs/, or
``python -m benchmarks.pictures scaling`` for one of them.
"""

import contextlib
import hashlib
import io
import pathlib
import re
import runpy
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.figure import Figure

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
WHOLE = ROOT / "examples" / "whole_training.py"
STYLE: Any = {
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color"), "#7f7f7f"
    ),
    "ytick.color": "#7f7f7f",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.prop_cycle": cycler(
        color=[
            "#2f6db5",
            "#b5622f",
            "#3d8a5f",
            "#8a4f9e",
            "#d0a04c",
            "#8f8f8f",
            "#c44e7a",
            "#1f9aa8",
        ]
    ),
    "font.sans-serif": ["DejaVu Sans", "sans-serif"],
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "towerjax",
}
Rows = list[dict[str, str]]


def table(page: str, *names: str) -> Rows:
    """Return the rows of the page's first table that has these columns."""
    for text in re.findall(r"(?:^\|.*\n)+", (DOCS / page).read_text(), re.MULTILINE):
        lines = [x.strip("| ").split(" | ") for x in text.splitlines()]
        head = [cell.strip(" `*()") for cell in lines[0]]
        if set(names) <= {*head}:
            cells = [[cell.strip(" `*") for cell in line] for line in lines[2:]]
            return [dict(zip(head, line, strict=True)) for line in cells]
    raise ValueError(f"{page} has no table with the columns {', '.join(names)}.")


def timed() -> Rows:
    """Return each library's step times over those of the hand-written step."""
    return table("evidence/grid.md", "model", "D", "towerjax", "Keras")


def held() -> tuple[Rows, Rows]:
    """Return what a device holds for each layout of a state, small and large."""
    page = "evidence/memory.md"
    large = table(page, "parameters", "peak")
    alike = [row for row in large if row["parameters"] == large[0]["parameters"]]
    return table(page, "state=", "arguments", "temporaries"), alike


def swept() -> str:
    """Return the program of the sweep on its page."""
    text = (DOCS / "how_to/sweeps.md").read_text()
    return re.findall(r"^```python run\n(.*?)^```", text, re.M | re.DOTALL)[0]


def scaling(rows: Rows) -> Figure:
    """Draw a panel for each model, with a line for each library."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    ways = [name for name in rows[0] if name not in ("model", "D", "towerjax ms")]
    figure = Figure((9.0, 2.9), layout="constrained")
    panels = figure.subplots(1, len(models), sharey=True)
    for panel, model in zip(panels, models, strict=True):
        own = [row for row in rows if row["model"] == model]
        panel.axhline(1, color="#7f7f7f", lw=1, ls=":")
        for way in ways:
            pairs = [(row["D"], float(row[way])) for row in own if row[way] != "-"]
            width = 2.5 if way == "towerjax" else 1.0
            if pairs:
                panel.plot(*zip(*pairs, strict=True), "o-", ms=3, lw=width, label=way)
            else:  # each way has one color in all panels
                panel.plot([], [], label=way)
        panel.set(title=model, yscale="log", yticks=(0.5, 1, 2, 4))
        panel.set_yticklabels(["0.5", "1", "2", "4"])
        panel.minorticks_off()
    panels[0].set_ylabel("step time / hand-written")
    figure.supxlabel("devices", fontsize="medium")
    outside: Any = "outside right"  # a value that matplotlib's types lack
    figure.legend(*panels[0].get_legend_handles_labels(), loc=outside, fontsize=9)
    return figure


def memory(tables: tuple[Rows, Rows]) -> Figure:
    """Draw a panel for each model, with a bar for each layout of its state."""
    figure = Figure((9.0, 2.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    small, large = tables
    names = [row["state="].strip('"') for row in small]
    assert names == [row["state="].strip('"') for row in large]
    parts = {name: numbers(small, name) for name in ("arguments", "temporaries")}
    peaks = numbers(large, "peak")
    first = numbers(large, "state and batch")
    rest = [peak - x for peak, x in zip(peaks, first, strict=True)]
    bars(left, names, parts)
    bars(right, names, {"state and batch": first, "more at the peak": rest})
    right.axvline(141, color="#7f7f7f", lw=1, ls=":", label="memory of a device")
    left.set_xlabel("12 Flax blocks: bytes / bytes of all parameters")
    right.set_xlabel(f"{large[0]['parameters']} parameters on 8 H200: GB a device")
    right.set(yticks=[], xlim=(0, 150))
    left.legend(fontsize=8, loc="lower right")
    right.legend(fontsize=8, loc="lower right", bbox_to_anchor=(0.92, 0))
    return figure


def numbers(rows: Rows, name: str) -> list[float]:
    """Return a column's numbers, without their unit."""
    return [float(row[name].removesuffix(" GB")) for row in rows]


def bars(panel: Any, names: list[str], parts: dict[str, list[float]]) -> None:
    """Draw a bar for each name, made of parts, with its length at its end."""
    start = [0.0] * len(names)
    for label, widths in parts.items():
        drawn = panel.barh(names, widths, left=start, label=label)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    panel.bar_label(drawn, [f"{end:.4g}" for end in start], padding=4, fontsize=9)
    panel.invert_yaxis()


def sweep(program: str) -> Figure:
    """Draw the learning curves of the sweep in the documentation."""
    found: dict[str, Any] = {}
    exec(program, found)
    return found["found"].plot()


def seen(program: str) -> Figure:
    """Draw what a whole training shows: its lines, its table and its curves."""
    told = io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.chdir(folder), contextlib.redirect_stderr(told):
            with contextlib.redirect_stdout(told):
                found = runpy.run_path(str(WHOLE))
    first, proved, *lines = told.getvalue().splitlines()
    evaluated = [x for x in lines if x.startswith("evaluation")]
    bar = next(x for x in reversed(lines) if x.startswith("step "))
    ended = lines[lines.index(evaluated[-1]) + 1 :]
    _, *rows = found["history"].table().splitlines()
    shown = [
        "$ python train.py",
        proved,
        *evaluated[-2:],
        "━" * 24 + "╺" + "─" * 7 + "  " + bar,
        *ended,
        "",
        ">>> print(history.table())",
        rows[0],
        "  ...",
        *rows[-3:],
    ]
    figure = Figure((9.0, 5.4), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(len(shown), 11))
    terminal, below = halves
    panel = terminal.subplots()
    panel.set_axis_off()
    for place, line in enumerate(shown):
        where = (0.0, 1 - (place + 0.5) / len(shown))
        line = line.replace(" ", "\N{NO-BREAK SPACE}")  # in svg two spaces are one
        panel.text(*where, line, family="monospace", size=8, transform=panel.transAxes)
    panels = below.subplots(1, 3)
    for name, panel in zip(("loss", "accuracy", "learning_rate"), panels, strict=True):
        for kind, every in (("train", 5), ("eval", 1)):
            of_kind = [x for x in found["lines"] if x["kind"] == kind][::every]
            pairs = [(x["step"], x["metrics"].get(name)) for x in of_kind]
            known = [pair for pair in pairs if pair[1] is not None]
            panel.plot(*zip(*known, strict=True) if known else ((), ()), label=kind)
        panel.set(xlabel="step", ylabel=name)
    panels[0].legend(fontsize=8)
    return figure


# For each name of a picture: its place below docs/, a function that returns what it
# shows, a function that draws this, and its title.
PICTURES: dict[str, tuple[str, Callable[[], Any], Callable[[Any], Figure], str]] = {
    "scaling": (
        "evidence/scaling.svg",
        timed,
        scaling,
        "Step time over the hand-written step's, by devices, for each library",
    ),
    "memory": (
        "evidence/memory.svg",
        held,
        memory,
        "Memory of a device: a sharded state takes a fraction of a mirrored one",
    ),
    "sweep": (
        "how_to/sweep.svg",
        swept,
        sweep,
        "Loss by step for two learning rates, mean and range of three seeds",
    ),
    "seen": (
        "seen.svg",
        WHOLE.read_text,
        seen,
        "What a run shows: its progress, its table and its curves",
    ),
}


def digest(shown: Any) -> str:
    """Return a hash of what a picture shows, by which a test finds an old one."""
    return hashlib.sha256(repr(shown).encode()).hexdigest()[:16]


def as_svg(figure: Figure, title: str, description: str) -> str:
    """Return a figure as svg text: small, with a title, and without addresses."""
    buffer = io.StringIO()
    empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
    text = buffer.getvalue()
    text = re.sub(
        r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.S
    )
    text = re.sub(r' xmlns:xlink="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r"<[^>]*>", _shorter, text)
    text = re.sub(r"<!--.*?-->\n?|^ +", "", text, flags=re.MULTILINE)
    about = f"<title>{title}</title>\n<desc>{description}</desc>\n"
    return text.replace(">\n", f' role="img">\n{about}', 1)


def _shorter(tag: re.Match[str]) -> str:
    """Return a tag whose places have two decimals; texts keep their digits."""
    return re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0])


def main(names: Sequence[str]) -> None:
    """Draw the pictures that are named, or all."""
    for name in names or PICTURES:
        place, data, draw, title = PICTURES[name]
        with matplotlib.rc_context(STYLE):
            text = as_svg(draw(data()), title, f"Drawn of {digest(data())}")
        (DOCS / place).write_text(text)
        print(f"docs/{place}: {len(text):,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
