"""What does mkdocstrings not know of our docstrings? That ``Example:`` shows code."""

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """The singular, which Google's style has too, as griffe's plural."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rename the section."""
        if obj.docstring:
            text = obj.docstring.value
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", text, flags=re.MULTILINE
            )
