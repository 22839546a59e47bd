"""Mutants that a program writes: one compare, constant, statement or argument each."""

import ast
import copy
import dataclasses
import pathlib
import random
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .covers import Covered
from .equivalent import SAME
from .mutant import Mutant
from .runner import ROOT, Job, Result, run_all

FLIPPED: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
# With any other, what the module does with the function afterwards would be lost.
DECORATORS = ("property", "staticmethod", "classmethod", "functools.cache")
DECORATORS += ("functools.cached_property", "contextlib.contextmanager", "api_boundary")
# What tells of a mistake of ours, or tells a reader sooner: nothing else.
UNSEEN_KEYWORDS = ("strict", "flush")
# Looks at the defaults of public functions, and runs none of their lines.
OF_DEFAULTS = (
    "tests/laws/refused/test_malformed.py"
    "::test_an_option_has_one_default_wherever_it_stands"
)
FIRST_ROUND = 10
SECOND_ROUND = 40
ROUND_SECONDS = 60.0  # of each later round


def all_mutants(under: str = "towerjax") -> list[Mutant]:
    """Every mutant of every function of the package.

    Returns:
      The mutants, in the order of files and lines; `killed_by` is ``(file, line,
      first, last)``, where the first and the last line are those of its statement.
    """
    path = ROOT / under
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return [mutant for file in files for mutant in _of_file(file)]


def _of_file(file: pathlib.Path) -> Iterator[Mutant]:
    source = file.read_text()
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    module = module.removesuffix(".__init__")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            yield from _of_function(file, source, f"{module}:{node.name}", node)
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    where = f"{module}:{node.name}.{inner.name}"
                    yield from _of_function(file, source, where, inner)


def _of_function(
    file: pathlib.Path, source: str, where: str, node: ast.FunctionDef
) -> Iterator[Mutant]:
    if not all(ast.unparse(x).startswith(DECORATORS) for x in node.decorator_list):
        return
    first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
    lines = source.splitlines(keepends=True)[first - 1 : node.end_lineno]
    text = textwrap.dedent("".join(lines))
    for number, (kind, at, begin, end, new) in enumerate(_sites(text)):
        low, high = _grown(text, begin, end)
        changed = text[low:begin] + new + text[end:high]
        bug = f"{kind}: {' '.join(text[begin:end].split())} -> {new}"
        lines = [str(first + line - 1) for line in at]
        id = f"{where} {lines[0]} {kind} {number}"
        by = str(file.relative_to(ROOT)), *lines
        yield Mutant(id, bug, where, text[low:high], changed, by)


def changes_of(text: str) -> list[tuple[str, str, str]]:
    """What is changed of a function, in the order of a breadth-first walk."""
    text = text.lstrip()
    return [(kind, text[begin:end], new) for kind, _, begin, end, new in _sites(text)]


def _sites(text: str) -> Iterator[tuple[str, tuple[int, ...], int, int, str]]:
    """Kind, lines, where it begins and ends, and what stands there instead."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    [function] = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    for kind, site, new in _changes(function):
        begin = starts[site.lineno - 1] + site.col_offset
        end = starts[(site.end_lineno or 0) - 1] + (site.end_col_offset or 0)
        yield kind, (site.lineno, *_lines_of(function, site)), begin, end, new


def _lines_of(function: ast.FunctionDef, site: Any) -> tuple[int, int]:
    """The lines that run if a site does: of its statement, without what it holds."""
    inside = [
        x
        for x in ast.walk(function)
        if isinstance(x, ast.stmt)
        and x.lineno <= site.lineno <= (site.end_lineno or 0) <= (x.end_lineno or 0)
    ]
    statement: Any = min(inside, key=lambda x: (x.end_lineno or 0) - x.lineno)
    body = getattr(statement, "body", None)
    if statement is function:  # a default; the function's own line ran long ago
        return function.body[0].lineno, function.end_lineno or 0
    last = body[0].lineno - 1 if body else statement.end_lineno
    return statement.lineno, max(statement.lineno, last or 0)


def _grown(text: str, begin: int, end: int) -> tuple[int, int]:
    """The least text around a site that stands once in the function."""
    while text.count(text[begin:end]) != 1:
        begin = max(begin - 1, 0)
        end = min(end + 1, len(text))
    return begin, end


def _changes(function: ast.FunctionDef) -> Iterator[tuple[str, Any, str]]:
    """What is changed of a function: of which kind, where, and to what."""
    waiting: list[ast.AST] = [*function.body, function.args]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Raise) and "NotImplemented" in ast.unparse(node):
            continue  # a method that others replace
        elif isinstance(node, ast.Raise):
            yield "deleted", node, "pass"
        elif isinstance(node, ast.AnnAssign):
            waiting += [node.value] if node.value else []
        elif isinstance(node, ast.keyword) and node.arg in UNSEEN_KEYWORDS:
            continue
        elif isinstance(node, ast.arguments):
            waiting += [*node.defaults, *(x for x in node.kw_defaults if x)]
        elif not isinstance(node, ast.JoinedStr):
            yield from _of_node(node)
            waiting += ast.iter_child_nodes(node)


def _of_node(node: ast.AST) -> Iterator[tuple[str, Any, str]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = copy.copy(node)
        other.ops = [FLIPPED[type(node.ops[0])]()]
        yield "flipped", node, ast.unparse(other)
    elif isinstance(node, ast.BoolOp):
        other = copy.copy(node)
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "flipped", node, f"({ast.unparse(other)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield "constant", node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield "constant", node, repr(node.value + 1)
    elif isinstance(node, ast.Constant) and isinstance(node.value, float):
        yield "constant", node, repr(2 * node.value + 1)
    elif isinstance(node, ast.AugAssign):
        yield "deleted", node, "pass"
    elif isinstance(node, ast.Expr) and not isinstance(node.value, ast.Constant):
        if not isinstance(node.value, ast.Yield | ast.YieldFrom):
            yield "deleted", node, "pass"
    elif isinstance(node, ast.Assign):
        if all(isinstance(x, ast.Attribute | ast.Subscript) for x in node.targets):
            yield "deleted", node, "pass"
    elif isinstance(node, ast.Call):
        for number, keyword in enumerate(node.keywords):
            if keyword.arg is not None and keyword.arg not in UNSEEN_KEYWORDS:
                other = copy.copy(node)
                other.keywords = node.keywords[:number] + node.keywords[number + 1 :]
                yield "dropped", node, ast.unparse(other)


def sample(mutants: Sequence[Mutant], number: int, seed: int) -> list[Mutant]:
    """As many of the mutants, drawn by a seed."""
    rng = random.Random(seed)
    chosen = set(rng.sample(range(len(mutants)), min(number, len(mutants))))
    return [mutant for i, mutant in enumerate(mutants) if i in chosen]


def rounds_of(mutant: Mutant, covers: Mapping[str, Covered]) -> list[Job]:
    """The jobs that try to kill a mutant: all tests that run its lines, some in each.

    Those that run few lines come first, and of few files, since each is imported.

    Returns:
      The jobs; none if no test runs the lines.
    """
    file, line, *lines = mutant.killed_by
    first, last = map(int, lines)
    is_default = int(line) < first
    at = {(file, line) for line in range(first, last + 1)}
    found = [test for test, covered in covers.items() if at & covered.lines]
    found.sort(key=lambda test: (len(covers[test].lines), test))
    files: dict[str, int] = {}
    for test in found:
        files[test.partition("::")[0]] = files.get(test.partition("::")[0], 0) + 1
    own = sorted(files, key=lambda file: (-files[file], file))[:2]
    begin = [test for test in found if test.partition("::")[0] in own][:FIRST_ROUND]
    rest = [test for test in found if test not in begin]
    begin += [OF_DEFAULTS] if begin and is_default else []
    rounds = [begin, rest[:SECOND_ROUND], []]
    spent = 0.0
    for test in rest[SECOND_ROUND:]:
        spent += covers[test].seconds
        if spent > ROUND_SECONDS:
            rounds.append([])
            spent = covers[test].seconds
        rounds[-1].append(test)
    return [Job(mutant.id, tuple(tests), mutant) for tests in rounds if tests]


def run_rounds(
    mutants: Sequence[Mutant],
    covers: Mapping[str, Covered],
    workers: int,
    report: Callable[[Job, Result], None],
) -> dict[str, list[Mutant]]:
    """Run each mutant against the tests of its line, until one fails by it.

    Returns:
      The mutants by what became of them: ``"killed"``, also by a crash,
      ``"survived"``, ``"not run"`` by any test, ``"no answer"``, or ``"not made"``.
    """
    found: dict[str, list[Mutant]] = {}
    waiting = [(mutant, rounds_of(mutant, covers)) for mutant in mutants]
    is_live: set[str] = set()
    while waiting:
        jobs = [jobs[0] for _, jobs in waiting if jobs]
        results = iter(_confirmed(jobs, run_all(jobs, workers, report), workers))
        left = []
        for mutant, jobs in waiting:
            became = "survived" if mutant.id in is_live else "not run"
            if jobs:
                result = next(results)
                if result.outcome == "survived":
                    is_live.add(mutant.id)
                if result.outcome in ("survived", "not live"):
                    left.append((mutant, jobs[1:]))
                    continue
                became = "killed"
                renamed = "not found:" in result.detail  # since recorded
                if result.detail.startswith(mutant.id) or renamed:
                    became = "not made"
                elif result.detail.startswith("no answer"):
                    became = "no answer"
            found.setdefault(became, []).append(mutant)
        waiting = left
    return found


def _confirmed(
    jobs: Sequence[Job], results: Sequence[Result], workers: int
) -> list[Result]:
    """The results; that of a test which fails without the mutant, too, is none.

    Tests that end only without the mutant kill it.
    """
    plain: dict[int, Job] = {}
    for i, (job, result) in enumerate(zip(jobs, results, strict=True)):
        if result.detail.startswith("no answer"):
            plain[i] = dataclasses.replace(job, mutant=None)
        elif result.failed is not None:
            last = [*job.tests, result.failed].index(result.failed)
            tests = job.tests[: last + 1]
            plain[i] = Job(f"{job.name}, as it is", tests, None)
    found = list(results)
    again = run_all([*plain.values()], workers, lambda job, result: None)
    for i, result in zip(plain, again, strict=True):
        if found[i].detail.startswith("no answer"):
            if result.outcome == "passed":
                found[i] = dataclasses.replace(found[i], detail="it does not end")
        elif result.outcome == "failed":
            print(f"fails without a mutant, too: {result.detail}", flush=True)
            found[i] = dataclasses.replace(result, outcome="survived")
    return found


def score(
    number: int, seed: int, under: str, covers: Mapping[str, Covered], workers: int
) -> int:
    """Draw mutants, run them, and print which survive, and the score.

    Returns:
      0 if at least nine of ten that change anything are killed, else 1.
    """
    mutants = [x for x in all_mutants(under) if (x.where, x.bug) not in SAME]
    drawn = sample(mutants, number, seed)

    def report(job: Job, result: Result) -> None:
        print(f"{result.cpu_seconds:5.1f} s  {result.outcome:8}  {job.name}")
        print(f"{'':19} {result.detail[:200]}", flush=True)

    found = run_rounds(drawn, covers, workers, report)
    for became in ("not made", "not run", "no answer", "survived"):
        for mutant in found.get(became, ()):
            print(f"{became}: {':'.join(mutant.killed_by[:2])} {mutant.where}")
            print(f"    {mutant.bug}")
    killed = len(found.get("killed", ()))
    made = len(drawn)
    made -= len(found.get("not made", ()))
    print(f"killed {killed} of {made} generated, {killed / max(made, 1):.0%}")
    return 0 if killed >= 0.9 * made else 1
