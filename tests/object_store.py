"""An object store in memory, with a path class of its own: ``fake://``.

It has files that are written as wholes, and nothing else: no folders, no renaming, no
appending. What opens its paths as those of the file system does not find them.
"""

import io
import os

from etils import epath

FILES: dict[str, bytes] = {}


class Written(io.BytesIO):
    """A file that is there once it is closed."""

    def __init__(self, text):
        super().__init__()
        self.text = text

    def close(self):
        if not self.closed:
            data = self.getvalue()
            super().close()
            FILES[self.text] = data


@epath.register_path_cls("fake://")
class FakePath:
    def __init__(self, text):
        self.text = str(text).rstrip("/")

    def __fspath__(self):
        return self.text

    __str__ = __fspath__

    def __repr__(self):
        return f"FakePath({self.text!r})"

    def __eq__(self, other):
        return isinstance(other, FakePath) and self.text == other.text

    def __hash__(self):
        return hash(self.text)

    def joinpath(self, *parts):
        return FakePath("/".join([self.text, *map(str, parts)]))

    __truediv__ = joinpath

    @property
    def name(self):
        return self.text.rpartition("/")[2]

    @property
    def parent(self):
        return FakePath(self.text.rpartition("/")[0])

    def _below(self):
        return [name for name in FILES if name.startswith(self.text + "/")]

    def is_dir(self):
        return bool(self._below())

    def exists(self):
        return self.text in FILES or self.is_dir()

    def iterdir(self):
        start = len(self.text) + 1
        if not self.is_dir():
            raise FileNotFoundError(2, os.strerror(2), self.text)
        yield from {self / name[start:].split("/")[0] for name in self._below()}

    def mkdir(self, parents=False, exist_ok=False):
        pass

    def open(self, mode):
        if mode == "wb":
            return Written(self.text)
        assert mode == "rb", mode
        return io.BytesIO(self.read_bytes())

    def read_bytes(self):
        if self.text not in FILES:
            raise FileNotFoundError(2, os.strerror(2), self.text)
        return FILES[self.text]

    def read_text(self):
        return self.read_bytes().decode()

    def write_bytes(self, data):
        with self.open("wb") as file:
            file.write(data)

    def write_text(self, text):
        self.write_bytes(text.encode())

    def unlink(self):
        del FILES[self.text]

    def rmtree(self, missing_ok=False):
        if not self.exists() and not missing_ok:
            raise FileNotFoundError(2, os.strerror(2), self.text)
        for name in self._below():
            FakePath(name).unlink()
