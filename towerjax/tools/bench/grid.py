"""What is measured? A grid of options, and the trials that it makes."""

import dataclasses
import difflib
import itertools
import os
import pathlib
import tomllib
from collections.abc import Sequence
from typing import Any

from towerjax.collectives.written import ops_of
from towerjax.tools.bench.protocol import TimingProtocol
from towerjax.types.options import check_choice, check_whole

STRATEGIES = ("mirrored", "mirrored_scan", "mirrored_pmap", "one_device")
PEERS = ("jit", "pmap", "keras", "tensorflow", "torch")

_DTYPES = ("float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True)
class Trial:
    """One thing to measure.

    Attributes:
      model: One of ``mlp, cnn, resnet18, transformer, embedding``, or
        ``module:factory``.
      batch: Examples in the global batch.
      by: ``"towerjax"``, or the peer that runs it: ``jit``, ``pmap``, ``keras``,
        ``tensorflow`` or ``torch``.
      strategy: ``"mirrored"``; ``"mirrored_scan"`` and ``"mirrored_pmap"``, with that
        ``local`` or ``executor``; ``"one_device"``.
      towers: ``T``.
      devices: ``D``, which divides it.
      cross_tower_ops: As one writes it: ``"Packed(num_packs=2)"``.
      dtype: The model computes in.
      micro_batches: ``A``.
      steps_per_call: ``K``.

    Raises:
      ValueError: An option is not one that there is.
    """

    model: str
    batch: int
    by: str = "towerjax"
    strategy: str = "mirrored"
    towers: int = 1
    devices: int = 1
    cross_tower_ops: str = "AllReduce()"
    dtype: str = "float32"
    micro_batches: int = 1
    steps_per_call: int = 1

    def __post_init__(self) -> None:
        """Check the options."""
        for name in ("batch", "towers", "devices", "micro_batches", "steps_per_call"):
            check_whole(name, getattr(self, name), 1)
        check_choice("by", self.by, ("towerjax", *PEERS))
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("dtype", self.dtype, _DTYPES)
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model={self.model!r} must be a model's name.")
        ops_of(self.cross_tower_ops)

    def describe(self) -> str:
        """A short text that names what is not usual.

        Example:
          >>> Trial("mlp", 256, towers=8, devices=2, dtype="bfloat16").describe()
          'mlp B=256 T=8 D=2 bfloat16'
        """
        words = [self.model, f"B={self.batch}", f"T={self.towers}", f"D={self.devices}"]
        usual = {field.name: field.default for field in dataclasses.fields(self)}
        for name in ("by", "strategy", "cross_tower_ops", "dtype"):
            if getattr(self, name) != usual[name]:
                words.append(getattr(self, name))
        for name, letter in (("micro_batches", "A"), ("steps_per_call", "K")):
            if getattr(self, name) != 1:
                words.append(f"{letter}={getattr(self, name)}")
        return " ".join(words)


@dataclasses.dataclass(frozen=True)
class Grid:
    """Every combination of the options is a trial, each once.

    No trials are combinations in which ``D`` does not divide ``T``, and
    ``"one_device"`` with more than one tower. Combinations that differ in what one
    tower does not use (``cross_tower_ops``) are one trial.

    Attributes:
      models: See `Trial`, as for all that follows.
      towers: ``T``.
      devices: ``D``; empty is one device a tower.
      batches: Examples in the global batch.
      batches_per_tower: The same for each tower: the global batch is ``T`` times
        that. Give these or ``batches``, or both.
      strategies: Of ``mirrored, mirrored_scan, mirrored_pmap, one_device``.
      cross_tower_ops: As one writes them.
      dtypes: Of ``float32, bfloat16, float16``.
      micro_batches: ``A``.
      steps_per_call: ``K``.
      peers: Who else runs each combination of model, ``D`` devices, batch and dtype:
        of ``jit, pmap, keras, tensorflow, torch``.

    Raises:
      ValueError: An option is not one that there is, or no trial is left.

    Example:
      >>> grid = Grid(("mlp",), towers=(1, 4), devices=(1, 2), batches=(64,))
      >>> [trial.describe() for trial in grid.trials()]
      ['mlp B=64 T=1 D=1', 'mlp B=64 T=4 D=1', 'mlp B=64 T=4 D=2']
    """

    models: Sequence[str]
    towers: Sequence[int] = (1,)
    devices: Sequence[int] = ()
    batches: Sequence[int] = ()
    batches_per_tower: Sequence[int] = ()
    strategies: Sequence[str] = ("mirrored",)
    cross_tower_ops: Sequence[str] = ("AllReduce()",)
    dtypes: Sequence[str] = ("float32",)
    micro_batches: Sequence[int] = (1,)
    steps_per_call: Sequence[int] = (1,)
    peers: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Check the options, by making the trials."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise ValueError(f"{field.name}={value!r} must be a list, [{value!r}].")
            object.__setattr__(self, field.name, tuple(value))
        for name in ("towers", "devices", "batches_per_tower"):
            for number in getattr(self, name):
                check_whole(name, number, 1)
        if not (self.batches or self.batches_per_tower):
            raise ValueError("A grid needs batches=[...] or batches_per_tower=[...].")
        if not self.trials():
            raise ValueError(
                f"No trial is left: of towers={list(self.towers)} and"
                f" devices={list(self.devices)} no D divides a T, or an option's list"
                " is empty."
            )

    def trials(self) -> tuple[Trial, ...]:
        """The trials, each once, by number of devices and then by model."""
        found: dict[Trial, None] = {}
        combinations = itertools.product(
            self.models,
            self.dtypes,
            self.towers,
            self.strategies,
            self.cross_tower_ops,
            self.micro_batches,
            self.steps_per_call,
        )
        for model, dtype, towers, strategy, ops, *repeats in combinations:
            for devices, batch in itertools.product(
                self.devices or (towers,), self._global_batches(towers)
            ):
                if towers % devices or (strategy == "one_device" and towers > 1):
                    continue
                ops = ops if towers > 1 else "AllReduce()"
                trial = Trial(
                    model,
                    batch,
                    "towerjax",
                    strategy,
                    towers,
                    devices,
                    ops,
                    dtype,
                    *repeats,
                )
                found[trial] = None
                for peer in self.peers:
                    found[_by_peer(trial, peer)] = None
        order = [self.models.index, ("towerjax", *PEERS).index]
        return tuple(
            sorted(found, key=lambda t: (t.devices, order[0](t.model), order[1](t.by)))
        )

    def _global_batches(self, towers: int) -> tuple[int, ...]:
        return (*self.batches, *(towers * rows for rows in self.batches_per_tower))


def _by_peer(trial: Trial, peer: str) -> Trial:
    """What the peer does: one tower on each of the devices, one step a call."""
    return Trial(
        trial.model,
        trial.batch,
        by=peer,
        towers=trial.devices,
        devices=trial.devices,
        dtype=trial.dtype,
    )


def read_toml(path: str | os.PathLike[str]) -> tuple[Grid, TimingProtocol]:
    r"""A grid and how it is timed, from a file.

    Keys are `Grid`'s; a table ``[protocol]`` has `TimingProtocol`'s.

    Args:
      path: A TOML file.

    Returns:
      ``(grid, protocol)``.

    Raises:
      ValueError: The file is no TOML, has a key that there is not, or a value that
        the grid refuses; names the file.
      OSError: It cannot be read.

    Example:
      >>> import tempfile
      >>> with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
      ...     _ = file.write('models = ["mlp"]\nbatches = [64]\ntowers = [1, 2]')
      ...     file.flush()
      ...     grid, protocol = read_toml(file.name)
      >>> len(grid.trials()), protocol.rounds
      (2, 11)
    """
    text = pathlib.Path(path).read_text()
    try:
        options = tomllib.loads(text)
        timing = options.pop("protocol", {})
        if not isinstance(timing, dict):
            raise ValueError("protocol must be a table: [protocol].")
        _check_keys(options, Grid, "")
        _check_keys(timing, TimingProtocol, "protocol.")
        if "models" not in options:
            raise ValueError('There is no models = ["mlp", ...].')
        return Grid(**options), TimingProtocol(**timing)
    except ValueError as error:  # which tomllib's are
        raise ValueError(f"{os.fspath(path)}: {error}") from error


def _check_keys(options: dict[str, Any], kind: Any, prefix: str) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    for key in options:
        if key not in names:
            near = difflib.get_close_matches(key, names, 1)
            meant = f" Did you mean {prefix}{near[0]}?" if near else ""
            raise ValueError(
                f"There is no key {prefix}{key}.{meant} Keys: {', '.join(names)}."
            )
