"""A mutant: one function of towerjax with other text in one place."""

import ast
import dataclasses
import functools
import importlib
import inspect
import linecache
import pathlib
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import pytest

COUNTER = "_mutant_is_live_"


class MutantError(Exception):
    """The mutant cannot be made: its function or its text is not there."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One seeded bug.

    Attributes:
      id: Its name; B01 to B40 are those of the registry.
      bug: What goes wrong.
      where: The function, as ``"module:function"`` or ``"module:Class.method"``.
      old: Text that stands once in the function's source.
      new: What stands there in the mutant.
      killed_by: Node ids of tests, of which one must fail.
    """

    id: str
    bug: str
    where: str
    old: str
    new: str
    killed_by: tuple[str, ...]


def apply(mutant: Mutant, patch: pytest.MonkeyPatch, live: Callable[[], None]) -> None:
    """Put the mutated function everywhere where the original is looked up."""
    module_name, _, path = mutant.where.partition(":")
    try:
        module = importlib.import_module(module_name)
        *owners, name = path.split(".")
        owner: Any = functools.reduce(getattr, owners, module)
        original = vars(owner)[name]
    except (ImportError, AttributeError, KeyError) as error:
        raise MutantError(f"{mutant.id}: there is no {mutant.where}") from error
    patch.setattr(module, COUNTER, live, raising=False)
    holders = list(_holders(original, module_name.partition(".")[0]))
    for holder, key in holders:
        if isinstance(holder, dict):  # a decorator may put the mutant there itself
            patch.setitem(holder, key, original)
    tables = [(table, dict(table)) for table in _tables(module_name.partition(".")[0])]
    made = _made(mutant, original, owner if inspect.isclass(owner) else None)
    for table, before in tables:  # a decorator may wrap what it puts there
        for key in [key for key in before if table.get(key) is not before[key]]:
            new = table[key]
            table[key] = before[key]
            patch.setitem(table, key, new)
    if isinstance(original, staticmethod) and not isinstance(made, staticmethod):
        made = staticmethod(made)  # __new__ is one without saying so
    if isinstance(made, functools.cached_property):
        made.__set_name__(owner, name)
    if inspect.isclass(owner):
        patch.setattr(owner, name, made)
    for holder, key in holders:
        if isinstance(holder, dict):
            patch.setitem(holder, key, made)
        else:
            patch.setattr(holder, key, made)


def _tables(package: str) -> Iterator[dict[Any, Any]]:
    """The dicts that modules of a package have."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            pairs = list(vars(module).items())
            yield from (
                x for key, x in pairs if isinstance(x, dict) and key[:2] != "__"
            )


def _holders(original: Any, package: str) -> Iterator[tuple[Any, Any]]:
    """Modules, tables and classes that hold the object, and under which name."""
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] != package:
            continue
        for name, value in list(vars(module).items()):
            if value is original:
                yield module, name
            elif isinstance(value, dict) and not name.startswith("__"):
                yield from ((value, k) for k, v in value.items() if v is original)
            elif isinstance(value, type) and value.__module__ == module_name:
                for key, x in vars(value).items():  # a class may give it on
                    if x is original or getattr(x, "__wrapped__", None) is original:
                        yield value, key


def _made(mutant: Mutant, original: Any, owner: type | None) -> Any:
    function = original
    for inner in ("fget", "func", "__func__"):
        function = getattr(function, inner, function)
    function = inspect.unwrap(function)
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise MutantError(
            f"{mutant.id}: the text {mutant.old!r} stands {source.count(mutant.old)}"
            f" times in {mutant.where}, expected once"
        )
    line = source.count("\n", 0, source.index(mutant.old)) + 1
    text = source.replace(mutant.old, mutant.new)
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise MutantError(f"{mutant.id}: {error}") from error
    _count(tree, line, line + mutant.new.count("\n"))
    definition = tree.body[0]
    if owner is not None and "super()" in text:
        # A method finds its class in a variable of the scope around it.
        around: Any = ast.parse("def around(__class__):\n  pass").body[0]
        around.body = [definition, ast.parse(f"return {function.__name__}").body[0]]
        tree.body = [around]
    # Below the package, so that its frames are not taken for the user's.
    file = pathlib.Path(inspect.getfile(function)).parent / f"<mutant {mutant.id}>"
    linecache.cache[str(file)] = (len(text), None, text.splitlines(True), str(file))
    scope: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), str(file), "exec")
    exec(code, function.__globals__, scope)
    return scope["around"](owner) if "around" in scope else scope[function.__name__]


def _count(tree: ast.Module, first: int, last: int) -> None:
    """A call of the counter before the innermost statement of these lines."""
    found: list[tuple[int, list[ast.stmt], ast.stmt]] = []
    for node in ast.walk(tree):
        for field in ("body", "orelse", "finalbody"):
            statements = getattr(node, field, None)
            for statement in statements if isinstance(statements, list) else ():
                end = statement.end_lineno or 0
                if statement.lineno <= first and last <= end:
                    found.append((end - statement.lineno, statements, statement))
    call: Any = ast.parse(f"{COUNTER}()").body[0]
    _, statements, statement = min(found, key=lambda x: x[0], default=(0, [], None))
    if statement is None or statement is tree.body[0]:
        definition: Any = tree.body[0]
        statements = definition.body
        statement = definition.body[-1]
        statements.insert(1 if ast.get_docstring(definition) else 0, call)
    else:
        statements.insert(statements.index(statement), call)
    ast.copy_location(call, statement)
    for node in ast.walk(call):
        ast.copy_location(node, statement)
