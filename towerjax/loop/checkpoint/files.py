"""How do arrays get to the disk and back? By Orbax, while the devices work on."""

import pathlib
from collections.abc import Mapping

import jax


class ArrayFiles:
    """Arrays by name in a folder, written by Orbax in a thread.

    Several processes each write what they have; all call everything here.
    """

    def __init__(self) -> None:
        # Imported here: it takes longer than all of towerjax.
        import orbax.checkpoint

        self._orbax = orbax.checkpoint.StandardCheckpointer()

    def start(self, path: pathlib.Path, arrays: Mapping[str, jax.Array]) -> None:
        """Copy the arrays to the host, and begin to write them.

        Once this returns a step may take over their buffers.
        """
        self._orbax.save(path.absolute(), dict(arrays))

    def wait(self) -> None:
        """Until what was started is written, by all processes."""
        self._orbax.wait_until_finished()

    def read(
        self, path: pathlib.Path, asked: Mapping[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.Array]:
        """Arrays that were written, on any devices."""
        return self._orbax.restore(path.absolute(), dict(asked))

    def close(self) -> None:
        """Wait, and end the thread."""
        self._orbax.close()
