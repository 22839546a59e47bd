"""The pytest plugin of towerjax: ``@pytest.mark.same(devices=(1, 2, 4))``.

It is off until ``--towerjax`` or ``-p pytest_towerjax``. It is not a module of
``towerjax``, because pytest imports it in each session, and that would import JAX
before a ``conftest.py`` could set JAX's variables.
"""

import os
import sys
from typing import Any

import pytest

_NAME = "pytest_towerjax"
_MARK = (
    "same(devices=(1, 2, 4), rtol=None): what the test returns, (fn, args), gives the"
    " same for each number; or another number by its name, micro_batches=(1, 2, 4)"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the plugin."""
    group = parser.getgroup("towerjax")
    group.addoption(
        "--towerjax", action="store_true", help="turn on the marker 'same' of towerjax"
    )
    group.addoption(
        "--towerjax-devices",
        type=int,
        default=8,
        metavar="N",
        help="how many devices of the CPU JAX makes, with --towerjax (8)",
    )


def _is_on(options: Any) -> bool:
    return options.towerjax or _NAME in (options.plugins or ())


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Set the number of JAX's devices before a ``conftest.py`` imports JAX."""
    options = early_config.known_args_namespace
    if not _is_on(options) or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    number = options.towerjax_devices
    os.environ["JAX_NUM_CPU_DEVICES"] = str(number)
    if "jax" in sys.modules:  # another plugin was first
        sys.modules["jax"].config.update("jax_num_cpu_devices", number)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the class that runs its tests or names the flag."""
    config.addinivalue_line("markers", _MARK)
    kind = _Same if _is_on(config.known_args_namespace) else _Off
    config.pluginmanager.register(kind(), f"{_NAME}.same")


class _Off:
    """The hooks where the plugin is off: they skip marked tests, and name the flag."""

    @pytest.hookimpl
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give the argument that has the number's name a value, so that it is there."""
        mark = metafunc.definition.get_closest_marker("same")
        name = _read(mark)[0] if mark and _is_ours(mark) else ""
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, [()], ids=["off"])

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Skip a marked test."""
        mark = pyfuncitem.get_closest_marker("same")
        if mark is None or not _is_ours(mark):
            return None
        pytest.skip(f"{pyfuncitem.name} is marked same(...): run pytest --towerjax.")


def _is_ours(mark: pytest.Mark) -> bool:
    """Whether a marker of this name is that of towerjax, and not of another project."""
    numbers = {name: x for name, x in mark.kwargs.items() if name != "rtol"}
    return not mark.args and [type(x) for x in numbers.values()] in ([tuple], [list])


class _Same:
    """The hooks that run tests with the marker."""

    @pytest.hookimpl
    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Give the argument that has the number's name its values."""
        mark = metafunc.definition.get_closest_marker("same")
        name, values, _ = _read(mark) if mark else ("", (), None)
        if name in metafunc.fixturenames:
            told = "-".join(map(str, values))
            metafunc.parametrize(name, [values], ids=[told])

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Compare the results of a marked test for each number."""
        mark = pyfuncitem.get_closest_marker("same")
        if mark is None:
            return None
        from towerjax.testing import ProgramDied, SplitError

        try:
            report = _compared(pyfuncitem, *_read(mark))
        except (SplitError, ProgramDied) as error:
            raise pytest.fail.Exception(str(error), pytrace=False) from None
        pyfuncitem.add_report_section("call", "towerjax", str(report))
        return True


def _read(mark: pytest.Mark) -> tuple[str, Any, float | None]:
    """Read in a mark the name of the number, its values, and the tolerance."""
    options = dict(mark.kwargs)
    rtol = options.pop("rtol", None)
    if mark.args or len(options) != 1:
        raise pytest.UsageError(
            "Write @pytest.mark.same(devices=(1, 2, 4)), or one other number by its"
            f" name; got {mark.args} and {mark.kwargs}."
        )
    [(name, values)] = options.items()
    return name, values, rtol


def _compared(item: pytest.Function, name: str, values: Any, rtol: float | None) -> Any:
    """Compare a test's program by `towerjax.testing`, and return the report."""
    from towerjax.testing import same_for, same_on_devices

    arguments = item._fixtureinfo.argnames
    given = {x: item.funcargs[x] for x in arguments if x != name}
    if name in arguments:

        def make(value: Any) -> Any:
            return item.obj(**given, **{name: value})

        from towerjax.prover.programs.words import BY_OPTION

        if name in BY_OPTION:
            form = f"{item.originalname}({name})"
            return _checked(make, form, BY_OPTION[name], values, rtol)
        return same_for(make, rtol=rtol, **{name: values})
    if name != "devices" or given:
        takes = f"{item.originalname}({', '.join(arguments)})"
        raise pytest.UsageError(
            f"{takes} must take {name}. A test without arguments, marked"
            " same(devices=...), is run in a process for each number of devices."
        )
    return same_on_devices(item.obj, values, rtol=rtol)


def _checked(make: Any, form: str, words: Any, values: Any, rtol: float | None) -> str:
    """Prove what can be proved, run the rest, and report on both."""
    from towerjax.tools.checked import check_program
    from towerjax.tools.faults import told_of_faults

    looked = check_program(make, form, values, rtol, words=words, always_run=False)
    if looked.faults:
        told = "\n".join(told_of_faults(looked.faults, words))
        raise pytest.fail.Exception(told, pytrace=False)
    return "\n".join(looked.texts)
