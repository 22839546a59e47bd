"""The habits of the project: names, imports, docstrings, sizes."""

import ast
import collections
import doctest
import functools
import importlib
import inspect
import json
import operator
import os
import pathlib
import pkgutil
import re
import subprocess
import sys
import sysconfig

import forked
import pytest

import towerjax as tj
import towerjax.contrib

ROOT = pathlib.Path(tj.__file__).parent
MODULES = sorted(m.name for m in pkgutil.walk_packages([str(ROOT)], "towerjax."))
# Each room may import itself and those before it, nobody tools or contrib, and contrib
# nothing but the public names.
ROOMS = """
    types jaxprs mesh prover collectives data metrics lowering towers step check make
    layers loop sweeps testing tools tf1
""".split()


PUBLIC_ROOMS = "layers contrib testing tf1".split()  # with their own modules
LATER = "contrib testing tf1 tools".split()  # imported where they are used


def test_public_names_are_few_and_all_that_dir_shows():
    assert dir(tj) == sorted(tj.__all__)
    assert len(tj.__all__) <= 51
    for name in tj.__all__:
        assert getattr(tj, name) is not None


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@functools.cache
def nodes_of(path):
    return [*ast.walk(parsed(path))]


FROM = re.compile(r"from ((?:towerjax|benchmarks)[\w.]*) import (\([^)]*\)|[^\n(]+)")
IMPORT = re.compile(r"import ((?:towerjax|benchmarks)[\w.]*)")


@functools.cache
def imports(path):
    """``(module, names)`` of what a file imports of ours, and ``("", [module])``."""
    text = path.read_text()
    found = [("", [module]) for module in IMPORT.findall(text)]
    for module, names in FROM.findall(text):
        lines = names.strip("()").splitlines()
        flat = "".join(line.partition("#")[0] for line in lines)
        parts = [x.strip().partition(" as ")[0] for x in flat.split(",")]
        found.append((module, [x for x in parts if x]))
    return found


def imports_of(path):
    for module, names in imports(path):
        if not module:
            yield from (name for name in names if name.startswith("benchmarks"))
        elif module.startswith("benchmarks"):  # not shipped
            yield module
        elif module == "towerjax":
            yield from names
        elif module.startswith("towerjax."):
            yield module.split(".")[1]


def test_every_file_is_in_a_package():
    """Of a folder without __init__.py the tests here, and the site, see nothing."""
    files = (path.relative_to(ROOT).with_suffix("") for path in ROOT.rglob("*.py"))
    names = (".".join(("towerjax", *x.parts)).removesuffix(".__init__") for x in files)
    assert sorted(names) == sorted([*MODULES, "towerjax"])


def test_rooms_import_those_before_them():
    there = {path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert there == {*ROOMS, "contrib", "__init__.py", "__main__.py", "py.typed"}
    for number, room in enumerate(ROOMS):
        for path in (ROOT / room).rglob("*.py"):
            others = set(imports_of(path)).difference(ROOMS[: number + 1])
            assert not others, f"{path.relative_to(ROOT)} imports {others}"


STEP_ROOMS = "state passes plan run step".split()


def test_the_rooms_of_a_step_import_those_before_them():
    folder = ROOT / "step"
    files = {path.name for path in folder.iterdir() if path.suffix == ".py"}
    assert files == {"__init__.py", "plan.py", "step.py"}
    for number, room in enumerate(STEP_ROOMS):
        for path in [*(folder / room).glob("*.py"), *folder.glob(f"{room}.py")]:
            inner = [x.split(".") for x in modules_imported(path)]
            others = {x[2] for x in inner if x[1] == "step"}
            others -= {*STEP_ROOMS[: number + 1]}
            assert not others, f"{path.relative_to(ROOT)} imports {others}"


TESTS = ROOT.parent / "tests"
# Beside unit tests: what the suite sets, what the proof is asked, what mutants replace.
LOOK_INSIDE = {"suite.py", "one_tower_programs.py", "project/test_mutants.py"}
LOOK_INSIDE |= {"project/test_prover_alone.py"}  # which blocks rooms
MOST_UNIT_TESTS = 52  # twelve of them hold the rules of the proof against values
ROOMS_OF_TESTS = {*ROOMS, "tf1", "contrib", "laws", "foreign", "project", "cluster"}


def names_of_ours(path):
    """What a file names of towerjax: by an import, as ``tj.a.b``, or in a text."""
    for module, names in imports(path):
        yield from (f"{module}.{name}".strip(".") for name in names)
    text = path.read_text()
    yield from (f"towerjax{x}" for x in re.findall(r"tj((?:\.\w+)+)", text))
    yield from re.findall(r"\"(towerjax(?:\.\w+){2,})\"", text)


@functools.cache
def is_inner(name):
    """Whether a dotted name is of a module that is not public."""
    top, *parts = name.split(".")
    if top != "towerjax" or not parts or parts[0] in (*PUBLIC_ROOMS, "__main__"):
        return False
    heads = [".".join((top, *parts[:n])) for n in range(1, len(parts) + 1)]
    modules = {*heads} & {*MODULES}
    return bool(modules) and (parts[0] not in tj.__all__ or len(modules) > 1)


def looks_inside(path):
    """Whether a file names what is not public."""
    return any(map(is_inner, {*names_of_ours(path)}))


def test_few_tests_look_inside():
    """What a redesign may change, only unit tests of its own room import."""
    found = collections.defaultdict(set)
    for path in TESTS.rglob("*.py"):
        name = path.relative_to(TESTS).as_posix()
        folder = name.split("/")[0]
        in_room = folder in ROOMS_OF_TESTS or not path.name.startswith("test_")
        assert in_room, f"{name} is in no room"
        if looks_inside(path):
            is_unit_test = folder in {*ROOMS, "contrib"}
            found[is_unit_test].add(name)
    assert found[False] == LOOK_INSIDE
    assert len(found[True]) <= MOST_UNIT_TESTS, sorted(found[True])


def test_a_file_of_tests_is_one_idea():
    files = {x.relative_to(TESTS).as_posix(): x for x in TESTS.rglob("test_*.py")}
    lengths = {name: len(x.read_text().splitlines()) for name, x in files.items()}
    long = {name for name, lines in lengths.items() if lines > 700}
    assert not long


def test_what_takes_long_to_import_is_imported_by_the_tests_that_need_it():
    """Each process of the fast part imports all files but those that are slow alone."""
    heavy = "grain nbformat pandas matplotlib sklearn torch tensorflow"
    at_head = re.compile(rf"^(?:import|from) ({heavy.replace(' ', '|')})\b", re.M)
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        assert "\npytestmark = pytest.mark.slow" in text or not at_head.search(text), (
            path
        )


def test_contrib_is_written_on_the_public_names():
    for path in (ROOT / "contrib").rglob("*.py"):
        assert set(imports_of(path)) <= {"contrib"}, path.name
        refuse_inner_attributes(path)
    assert tj.contrib is towerjax.contrib


def refuse_inner_attributes(path):
    """Raise if a file gets at an inner module by way of ``tj``."""
    for chain in re.findall(r"\btj\.(\w+(?:\.\w+)*)", path.read_text()):
        first, *others = chain.split(".")
        room = getattr(tj, first)
        is_inner = any(inspect.ismodule(getattr(room, x, 0)) for x in others)
        assert first in tj.__all__ and not is_inner, chain


def modules_imported(path):
    for module, names in imports(path):
        if module.startswith("towerjax."):
            inner = [f"{module}.{name}" for name in names]
            yield from (x for x in inner if x in MODULES)
            if not all(x in MODULES for x in inner):
                yield module


def test_the_top_floor_looks_into_few_rooms():
    """A redesign of what it does not import leaves it as it is; lower this number.

    It makes plans of steps, so that step.plan does not count.
    """
    files = [*(ROOT / "tf1").rglob("*.py")]
    found = {x for path in files for x in inner_of(path)}
    assert len(found - {"step.plan"}) <= 29, sorted(found)
    for path in files:
        refuse_inner_attributes(path)


def inner_of(path):
    """The modules of the core from which a file of tf1/ takes names that are inner."""
    for module, names in imports(path):
        own = [x for x in names if module and not is_public(module, x)]
        whole = [f"{module}.{x}" for x in own]
        found = [x if x in MODULES else module for x in whole]
        inner = [x.removeprefix("towerjax.") for x in found if x[:9] == "towerjax."]
        yield from (name for name in inner if name.split(".")[0] != "tf1")


@functools.cache
def is_public(module, name):
    """Whether ``from module import name`` gives what a user gets from a public module.

    Public are towerjax and its modules, and towerjax.types, the nouns in signatures.
    """
    if module.split(".")[0] != "towerjax":
        return True
    value = getattr(importlib.import_module(module), name)
    if inspect.ismodule(value) or module == "towerjax":
        return name in tj.__all__ and getattr(tj, name) is value
    public = [getattr(tj, x) for x in tj.__all__]
    rooms = [x for x in public if inspect.ismodule(x)]
    at_top = name in tj.__all__ and getattr(tj, name) is value
    rooms.append(importlib.import_module("towerjax.types"))
    rooms = [room for room in rooms if name in names_of(room)]
    return at_top or any(getattr(room, name) is value for room in rooms)


@functools.cache
def names_of(room):
    return {*dir(room)}


def test_no_module_imports_itself_by_way_of_others():
    waiting = {}
    for name in MODULES:
        path = ROOT.parent / (name.replace(".", "/") + ".py")
        path = path if path.exists() else path.with_suffix("") / "__init__.py"
        waiting[name] = set(modules_imported(path)) - {name}
    while waiting:
        free = [name for name, others in waiting.items() if not others & set(waiting)]
        assert free, f"a circle among {sorted(waiting)}"
        for name in free:
            del waiting[name]


@pytest.mark.slow
def test_only_four_files_name_the_executors():
    words = re.compile(r"\b(shard_map|pmap|NamedSharding)\(|jax\.vmap\(")
    allowed = {"mesh/placement.py", "towers/executors.py"}
    allowed.add("lowering/tower_axis.py")
    allowed.add("mesh/processes.py")  # a row for each process
    allowed.add("collectives/lookups.py")  # how a primitive of ours is mapped
    # Any program, in an example.
    allowed |= {f"prover/programs/{name}.py" for name in ("programs", "same")}
    allowed.add("testing/given.py")  # to programs of others
    # Rows of towers, and what devices share, in an update.
    allowed |= {f"contrib/{name}.py" for name in ("by_owner", "diloco")}
    for path in ROOT.rglob("*.py"):
        found = words.search(path.read_text())
        is_allowed = str(path.relative_to(ROOT)) in allowed
        assert not found or is_allowed, f"{path.name}: {found[0]}"


def test_one_module_imports_what_jax_keeps_private():
    private = re.compile(r"^\s*(?:from|import) (?:jax\._src|jaxlib).*$", re.MULTILINE)
    lines = {
        path.name: private.findall(path.read_text()) for path in ROOT.rglob("*.py")
    }
    assert {name for name, found in lines.items() if found} == {"private_jax.py"}
    for line in lines["private_jax.py"]:  # with the versions of JAX that have it
        assert re.search(r"  # JAX 0\.\d+ to 0\.\d+$", line), line


# What JAX, XLA and Python write: programs, errors, flags, and names of modules.
READ_TEXTS = {
    "check/audit/kept.py",
    "prover/programs/devices.py",
    "prover/programs/processes.py",
    "prover/programs/read.py",
    "check/report/hlo.py",
    "check/report/report.py",
}


def test_no_sentence_of_ours_is_read_again():
    """Where the proof and the checks search a text, another program has written it."""
    searching = {
        path.relative_to(ROOT).as_posix()
        for room in ("prover", "check")
        for path in (ROOT / room).rglob("*.py")
        if re.search(r"^(import|from) re\b", path.read_text(), re.MULTILINE)
    }
    assert searching == READ_TEXTS


def test_a_module_is_short_and_says_what_it_does():
    rule = r"A module has at most (\d+) lines"
    [most] = re.findall(rule, (ROOT.parent / "CONTRIBUTING.md").read_text())
    for path in ROOT.rglob("*.py"):
        text = path.read_text()
        name = path.relative_to(ROOT)
        assert len(text.splitlines()) <= int(most), name
        assert text.startswith('"""'), name
        first = text[3:].splitlines()[0].removesuffix('"""')
        assert len(first) <= 88 and "?" not in first, name


# Commands of the shell, with what they call; one class for each of Flax's two APIs.
SHARED_NAMES = {"TowerBatchNorm", *"bench evaluate launch main prove".split()}


# A private name may occur twice.
DEFINES = re.compile(
    r"^(?:(?:class|def) ([^\W_]\w*)|([^\W_]\w*)(?:: [^=\n]+)? = )", re.MULTILINE
)


def test_a_public_name_is_defined_in_one_module():
    where = collections.defaultdict(set)
    for path in ROOT.rglob("*.py"):
        for name in {x or y for x, y in DEFINES.findall(path.read_text())}:
            where[name].add(str(path.relative_to(ROOT)))
    several = {name: found for name, found in where.items() if len(found) > 1}
    assert several.keys() == SHARED_NAMES, several


def shown_in_the_reference():
    """``(module, function)`` of what the pages under docs/reference/ show."""
    for page in (ROOT.parent / "docs/reference").glob("*.md"):
        if page.stem == "types":  # most are other names for Python's types
            continue
        for name in re.findall(
            r"^::: towerjax\.(\S+)$", page.read_text(), re.MULTILINE
        ):
            if not name.startswith("layers."):  # Flax, whose modules are dataclasses
                value = operator.attrgetter(name)(tj)
                yield value.__module__, value.__qualname__


SHOWN = {pair for pair in shown_in_the_reference()}


def functions_of(module):
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__ or name[0] == "_":
            continue
        if inspect.isfunction(value):
            yield name, value
        if inspect.isclass(value):
            for inner, method in vars(value).items():
                method = getattr(method, "__func__", method)
                if inner[0] != "_" and inspect.isfunction(method):
                    yield f"{name}.{inner}", method


def documented_arguments(doc):
    section = re.search(r"^ *Args:\n(.*?)(?:\n *\n|\Z)", doc, re.DOTALL | re.MULTILINE)
    if not section:
        return []
    lines = section[1].splitlines()
    indent = len(lines[0]) - len(lines[0].lstrip())
    heads = [line for line in lines if re.match(rf" {{{indent}}}[\w*]", line)]
    return [head.strip().split(":")[0].lstrip("*") for head in heads]


def test_documented_arguments_are_the_signatures():
    modules = [importlib.import_module(name) for name in MODULES]
    found = [(module, *pair) for module in modules for pair in functions_of(module)]
    for module, name, function in found:
        doc = inspect.getdoc(function)
        full = f"{module.__name__}.{name}"
        assert doc, f"{full} has no docstring"
        parameters = list(inspect.signature(function).parameters)
        parameters = [p for p in parameters if p not in ("self", "cls")]
        arguments = documented_arguments(doc)
        of_another = re.search(r"\bArguments\b[a-z, ]+\bare those of\s+`(\w+)`", doc)
        if of_another:
            other = inspect.signature(getattr(module, of_another[1]))
            assert parameters == list(other.parameters), full
        elif arguments or (module.__name__, name) in SHOWN:
            assert arguments == parameters, full


@pytest.mark.slow
def test_examples_in_docstrings_run():
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    modules = [importlib.import_module(name) for name in MODULES]
    shown = [x for x in modules if ">>>" in pathlib.Path(x.__file__).read_text()]
    found = {x.__name__: doctest.testmod(x, optionflags=flags) for x in shown}
    assert sum(x.attempted for x in found.values()) > 300
    assert not {name: x for name, x in found.items() if x.failed}


def test_what_users_call_has_an_example():
    rooms = [
        tj,
        tj.tf1,
        tj.estimator,
        tj.sparse,
        tj.towers,
        tj.loop,
        tj.tools,
        tj.testing,
    ]
    for room in rooms:
        for name, value in vars(room).items():
            if inspect.isfunction(value) and name[0] != "_":
                assert ">>>" in value.__doc__, f"{name} shows no example"


@pytest.mark.slow
def test_the_python_body_of_a_function_is_short():
    long = []
    for path in ROOT.rglob("*.py"):
        for node in nodes_of(path):
            if isinstance(node, ast.FunctionDef):
                has_text = ast.get_docstring(node) and len(node.body) > 1
                first = node.body[1 if has_text else 0]
                lines = node.end_lineno - first.lineno + 1
                if lines > 60:
                    long.append(f"{path.name}: {node.name} has {lines} lines")
    assert long == []


@pytest.mark.slow
def test_importing_towerjax_takes_little_more_than_jax_and_brings_nothing_heavy():
    """0.2 s on an idle core of a laptop, and a few times that beside other tests."""
    program = (
        "import sys, time, jax; start = time.process_time(); old = set(sys.modules);"
        " import towerjax; print(time.process_time() - start, *set(sys.modules) - old)"
    )
    command = [sys.executable, "-c", program]
    known = dict(os.environ)
    known.pop("PYTHONDONTWRITEBYTECODE", None)  # the first writes what is not there
    run = functools.partial(subprocess.run, capture_output=True, text=True, check=True)
    times = []
    for _ in range(2):
        seconds, *found = run(command, env=known).stdout.split()
        times.append(float(seconds))
    assert min(times) < 1
    roots = {name.split(".")[0] for name in found}
    assert "towerjax" in roots
    heavy = {"rich", "IPython", "matplotlib", "sklearn", "flax", "orbax"}
    assert not roots & (heavy | {"tensorboardX"})
    assert not set(found) & {f"towerjax.{name}" for name in LATER}


@pytest.mark.slow
def test_the_program_of_the_readme_prints_what_it_shows(tmp_path):
    text = (ROOT.parent / "README.md").read_text()
    block = r"```python\n(.*?)```\n\n```text\n(.*?)```"
    [(program, output)] = re.findall(block, text, re.DOTALL)
    (tmp_path / "train.py").write_text(program)
    assert forked.printed(tmp_path / "train.py") == output


LOOP = """
import numpy as np
import optax
import towerjax as tj

def loss_fn(w, batch, tower):
    return tj.Weighted.mean(w * batch, tower.weight)

strategy = tj.Mirrored()
step = tj.build_train_step(loss_fn, optax.sgd(0.1), strategy)
own = tj.build_step(lambda s, b, t: {}, lambda s, merged: (s, merged), strategy)
evaluate = tj.build_eval_step(lambda w, b, t: {"loss": loss_fn(w, b, t)}, strategy)
state, batch = step.init(0.0), np.ones(4)
for each in (step, own, step.fn, own.fn):
    reveal_type(each(state, batch))
state, metrics = step(state, batch)
reveal_type(state)
reveal_type(evaluate(state, batch))
reveal_type(tj.contrib.train_step(loss_fn, optax.sgd(0.1), strategy)(state, batch))
state, history = tj.run(step, state, [batch])
reveal_type(history.plot("loss"))
"""


@pytest.mark.slow
def test_an_editor_knows_what_a_step_returns(tmp_path):
    (tmp_path / "loop.py").write_text(LOOP)
    # An install of this checkout writes its path, which a checker of types follows. A
    # checkout that is not installed, as in a clone beside it, is named here.
    paths = pathlib.Path(sysconfig.get_path("purelib")).glob("*.pth")
    is_installed = f"{ROOT.parent}\n" in [f"{p.read_text().strip()}\n" for p in paths]
    settings = {} if is_installed else {"extraPaths": [str(ROOT.parent)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    check = ["basedpyright", "--pythonpath", sys.executable]
    done = subprocess.run(
        [sys.executable, "-m", *check], capture_output=True, text=True, cwd=tmp_path
    )
    types = re.findall(r'information: Type of ".*" is "(.*)"', done.stdout)
    both = "tuple[TrainState, dict[str, Any]]"
    expected = [both, "TrainState", "dict[str, Any]", both, "Figure"]
    assert types == expected, done.stdout
