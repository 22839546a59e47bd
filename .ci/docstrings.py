"""What does mkdocstrings not know of our docstrings? That they name, and show code."""

import pathlib
import re
from typing import Any

import griffe

ROOT = pathlib.Path(__file__).parent.parent
PUBLIC = set(
    re.findall(r" as (\w+)$", (ROOT / "towerjax/__init__.py").read_text(), re.M)
)


def as_markdown(docstring: str) -> str:
    """A docstring with ``Examples:``, and with links where it says `Mirrored`."""
    text = re.sub(r"^( *)Example:$", r"\1Examples:", docstring, flags=re.MULTILINE)
    names = "|".join(
        sorted(PUBLIC - {"bench", "cluster", "metrics", "testing", "__version__"})
    )
    return re.sub(rf"(?<!`)`({names})`(?!`)", r"[`\1`][towerjax.\1]", text)


class Docstrings(griffe.Extension):
    """Every docstring as Markdown, before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
