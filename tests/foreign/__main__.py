"""Ask towerjax about programs of others, and say what was found.

``FOLDER`` holds their repositories, at the commits of programs.toml: ``FOLDER/brax``,
``FOLDER/flax``. Each program runs in a process of its own, and is asked what its kind
is asked:

* a ``step``, as it is: does it depend on the number of devices?
* a ``loss``, of full batches and of padded ones: is it proved equal to one tower?
* a ``conversion``, as published and as written with towerjax: do its numbers depend on
  the number of devices?

Run: ``python -m tests.foreign FOLDER [--kind step] [--only brax_ppo]``; ``--checkouts``
says how to fill the folder; ``--page docs/evidence.md`` writes rows of steps into
that page; ``--show`` prints the diffs of conversions with what they remove.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from typing import Any

from tests.foreign.conversions import OfConversion, diffs
from tests.foreign.losses import OfLoss
from tests.foreign.program import Program
from tests.foreign.steps import OfStep, mark

START = "<!-- rows -->\n"
END = "<!-- end -->"
KINDS: tuple[type[Program], ...] = (OfStep, OfLoss, OfConversion)


def programs() -> list[Program]:
    """Those of programs.toml."""
    text = pathlib.Path(__file__).with_name("programs.toml").read_text()
    tables = tomllib.loads(text)
    needs = tables.pop("needs")
    found: list[Program] = []
    for kind in KINDS:
        for table in tables.pop(kind.KIND):
            lists = {k: tuple(x) for k, x in table.items() if isinstance(x, list)}
            found.append(kind(**{"needs": needs.get(kind.KIND), **table, **lists}))
    if tables:
        raise ValueError(f"programs.toml has other tables, {[*tables]}.")
    return found


def line(cells: Sequence[str]) -> str:
    """A line of a table."""
    return f"| {' | '.join(x.replace('|', '/') for x in cells)} |"


def head(kind: type[Program]) -> str:
    """The first two lines of a kind's table."""
    return f"{line(kind.HEAD)}\n{'|---' * len(kind.HEAD)}|"


def asked(program: Program, folder: pathlib.Path) -> Any:
    """What is said of a program, in a process of its own; None where it fails."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.foreign", str(folder)]
    command += ["--kind", program.KIND, "--here", program.name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr[-3000:], file=sys.stderr)
        return None
    return json.loads(done.stdout.splitlines()[-1])


def write(page: pathlib.Path, name: str, row: str) -> None:
    """Put the row of a step in place of its last one."""
    before, _, rest = page.read_text().partition(START)
    rows, _, tail = rest.partition(END)
    kept = [x for x in rows.splitlines() if "<!--" in x and mark(name) not in x]
    order = [mark(x.name) for x in programs()]
    new = sorted([*kept, row], key=lambda x: [mark in x for mark in order].index(True))
    lines = "\n".join([head(OfStep), *new, ""])
    page.write_text(before + START + lines + END + tail)


def fetched(chosen: Sequence[Program]) -> str:
    """The commands that fetch the sources of programs, and what they need."""
    lines: dict[str, None] = {}
    for program in chosen:
        if program.repository:
            lines[f"git clone https://github.com/{program.repository}"] = None
            lines[f"git -C {program.checkout} checkout -q {program.commit}"] = None
        lines[f"pip install {program.needs}"] = None
    return "\n".join(lines)


def chosen_by(options: argparse.Namespace) -> list[Program]:
    """The programs that the command line names."""
    found = [x for x in programs() if options.only in x.name]
    return [x for x in found if options.kind in (None, x.KIND)]


def check(options: argparse.Namespace) -> list[str]:
    """Ask about each program; the names of those that said what is not expected."""
    wrong = []
    last = None
    for program in chosen_by(options):
        start = time.perf_counter()
        told = asked(program, options.folder)
        if told is None:
            wrong.append(program.name)
            continue
        if program.KIND != last:
            last = program.KIND
            print(f"\n{head(type(program))}")
        rows = [line(cells) for cells in program.rows(told)]
        print(*rows, sep="\n")
        if options.page and isinstance(program, OfStep):
            write(options.page, program.name, rows[0])
        says = tuple(program.says(told))
        wrong += [program.name] * (says != program.expects)
        seconds = f"{time.perf_counter() - start:.0f} s"
        print(f"{program.name}: {', '.join(says)}; {seconds}", file=sys.stderr)
    return wrong


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables; end with status 1 where an answer is not the expected one."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("folder", type=pathlib.Path, nargs="?", default=pathlib.Path())
    parser.add_argument("--kind", choices=[x.KIND for x in KINDS])
    parser.add_argument("--only", default="", help="programs whose names contain this")
    parser.add_argument("--page", type=pathlib.Path, help="where rows of steps stand")
    parser.add_argument("--checkouts", action="store_true", help="commands that fetch")
    parser.add_argument("--show", action="store_true", help="print diffs")
    parser.add_argument(
        "--write", action="store_true", help="diffs of edited checkouts"
    )
    parser.add_argument("--here", metavar="NAME", help="ask here, as JSON")
    options = parser.parse_args(argv)
    if options.here is not None:
        [program] = [x for x in chosen_by(options) if x.name == options.here]
        print(json.dumps(program.ask(options.folder)))
        return
    if options.checkouts:
        print(fetched(chosen_by(options)))
        return
    if options.show or options.write:
        for program in chosen_by(options):
            if isinstance(program, OfConversion):
                root = options.folder / program.checkout
                if options.write:
                    diffs.write(program.name, root, program.commit)
                else:
                    diffs.show(program.name, root)
        return
    if wrong := check(options):
        sys.exit(f"Failed, or another answer than expected: {wrong}")


if __name__ == "__main__":
    main()
