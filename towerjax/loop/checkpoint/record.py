"""What is written down beside the arrays? What they are, and where the data was."""

import base64
import dataclasses
import importlib.metadata
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from towerjax.loop.checkpoint.leaves import Leaf
from towerjax.loop.checkpoint.manifest import CheckpointError, write_whole
from towerjax.types.version import __version__

FORMAT = 1
NAME = "record.json"
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@dataclasses.dataclass(frozen=True)
class CheckpointRecord:
    """What a checkpoint says of itself, besides its arrays.

    Attributes:
      step: After which step it was saved.
      strategy: The strategy, as text.
      towers: ``T``.
      devices: Their names; ``D`` of them.
      leaves: Name, shape, dtype and reduction of each leaf.
      batches: How many batches were used, and the cursor after them, where the source
        has one.
      batch_rows: How many rows the batches had once they were padded.
      evaluation: The scalars of the evaluation after this step, if there was one.
      stopping: What early stopping has counted.
      fingerprint: Of the examples that were seen; None where they are not counted.
      versions: Library -> version.
      format: Of the record.

    Example:
      >>> CheckpointRecord(3, "OneDevice()", 1, ("cpu:0",), ()).step
      3
    """

    step: int
    strategy: str
    towers: int
    devices: tuple[str, ...]
    leaves: tuple[Leaf, ...]
    batches: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    batch_rows: tuple[int, ...] = ()
    evaluation: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stopping: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    fingerprint: str | None = None
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    format: int = FORMAT

    def write(self, folder: pathlib.Path) -> None:
        """Write it into a checkpoint.

        Args:
          folder: The checkpoint's.
        """
        fields = dataclasses.asdict(self)
        write_whole(folder / NAME, json.dumps(fields, indent=1, allow_nan=False))

    @classmethod
    def read(cls, folder: pathlib.Path) -> "CheckpointRecord":
        """The record of a checkpoint.

        Args:
          folder: The checkpoint's.

        Returns:
          The record.

        Raises:
          CheckpointError: It is missing, or none that this version knows.
        """
        try:
            fields = json.loads((folder / NAME).read_text(encoding="utf-8"))
            if fields["format"] != FORMAT:
                raise CheckpointError(
                    f"The checkpoint {str(folder)!r} has format {fields['format']},"
                    f" and this towerjax ({__version__}) reads format {FORMAT}. Use"
                    f" towerjax {fields['versions'].get('towerjax')}, which wrote it."
                )
            fields["leaves"] = tuple(
                Leaf(**{**leaf, "shape": tuple(leaf["shape"])})
                for leaf in fields["leaves"]
            )
            for name in ("devices", "batch_rows"):
                fields[name] = tuple(fields[name])
            return cls(**fields)
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"The checkpoint {str(folder)!r} is not what was written: {NAME} is"
                f" missing, cut or changed ({error}). Restore it; or delete the whole"
                " folder to go on from the checkpoint before."
            ) from error


def library_versions() -> dict[str, str]:
    """The versions of what the numbers depend on."""
    found = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"towerjax": __version__, **found}


def scalars(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite scalars among an evaluation's metrics."""
    numbers = {k: float(v) for k, v in values.items() if np.ndim(v) == 0}
    return {name: v for name, v in numbers.items() if math.isfinite(v)}


def encoded_cursor(cursor: Any) -> Any:
    """A cursor as JSON holds it."""
    if isinstance(cursor, bytes):
        return {"base64": base64.b64encode(cursor).decode()}
    try:
        same = json.loads(json.dumps(cursor)) == cursor
    except (TypeError, ValueError):
        same = False
    if not same and isinstance(cursor, dict) and all(type(k) is str for k in cursor):
        return {"fields": {name: encoded_cursor(x) for name, x in cursor.items()}}
    if not same:
        raise CheckpointError(
            f"The batches say where they are by a {type(cursor).__name__}, which JSON"
            " does not hold as it is; nothing is pickled. Let get_state return bytes,"
            " or numbers, text, lists and dicts of them."
        )
    return {"json": cursor}


def decoded_cursor(encoded: Any) -> Any:
    """The inverse of `encoded_cursor`."""
    if "base64" in encoded:
        return base64.b64decode(encoded["base64"])
    if "fields" in encoded:
        return {name: decoded_cursor(x) for name, x in encoded["fields"].items()}
    return encoded["json"]
