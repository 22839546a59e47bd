"""Which programs are to be audited, and which were: verdicts, kept once a program."""

import contextlib
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.extend.core import ClosedJaxpr, Literal

from towerjax.mesh.processes import call_on_first_process
from towerjax.proof.equation import all_jaxprs, open_jaxpr
from towerjax.proof.findings import ReplicationError
from towerjax.step.look.comparison import AuditReport, NotAudited
from towerjax.step.run.trace import Traced
from towerjax.types import PyTree
from towerjax.types.leaves import key_data
from towerjax.types.version import __version__
from towerjax.types.warning import warn

MOST_PARAMETERS = 250_000_000
"""Of a step that is audited unasked, where no accelerator says what it has left."""

_SMALL = ". Run step.audit(state, batch) with a small model of its kind"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What is asked for around a step's first call: by a run, a benchmark, a test."""

    audit: bool | None = None  # goes before what the step was built with
    folder: str | None = None  # where verdicts are kept, too
    by_default: bool = True  # what steps do that nobody asked


_NOT_ASKED = Asked()
ASKED: ContextVar[Asked] = ContextVar("asked", default=_NOT_ASKED)


@contextlib.contextmanager
def asked(**changes: Any) -> Iterator[None]:
    """Around the first calls of steps: other fields of `Asked`."""
    token = ASKED.set(dataclasses.replace(ASKED.get(), **changes))
    try:
        yield
    finally:
        ASKED.reset(token)


@contextlib.contextmanager
def noting_its_audit() -> Iterator[None]:
    """Around an audit that was asked for: errors say how to leave it out."""
    try:
        yield
    except ReplicationError:
        raise
    except Exception as error:
        error.add_note("The audit ran into this; audit=False leaves it out.")
        raise


def is_wanted(audit: bool | None) -> bool | None:
    """Whether a step built with ``audit=`` is audited; None: if it can be."""
    now = ASKED.get()
    wanted = audit if now.audit is None else now.audit
    return False if wanted is None and not now.by_default else wanted


def tell_not_audited(error: NotAudited, wanted: bool | None) -> None:
    """Say in a line why a step is not audited; raise where somebody asked for it."""
    if wanted:
        raise error
    why = str(error).splitlines()[0].rstrip(".")
    notes = getattr(error, "__notes__", ())
    ours = [x for x in notes if not x.startswith(("-", "The audit"))]  # "-": JAX's
    advice = " ".join([*ours, "audit=False leaves this line out."])
    warn(f"not audited: {why}. {advice}")


def refuse_unasked(traced: Traced, params: PyTree, devices: int) -> None:
    """Raise, on every process, where a step is audited only if somebody asks."""
    if problem := call_on_first_process(lambda: _problem_of(traced, params, devices)):
        raise NotAudited(problem)


def _problem_of(traced: Traced, params: PyTree, devices: int) -> str | None:
    bodies = [x.towers.jaxpr for x in traced.passes]
    effects = {type(x).__name__ for body in bodies for x in body.effects}
    if any("Debug" in x or "IO" in x for x in effects):
        return "its tower function calls Python, as jax.debug.print does"
    return too_large(params, devices)


def too_large(params: PyTree, devices: int) -> str | None:
    """Why so many devices hold no audit of such parameters, if they do not."""
    size = sum(x.size for x in jax.tree.leaves(params)) // devices
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        held = sum(x.nbytes for x in jax.tree.leaves(params)) // devices
        left = stats["bytes_limit"] - stats["bytes_in_use"]
        # A copy, its gradient, that of another run, and what the towers compute.
        if 4 * held > left:
            return f"{size:,} parameters, of which a device cannot hold four{_SMALL}"
    elif size > MOST_PARAMETERS:
        return f"{size:,} parameters, more than {MOST_PARAMETERS:,}{_SMALL}"
    return None


def program_hash(traced: Traced, **options: Any) -> str:
    """A hash of what towers run, with its shapes, constants, options and versions."""
    versions = jax.__version__, __version__, jax.default_backend()
    digest = hashlib.sha256(repr((versions, sorted(options.items()))).encode())
    for each in traced.passes:
        for jaxpr in [x.towers.jaxpr for x in (each.weights, each) if x]:
            # Functions in it have addresses, others in each process.
            digest.update(re.sub(r"0x[0-9a-f]+", "", str(jaxpr)).encode())
            for array in _constants_in(jaxpr):
                digest.update(np.asarray(key_data(array)).tobytes())
    if not traced.passes:  # of members, whose step is traced in its update
        digest.update(re.sub(r"0x[0-9a-f]+", "", str(traced.finish)).encode())
    return digest.hexdigest()


def _constants_in(jaxpr: ClosedJaxpr) -> Iterator[jax.Array]:
    """The arrays of which a jaxpr's text has no numbers, or not all."""
    for each in all_jaxprs(jaxpr):
        yield from getattr(each, "consts", ())
        for eqn in open_jaxpr(each).eqns:
            yield from (x.val for x in eqn.invars if isinstance(x, Literal))


def verdict_on(program: str) -> AuditReport | None:
    """What an audit of the program found, if any is kept; the same on all processes."""
    fields = call_on_first_process(lambda: _read(program))
    if fields is None:
        return None
    lists: dict[str, Any] = {
        k: tuple(x) if isinstance(x, list) else x for k, x in fields.items()
    }
    return AuditReport(**lists)


def keep(program: str, report: AuditReport) -> None:
    """Keep a verdict in memory and in the folders there are."""
    fields = json.loads(json.dumps(dataclasses.asdict(report)))
    _in_memory()[program] = fields
    if jax.process_index() == 0:
        text = json.dumps({"report": fields, "seal": _seal(program, fields)})
        for path in _paths(program):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


@functools.cache
def _in_memory() -> dict[str, dict[str, Any]]:
    """The verdicts of this process."""
    return {}


def _read(program: str) -> dict[str, Any] | None:
    if program in _in_memory():
        return _in_memory()[program]
    for path in _paths(program):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(path.read_text())
            if kept["seal"] == _seal(program, kept["report"]):
                _in_memory()[program] = kept["report"]
                return kept["report"]
    return None


def _seal(program: str, fields: dict[str, Any]) -> str:
    """What ties a verdict to its program: one that was copied or cut has another.

    It is no signature: who may write the folder may put other programs beside it, too.
    """
    text = json.dumps([program, fields], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _paths(program: str) -> list[epath.Path]:
    """The files of a verdict: beside JAX's programs, and those of a run."""
    config: Any = jax.config
    folders = [config.jax_compilation_cache_dir, ASKED.get().folder]
    return [epath.Path(x) / "audited" / f"{program}.json" for x in folders if x]
