"""What does mkdocstrings not know of our docstrings? That they name, and show code."""

import pathlib
import re
from typing import Any

import griffe

ROOT = pathlib.Path(__file__).parent.parent
# Every name that a reference page shows, with where it is.
PUBLIC = {
    path.rpartition(".")[2]: path
    for page in (ROOT / "docs/reference").glob("*.md")
    for path in re.findall(r"^::: (\S+)$", page.read_text(), re.M)
}


def as_markdown(docstring: str) -> str:
    """Return a docstring with ``Examples:``, and with links for names in backticks."""
    text = re.sub(r"^( *)Example:$", r"\1Examples:", docstring, flags=re.MULTILINE)
    return re.sub(r"(?<!`)`(\w+)`(?!`)", _link, text)


def _link(found: re.Match[str]) -> str:
    name = found[1]
    return f"[`{name}`][{PUBLIC[name]}]" if name in PUBLIC else found[0]


class Docstrings(griffe.Extension):
    """Every docstring as Markdown, before it is parsed; and methods as such."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrite one."""
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Show a method of strategies as the function that it is."""
        for name, member in list(cls.members.items()):
            found = getattr(getattr(member, "value", None), "canonical_path", "")
            if cls.name == "StrategyMethods" and found.startswith("towerjax."):
                cls.set_member(name, griffe.Alias(name, found))
