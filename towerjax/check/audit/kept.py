"""Tell which programs can be audited, and store audit results, one for each program."""

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
from jax.extend.core import ClosedJaxpr

from towerjax.jaxprs.sites import all_eqns, constants_in
from towerjax.mesh.placement import Placement
from towerjax.mesh.processes import Processes
from towerjax.prover.comparison import AuditReport, NotAudited
from towerjax.prover.replication.findings import ReplicationError
from towerjax.step.run.trace import Traced
from towerjax.types import PyTree
from towerjax.types.boundary import warn
from towerjax.types.refusals import shown
from towerjax.types.trees import key_data
from towerjax.types.version import __version__

MOST_PARAMETERS = 250_000_000
"""A step with more parameters is audited on request only, if free memory is unknown."""

_MOST_BYTES = 10_000_000  # the most bytes read of a record; if cut, it is invalid

_SMALL = ". Run step.audit(state, batch) with a small model of its kind"


@contextlib.contextmanager
def noting_its_audit() -> Iterator[None]:
    """Add to errors of an audit that nobody asked for how to switch it off."""
    try:
        yield
    except ReplicationError:
        raise
    except Exception as error:
        error.add_note(
            "The audit of the step raised this error; audit=False leaves it out."
        )
        raise


def told_not_audited(error: NotAudited) -> str:
    """Tell in one line why a step is not audited."""
    why = str(error).splitlines()[0].rstrip(".")
    notes = getattr(error, "__notes__", ())
    # Notes that JAX adds to an error begin with "-"; they are left out.
    ours = [x for x in notes if not x.startswith(("-", "The audit"))]
    return " ".join([f"Not audited: {why}", *ours])


def refuse_unasked(traced: Traced, params: PyTree, placement: Placement) -> None:
    """Raise `NotAudited`, on every process, if a step is audited only on request.

    This is so if its tower function calls Python, or has too many parameters.
    """
    devices = placement.devices_each
    first = placement.processes
    if problem := first.call_on_first(lambda: _problem_of(traced, params, devices)):
        raise NotAudited(problem)


def _problem_of(traced: Traced, params: PyTree, devices: int) -> str | None:
    bodies = [x.towers.jaxpr for x in traced.passes]
    effects = {type(x).__name__ for body in bodies for x in body.effects}
    if any("Debug" in x or "IO" in x for x in effects):
        return "its tower function calls Python, as jax.debug.print does"
    return too_large(params, devices)


def too_large(params: PyTree, devices: int) -> str | None:
    """Tell why devices cannot hold an audit of such parameters; None if they can."""
    size = sum(x.size for x in jax.tree.leaves(params)) // devices
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        held = sum(x.nbytes for x in jax.tree.leaves(params)) // devices
        left = stats["bytes_limit"] - stats["bytes_in_use"]
        # An audit needs about four times the memory of the parameters: for a copy, its
        # gradient, the gradient of another run, and temporary arrays of the towers.
        if 4 * held > left:
            return (
                f"it has {size:,} parameters, of which a device cannot hold four"
                f" copies{_SMALL}"
            )
    elif size > MOST_PARAMETERS:
        return f"it has {size:,} parameters, more than {MOST_PARAMETERS:,}{_SMALL}"
    return None


def program_hash(traced: Traced, **options: Any) -> str | None:
    """Hash the towers' program: its text, constants, options and versions.

    The hash is None if the program calls Python: the program then stays the same if the
    Python function is changed.
    """
    # A step that trains several models has no passes: the update runs its towers.
    jaxprs = [x.towers.jaxpr for x in traced.passes] or [traced.finish]
    return hash_of_programs(jaxprs, options)


def hash_of_programs(
    jaxprs: Sequence[ClosedJaxpr], options: Mapping[str, Any]
) -> str | None:
    """Hash several programs; see `program_hash`."""
    eqns = itertools.chain.from_iterable(map(all_eqns, jaxprs))
    if any("callback" in eqn.primitive.name for eqn in eqns):
        return None
    versions = jax.__version__, __version__, jax.default_backend()
    digest = hashlib.sha256(repr((versions, sorted(options.items()))).encode())
    for jaxpr in jaxprs:
        # The text shows functions with their addresses in memory. These differ between
        # processes, so they are left out of the hash.
        digest.update(re.sub(r"0x[0-9a-f]+", "", str(jaxpr)).encode())
        for array in constants_in(jaxpr):
            digest.update(np.asarray(key_data(array)).tobytes())
    return digest.hexdigest()


def folders_of_records(*others: str | None) -> list[str]:
    """List the folders of stored audit results.

    They are JAX's compilation cache, if it is set, and ``others`` that are not None.
    """
    config: Any = jax.config
    folders = [config.jax_compilation_cache_dir, *others]
    return [os.fspath(folder) for folder in folders if folder]


def audit_result_of(
    program: str | None, folders: Sequence[str], processes: Processes
) -> AuditReport | None:
    """Look up the report of an earlier audit of the program; None if none.

    The first process reads it, and all processes get what it read.
    """
    if program is None:
        return None
    fields = processes.call_on_first(lambda: _read(program, folders))
    return fields and _report_of(fields)


def keep(program: str | None, report: AuditReport, folders: Sequence[str]) -> None:
    """Store an audit result in these folders; warn if one of them cannot store it."""
    if program is None:
        return
    fields = json.loads(json.dumps(dataclasses.asdict(report)))
    text = json.dumps({"report": fields, "seal": _seal(program, fields)})
    for folder in folders:
        try:
            _write(folder, program, text)
        except Exception as error:  # the folder may be remote, with errors of its own
            warn(
                f"the audit passed, but its record cannot be kept in {folder!r}, so the"
                f" next process will audit the step again: {error}"
            )


def _read(program: str, folders: Sequence[str]) -> dict[str, Any] | None:
    """Read the fields of a program's report; None if no record is valid."""
    for folder in folders:
        with contextlib.suppress(Exception):
            stored = json.loads(_read_text(folder, program))
            fields = stored["report"]
            if stored["seal"] == _seal(program, fields) and _report_of(fields):
                return fields
    return None


def _report_of(fields: dict[str, Any]) -> AuditReport:
    """Make a report of these fields; raise if one of them has a wrong type."""
    kinds = get_type_hints(AuditReport)
    if fields.keys() != kinds.keys():
        raise ValueError(
            f"A report must have the fields {[*kinds]}, but has {[*fields]}."
        )
    values = dict[str, Any]()
    for name, kind in kinds.items():
        value = fields[name]
        [kind, *several] = get_args(kind) or [kind]
        items = value if several else [value]
        is_list = isinstance(items, list)
        if not is_list or not all(_is_shown(x, kind) for x in items):
            raise ValueError(
                f"{name} of a report is {shown(value)}, which the field cannot have."
            )
        values[name] = tuple(value) if several else value
    return AuditReport(**values)


def _is_shown(value: Any, kind: type) -> bool:
    """Return whether a value has this type, and is safe for a terminal.

    A terminal would obey the escapes of a text that somebody else wrote.
    """
    return type(value) is kind and (kind is not str or value.isprintable())


def _seal(program: str, fields: dict[str, Any]) -> str:
    """Hash a program with its audit result, so that a copied result fails.

    It is no signature: whoever may write to the folder may also replace programs there.
    """
    text = json.dumps([program, fields], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _write(folder: str, program: str, text: str) -> None:
    """Write a record under a temporary name, and rename it when it is complete.

    A remote store does not need this, because readers never see a file in part there.
    """
    path = _path(folder, program)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(path, pathlib.Path):  # it is in a remote store
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
    """Read the bytes of a record, at most ``_MOST_BYTES``."""
    path = _path(folder, program)
    if isinstance(path, pathlib.Path):
        _refuse_links(path)
        if not path.is_file():  # it may be a pipe, and reading that might never end
            raise FileNotFoundError(path)
    with path.open("rb") as file:
        return file.read(_MOST_BYTES)


def _path(folder: str, program: str) -> Any:
    """Find the path of a program's record, on this machine or in a remote store."""
    is_stored = "://" in folder
    root = epath.Path(folder) if is_stored else pathlib.Path(folder)
    return root / "audited" / f"{program}.json"


def _refuse_links(path: pathlib.Path) -> None:
    """Raise if the path is a symbolic link, which may point to any file."""
    for place in (path.parent, path):
        if place.is_symlink():
            raise OSError(f"{place} is a symbolic link")
