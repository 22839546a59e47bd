"""Which programs can be audited, and which were: audit results, kept once a program."""

import contextlib
import dataclasses
import hashlib
import itertools
import json
import os
import pathlib
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args, get_type_hints

import jax
import numpy as np
from etils import epath
from jax.extend.core import ClosedJaxpr, Literal

from towerjax.check.audit.comparison import AuditReport, NotAudited
from towerjax.jaxprs.equation import all_eqns, all_jaxprs, open_jaxpr
from towerjax.mesh.processes import call_on_first_process
from towerjax.proof.findings import ReplicationError
from towerjax.step.run.trace import Traced
from towerjax.types import PyTree
from towerjax.types.boundary import warn
from towerjax.types.refusals import shown
from towerjax.types.trees import key_data
from towerjax.types.version import __version__

MOST_PARAMETERS = 250_000_000
"""Of a step that is audited unasked, where no accelerator says what it has left."""

_MOST_BYTES = 10_000_000  # of a record: what is longer is cut, and is none

_SMALL = ". Run step.audit(state, batch) with a small model of its kind"


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


def told_not_audited(error: NotAudited) -> str:
    """Why a step is not audited, in a line."""
    why = str(error).splitlines()[0].rstrip(".")
    notes = getattr(error, "__notes__", ())
    ours = [x for x in notes if not x.startswith(("-", "The audit"))]  # "-": JAX's
    return " ".join([f"Not audited: {why}", *ours])


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


def program_hash(traced: Traced, **options: Any) -> str | None:
    """A hash of what towers run, with its shapes, constants, options and versions.

    None where they call Python, since no program shows that a callback has changed.
    """
    # Of members, the step is traced in the update.
    jaxprs = [x.towers.jaxpr for x in traced.passes] or [traced.finish]
    return hash_of_programs(jaxprs, options)


def hash_of_programs(
    jaxprs: Sequence[ClosedJaxpr], options: Mapping[str, Any]
) -> str | None:
    """A hash of programs, as of `program_hash`."""
    eqns = itertools.chain.from_iterable(map(all_eqns, jaxprs))
    if any("callback" in eqn.primitive.name for eqn in eqns):
        return None
    versions = jax.__version__, __version__, jax.default_backend()
    digest = hashlib.sha256(repr((versions, sorted(options.items()))).encode())
    for jaxpr in jaxprs:
        # Functions in it have addresses, others in each process.
        digest.update(re.sub(r"0x[0-9a-f]+", "", str(jaxpr)).encode())
        for array in _constants_in(jaxpr):
            digest.update(np.asarray(key_data(array)).tobytes())
    return digest.hexdigest()


def _constants_in(jaxpr: ClosedJaxpr) -> Iterator[jax.Array]:
    """The arrays of which a jaxpr's text has no numbers, or not all."""
    for each in all_jaxprs(jaxpr):
        yield from getattr(each, "consts", ())
        for eqn in open_jaxpr(each).eqns:
            yield from (x.val for x in eqn.invars if isinstance(x, Literal))


def folders_of_records(*others: str | None) -> list[str]:
    """Where audit results are kept: beside JAX's programs, and in ``others``."""
    config: Any = jax.config
    folders = [config.jax_compilation_cache_dir, *others]
    return [os.fspath(folder) for folder in folders if folder]


def audit_result_of(program: str | None, folders: Sequence[str]) -> AuditReport | None:
    """What an audit of the program found, if any is kept; the same on all processes."""
    if program is None:
        return None
    fields = call_on_first_process(lambda: _read(program, folders))
    return fields and _report_of(fields)


def keep(program: str | None, report: AuditReport, folders: Sequence[str]) -> None:
    """Keep an audit result in these folders; say where it cannot be."""
    if program is None or jax.process_index() != 0:
        return
    fields = json.loads(json.dumps(dataclasses.asdict(report)))
    text = json.dumps({"report": fields, "seal": _seal(program, fields)})
    for folder in folders:
        try:
            _write(folder, program, text)
        except Exception as error:  # a store raises what it likes
            warn(
                f"the audit has passed, but its record cannot be kept in {folder!r}, so"
                f" that the next process audits the step again: {error}"
            )


def _read(program: str, folders: Sequence[str]) -> dict[str, Any] | None:
    """The fields of the program's report; what is no record of ours is none at all."""
    for folder in folders:
        with contextlib.suppress(Exception):
            kept = json.loads(_read_text(folder, program))
            fields = kept["report"]
            if kept["seal"] == _seal(program, fields) and _report_of(fields):
                return fields
    return None


def _report_of(fields: dict[str, Any]) -> AuditReport:
    """The report of fields as JSON has them; raise unless each is of its type."""
    kinds = get_type_hints(AuditReport)
    if fields.keys() != kinds.keys():
        raise ValueError(
            f"A report must have the fields {[*kinds]}, but has {[*fields]}."
        )
    values = dict[str, Any]()
    for name, kind in kinds.items():
        value = fields[name]
        [kind, *several] = get_args(kind) or [kind]
        each = value if several else [value]
        if not isinstance(each, list) or any(type(x) is not kind for x in each):
            raise ValueError(f"{name} of a report is {shown(value)}.")
        values[name] = tuple(value) if several else value
    return AuditReport(**values)


def _seal(program: str, fields: dict[str, Any]) -> str:
    """What ties an audit result to its program: one that was copied or cut has another.

    It is no signature: who may write the folder may put other programs beside it, too.
    """
    text = json.dumps([program, fields], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _write(folder: str, program: str, text: str) -> None:
    """Write a record as a whole: beside, and then renamed, where files can be."""
    path = _path(folder, program)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(path, pathlib.Path):  # a store writes files as wholes
        path.write_text(text)
        return
    _refuse_links(path)
    being_made = path.with_suffix(f".{secrets.token_hex(8)}")
    try:
        with open(being_made, "x") as file:
            file.write(text)
        being_made.replace(path)
    finally:
        being_made.unlink(missing_ok=True)


def _read_text(folder: str, program: str) -> bytes:
    """The text of a record, of which none is long."""
    path = _path(folder, program)
    if isinstance(path, pathlib.Path):
        _refuse_links(path)
        if not path.is_file():  # a pipe would not end
            raise FileNotFoundError(path)
    with path.open("rb") as file:
        return file.read(_MOST_BYTES)


def _path(folder: str, program: str) -> Any:
    """The file of an audit result: a path of this machine, or of a store."""
    is_stored = "://" in folder
    made = epath.Path(folder) if is_stored else pathlib.Path(folder)
    return made / "audited" / f"{program}.json"


def _refuse_links(path: pathlib.Path) -> None:
    """Raise for a symbolic link, of which nobody knows where it leads."""
    for each in (path.parent, path):
        if each.is_symlink():
            raise OSError(f"{each} is a symbolic link")
