"""Run public programs as published and as written with towerjax, on 1, 2 and 4 devices.

Each program is a checkout of a pinned commit in a folder that you give; a diff beside
this file is applied to a copy of it. A diff, as of ``diff -n``, says which lines go by
their numbers, and holds only what is added. Both run a few steps in float64, on data
that are made here: the same rows a step, whatever the devices.

Run: ``python -m benchmarks.conversions FOLDER``; ``--checkouts`` says how to fill the
folder, ``--show nequix`` prints that diff with what it removes.
"""

import argparse
import dataclasses
import difflib
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


@dataclasses.dataclass(frozen=True)
class Program:
    """A public program, and how many towers its conversion has."""

    name: str  # of its diff, and of the module here that runs it
    repository: str
    commit: str
    parts: tuple[str, ...]  # of the checkout, that are copied
    needs: str  # from the package index
    towers: int
    exact: tuple[str, ...]  # numbers that are those of one device as published

    @property
    def folder(self) -> str:
        """The name of its checkout."""
        return self.repository.split("/")[-1]


PROGRAMS = (
    Program(
        "nequix",
        "atomicarchitects/nequix",
        "0ffdf881603d2c97f9105c64c3ec2df74dc1c224",
        ("nequix",),
        "equinox e3nn-jax jraph ase matscipy tqdm pyyaml cloudpickle",
        4,
        ("train/loss", "train/grad_norm", "val/loss", "val/force_mae"),
    ),
    Program(
        "brax_ppo",
        "google/brax",
        "0b96d056328d15ea7ebfd3ce07f42be72ec76e40",
        ("brax",),
        "mujoco mujoco-mjx jaxopt",
        8,
        ("one gradient",),
    ),
    Program(
        "roberta",
        "nipunsadvilkar/roberta-base-mr",
        "b81b203d53ca3d22d8a53c6b78ebb030f490f3db",
        ("run_mlm_flax.py",),
        "transformers==4.46.3 datasets tqdm",
        8,
        ("loss of the last step", "norm"),
    ),
)


@dataclasses.dataclass(frozen=True)
class Diff:
    """What becomes of one file."""

    path: str
    blob: str  # git's hash of the file before
    removed: dict[int, int]  # first line -> how many
    added: dict[int, list[str]]  # the line before them -> lines

    def applied(self, text: bytes) -> bytes:
        """The file after; another file than the pinned one is refused."""
        if (blob := blob_of(text)) != self.blob:
            raise ValueError(f"{self.path} is not that of the pinned commit: {blob=}")
        lines = text.decode().splitlines(keepends=True)
        found = list[str]()
        gone = {n + i for n, count in self.removed.items() for i in range(count)}
        for number, line in enumerate(["", *lines]):
            found += [line] * (number not in gone) + self.added.get(number, [])
        return "".join(found).encode()


def blob_of(text: bytes) -> str:
    """Git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(text) + text).hexdigest()


def diffs_of(name: str) -> list[Diff]:
    """The diffs in a file here."""
    lines = iter((HERE / f"{name}.diff").read_text().splitlines(keepends=True))
    found: list[Diff] = []
    for line in lines:
        kind = line[0]
        rest = line[1:].split()
        if line.startswith("file "):
            found.append(Diff(rest[1], rest[2], {}, {}))
        elif kind == "d":
            found[-1].removed[int(rest[0])] = int(rest[1])
        elif kind == "a":
            added = [next(lines) for _ in range(int(rest[1]))]
            found[-1].added[int(rest[0])] = added
        elif kind != "#":
            raise ValueError(f"{name}.diff has the line {line!r}")
    return found


def counts(name: str) -> tuple[int, int]:
    """How many lines go and come."""
    diffs = diffs_of(name)
    removed = sum(sum(diff.removed.values()) for diff in diffs)
    return removed, sum(len(x) for diff in diffs for x in diff.added.values())


def write(program: Program, folder: pathlib.Path) -> None:
    """Write a diff anew, of a checkout whose files were edited."""
    place = HERE / f"{program.name}.diff"
    lines = place.read_text().splitlines(keepends=True)
    found = "".join(line for line in lines if line.startswith("#"))
    for path in [diff.path for diff in diffs_of(program.name)]:
        checkout = folder / program.folder
        said = ["git", "-C", str(checkout), "show", f"{program.commit}:{path}"]
        before = subprocess.run(said, stdout=subprocess.PIPE, check=True).stdout
        found += f"file {path} {blob_of(before)}\n"
        command = ["diff", "-n", "-", str(checkout / path)]
        found += subprocess.run(
            command, input=before, stdout=subprocess.PIPE
        ).stdout.decode()
    place.write_text(found)


def copies(program: Program, folder: pathlib.Path, into: pathlib.Path) -> None:
    """Copy a checkout to ``into/before`` and ``after``, and apply the diff there."""
    for when in ("before", "after"):
        for part in program.parts:
            source = folder / program.folder / part
            place = into / when / part
            if source.is_dir():
                shutil.copytree(source, place)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)
    for diff in diffs_of(program.name):
        path = into / "after" / diff.path
        path.write_bytes(diff.applied(path.read_bytes()))


def numbers(program: Program, folder: pathlib.Path, devices: int) -> dict[str, float]:
    """What the program prints last, in a process of its own."""
    towers = program.towers if folder.name == "after" else 0
    module = f"benchmarks.conversions.{program.name}"
    done = subprocess.run(
        [sys.executable, "-m", module, str(devices), str(towers)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(HERE.parents[1]), "XLA_FLAGS": QUICK},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{program.name}, {devices} devices: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def apart(values: list[float]) -> float:
    """How far numbers are from the first, relative to it."""
    return max(abs(x - values[0]) for x in values) / abs(values[0])


def rows(
    program: Program, folder: pathlib.Path, devices: list[int]
) -> tuple[str, bool]:
    """The table's rows of one program, and whether it is right after."""
    with tempfile.TemporaryDirectory() as name:
        into = pathlib.Path(name)
        copies(program, folder, into)
        found = {
            when: [numbers(program, into / when, d) for d in devices]
            for when in ("before", "after")
        }
    text = ""
    right = True
    for name in found["before"][0]:
        before, after = ([run[name] for run in found[when]] for when in found)
        right = right and apart(after) < 1e-6
        if name in program.exact:
            right = right and apart([before[0], *after]) < 1e-6
        shown = " | ".join(f"{x:.7g}" for x in [*before, *after])
        far = f"{apart(before):.1e} | {apart(after):.0e}"
        text += f"| {program.folder} | {name} | {shown} | {far} |\n"
    return text, right


def show(program: Program, folder: pathlib.Path) -> None:
    """Print a unified diff."""
    for diff in diffs_of(program.name):
        before = (folder / program.folder / diff.path).read_bytes()
        after = diff.applied(before)
        old, new = (x.decode().splitlines(keepends=True) for x in (before, after))
        sys.stdout.writelines(difflib.unified_diff(old, new, diff.path, diff.path))


def main() -> None:
    """Print the tables; end with status 1 where a converted program is not right."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, nargs="?", default=pathlib.Path())
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--checkouts", action="store_true", help="commands that fetch")
    parser.add_argument("--show", action="store_true", help="print the diffs")
    parser.add_argument("--write", action="store_true", help="of edited checkouts")
    options = parser.parse_args()
    programs = [x for x in PROGRAMS if options.only in x.name]
    if options.checkouts:
        for program in programs:
            print(f"git clone https://github.com/{program.repository}")
            print(f"git -C {program.folder} checkout -q {program.commit}")
            print(f"pip install {program.needs}")
        return
    if options.show or options.write:
        for program in programs:
            (show if options.show else write)(program, options.folder)
        return
    print(
        "| program | commit | towers | lines removed | added |\n|---|---|---|---|---|"
    )
    for program in programs:
        removed, added = counts(program.name)
        at = program.commit[:8]
        print(f"| {program.folder} | {at} | {program.towers} | {removed} | {added} |")
    heads = [f"{when}, D={d}" for when in ("before", "after") for d in options.devices]
    print(f"\n| program | number | {' | '.join(heads)} | apart before | after |")
    print("|---" * (len(heads) + 4) + "|")
    all_right = True
    for program in programs:
        text, right = rows(program, options.folder, options.devices)
        all_right = all_right and right
        print(text, end="", flush=True)
    sys.exit(int(not all_right))


if __name__ == "__main__":
    main()
