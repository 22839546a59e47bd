"""What a program or a test reads of the checkout, as one digest."""

import ast
import functools
import hashlib
import importlib
import inspect
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata

ROOT = pathlib.Path(__file__).parents[1]
TESTS = ROOT / "tests"
CATALOGUE = TESTS / "mutants" / "catalogue.py"
TABLES = TESTS / "green.json", TESTS / "durations.json"


def digest(*texts: str) -> str:
    """Return a number for texts; others have another."""
    found = hashlib.sha256("\0".join(texts).encode())
    return found.hexdigest()[:16]


@functools.cache
def _text(path: pathlib.Path) -> str:
    return path.read_text()


@functools.cache
def _tree(path: pathlib.Path) -> ast.Module:
    return ast.parse(_text(path))


def _lines(path: pathlib.Path, node: ast.AST) -> range:
    """The lines of a definition, from its first decorator on."""
    first = min([node.lineno, *(x.lineno for x in node.decorator_list)])
    return range(first, node.end_lineno + 1)


def function(where: str) -> str:
    """Return the source of ``"module:function"`` or ``"module:Class.method"``.

    It is empty where there is none.
    """
    module, _, names = where.partition(":")
    path = ROOT / f"{module.replace('.', '/')}.py"
    path = path if path.exists() else path.with_suffix("") / "__init__.py"
    if not path.exists():
        return ""
    node: ast.AST | None = _tree(path)
    for name in names.split("."):
        inner = [x for x in node.body if getattr(x, "name", None) == name]
        if not inner:
            return ""
        node = inner[-1]
    lines = _text(path).splitlines()
    return "\n".join(lines[i - 1] for i in _lines(path, node))


def tests(ids: Iterable[str]) -> list[str]:
    """Return what tests read: their files without other tests, and what these import.

    Of a file with tests that is not asked for, but imported, all counts. Fixtures are
    those of the files themselves and of each ``conftest.py`` above.
    """
    asked: dict[pathlib.Path, set[str]] = {}
    for id in ids:
        file, _, name = id.partition("::")
        asked.setdefault(ROOT / file, set()).add(name.partition("[")[0])
    texts = [_without_others(path, names) for path, names in asked.items()]
    helpers = {path for own in asked for path in [*_imported(own), *_conftests(own)]}
    return [*ids, *texts, *map(_text, sorted(_closed(helpers) - {*asked}))]


def _without_others(path: pathlib.Path, names: set[str]) -> str:
    """The text of a file without the tests that have other names."""
    if not path.exists():
        return ""
    left_out: set[int] = set()
    for node in _tree(path).body:
        name = getattr(node, "name", "")
        if name.startswith("test_") and name not in names:
            left_out |= {*_lines(path, node)}
    lines = enumerate(_text(path).splitlines(), 1)
    return "\n".join(line for number, line in lines if number not in left_out)


def _conftests(path: pathlib.Path) -> Iterator[pathlib.Path]:
    for folder in path.parents:
        if folder.is_relative_to(TESTS) and (folder / "conftest.py").exists():
            yield folder / "conftest.py"


def files(paths: Iterable[pathlib.Path]) -> list[str]:
    """Return the texts of files, and of what they import beside the package."""
    return [*map(_text, sorted(_closed(paths)))]


ELSEWHERE = re.compile(
    r"\b(?:subprocess|Popen|glob|read_text|read_bytes|import_module|pytester)\b"
    r"|(?<!def )\bopen\(|\bimport towerjax as (?!tj\b)|\bshell\b"
)
"""Where imports do not tell what is read: processes, files, commands, other names."""
PAGES = re.compile(r"\bdocs\b|\.md\b|\.ci\b|README|notebooks")
"""What names a page."""


def by_imports(path: pathlib.Path) -> list[str]:
    """Return what a test file reads, and the versions of what it may import.

    It reads itself, its helpers, and the modules of the package that these reach: those
    that they import or name, those that these import, and so on. One of these files may
    start a process, open a file or give a command. It reads all of the checkout then,
    other tests left out, and pages left out that it does not name.
    """
    return [_reached(path), *_versions(), sys.version]


@functools.cache
def _versions() -> tuple[str, ...]:
    """The versions of what the package and its tests need and this machine has."""
    needed = [x for x in metadata.requires("towerjax") or [] if "'docs'" not in x]
    names = {_spelled(re.match(r"[\w.-]+", x)[0]) for x in [*needed, "jaxlib"]}
    there = {_spelled(x.name): x.version for x in metadata.distributions()}
    ours = (names & there.keys()) - {"basedpyright", "ruff"}  # .ci/run asks these
    return tuple(f"{name} {there[name]}" for name in sorted(ours))


def _spelled(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@functools.cache
def _reached(path: pathlib.Path) -> str:
    """A digest of a file, of its helpers, and of the modules that they reach."""
    own = _closed([path, *_conftests(path)]) - _closed([TESTS / "conftest.py"])
    if any(ELSEWHERE.search(_text(x)) for x in own):
        return _of_checkout(any(PAGES.search(_text(x)) for x in own))
    modules = _defined_by(map(_text, own)) | {y for x in own for y in _named_in(x)}
    reached = _all_of(modules, _of_package)
    return digest(*map(_text, sorted(own | reached)))


@functools.cache
def _of_checkout(has_pages: bool) -> str:
    """A digest of all files but tests and the tables that runs of them write."""
    folders = ["towerjax", "tests", "examples", "benchmarks"]
    folders += ["docs", "notebooks", ".ci"] if has_pages else []
    found = [*ROOT.glob("*.toml"), *(ROOT.glob("*.md") if has_pages else ())]
    for folder in folders:
        for path in (ROOT / folder).rglob("*"):
            is_ours = path.is_file() and "__pycache__" not in path.parts
            if is_ours and path not in TABLES and not path.match("test_*.py"):
                found.append(path)
    names = [path.relative_to(ROOT).as_posix() for path in sorted(found)]
    return digest(*names, *((ROOT / name).read_bytes().hex() for name in names))


def by_program(path: pathlib.Path, **_: object) -> list[str]:
    """Return what an example or a notebook reads."""
    texts = files([path]) if path.suffix == ".py" else [_text(path)]
    return [*texts, *package(*texts)]


def by_example(name: str) -> Callable[..., list[str]]:
    """Return a function for tests that are marked ``reads``: what an example reads."""
    return functools.partial(by_program, ROOT / "examples" / name)


def _closed(paths: Iterable[pathlib.Path]) -> set[pathlib.Path]:
    """Files, those of tests, benchmarks and examples that they import, and so on."""
    return _all_of(paths, _imported)


def _all_of(
    paths: Iterable[pathlib.Path],
    next_of: Callable[[pathlib.Path], Iterable[pathlib.Path]],
) -> set[pathlib.Path]:
    """Paths, those that come next to each, and so on."""
    found: set[pathlib.Path] = set()
    todo = {*paths}
    while todo:
        found |= todo
        todo = {x for path in todo for x in next_of(path)} - found
    return found


@functools.cache
def _imported(path: pathlib.Path) -> frozenset[pathlib.Path]:
    """The files of tests, benchmarks and examples that a file imports."""
    return frozenset(x for name in _names_in(path) for x in _files_of(name))


@functools.cache
def _of_package(path: pathlib.Path) -> frozenset[pathlib.Path]:
    """The modules of the package that a file imports, by their names."""
    names = [x for x in _names_in(path) if x.startswith("towerjax.")]
    places = [ROOT / name.replace(".", "/") for name in names]
    files = [y for x in places for y in (x.with_suffix(".py"), x / "__init__.py")]
    return frozenset(x for x in files if x.exists())


def _named_in(path: pathlib.Path) -> set[pathlib.Path]:
    """The modules of the package that a file imports, by their names or as names of it.

    Of a namespace, such as ``contrib``, these are all modules.
    """
    found = {*_of_package(path)}
    for name in _names_in(path):
        top, _, chain = name.partition(".")
        if top == "towerjax" and chain and (defining := _defining(chain)):
            is_namespace = defining.name == "__init__.py"
            found |= {*defining.parent.rglob("*.py")} if is_namespace else {defining}
    return found


@functools.cache
def _names_in(path: pathlib.Path) -> frozenset[str]:
    """The modules that a file imports, and the names that it takes from them."""
    names: set[str] = set()
    for node in ast.walk(_tree(path)) if path.exists() else ():
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(ROOT).parts[: -(node.level or 1)])
            base = f"{package}.{node.module or ''}" if node.level else node.module or ""
            base = base.strip(".")
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call) and _called(node) == "import_plugin":
            names |= {x.value for x in node.args if isinstance(x, ast.Constant)}
    return frozenset(names)


def _called(node: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


@functools.cache
def _files_of(name: str) -> tuple[pathlib.Path, ...]:
    """The files of a module that is ours but not of the package."""
    top, *_ = name.split(".")
    if top == "towerjax":
        return ()
    inner = name.replace(".", "/")
    places = [ROOT / inner, TESTS / inner, ROOT / "examples" / inner]
    places += _by_stem().get(inner, [])
    files = [x.with_suffix(".py") for x in places]
    files += [x / "__init__.py" for x in places]
    # A mutant's digest has its own entry of the catalogue, and not those of all others.
    return tuple(x for x in files if x.exists() and x != CATALOGUE)


@functools.cache
def _by_stem() -> dict[str, list[pathlib.Path]]:
    """Where modules lie that a test imports by their last name alone: in no package."""
    found: dict[str, list[pathlib.Path]] = {}
    for path in TESTS.rglob("*.py"):
        if not (path.parent / "__init__.py").exists():
            found.setdefault(path.stem, []).append(path.with_suffix(""))
    return {name: paths for name, paths in found.items() if name[:2] != "__"}


def package(*texts: str) -> list[str]:
    """Return the modules of towerjax that texts name, or that define what they name.

    These are names like ``tj.run`` and ``towerjax.mesh.absent``. What these modules
    import is not followed.
    """
    return [_text(path) for path in sorted(_defined_by(texts))]


def _defined_by(texts: Iterable[str]) -> set[pathlib.Path]:
    """The files that define the names of towerjax in texts."""
    pattern = r"\b(?:tj|towerjax)((?:\.\w+)+)"
    chains = {chain[1:] for text in texts for chain in re.findall(pattern, text)}
    return {x for chain in chains if (x := _defining(chain))}


@functools.cache
def _defining(chain: str) -> pathlib.Path | None:
    """The file of the innermost name of a chain that has one."""
    value = importlib.import_module("towerjax")
    module = ROOT / "towerjax" / f"{chain.replace('.', '/')}.py"
    if module.exists():
        return module
    found = None
    for name in chain.split("."):
        value = getattr(value, name, None)
        module = value if inspect.ismodule(value) else inspect.getmodule(value)
        file = pathlib.Path(getattr(module, "__file__", None) or "/")
        found = file if file.is_relative_to(ROOT / "towerjax") else found
    return found
