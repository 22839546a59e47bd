"""What errors with constructors of their own have in common."""

from typing import Any


class Portable(Exception):
    """An error that is copied and pickled by its text, attributes and notes.

    Python itself would call the constructor with the text.
    """

    def __reduce__(self) -> Any:
        """The text and the attributes; the constructor is not called again."""
        return type(self).__new__, (type(self), *self.args), vars(self)
