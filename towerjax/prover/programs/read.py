"""What is read from a program's trace, in plain values that another process can get."""

import hashlib
import re
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal

from towerjax.jaxprs.sites import all_sites, arrays_in, sites_over, user_line
from towerjax.mesh.devices import Device
from towerjax.prover.comparison import rounding_of
from towerjax.prover.programs.runs import UserProgram, meshes_of_trace
from towerjax.prover.programs.traced import ARRAY_TYPES, traced_arrays
from towerjax.types.trees import key_data

_BY_A_FACTOR = "mul", "div"
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class Reading(NamedTuple):
    """What is read from a trace; it can be sent to another process.

    Attributes:
      why: The reason why there is no trace; "" if there is one.
      rounding: The tolerance for the dtypes in which it computes.
      devices: The devices of its meshes.
      communicates: The lines at which devices communicate, and how.
      factors: ``(line, primitive, number)`` of each product and quotient by a number.
    """

    why: str
    rounding: float = 0.0
    devices: frozenset[Device] = frozenset()
    communicates: tuple[str, ...] = ()
    factors: tuple[tuple[str, str, complex], ...] = ()


def read_program(program: UserProgram) -> Reading:
    """Trace a program, and return what is read from the trace."""
    traced, why = program.trace()
    if traced is None:
        return Reading(why)
    jaxpr = traced.jaxpr
    return Reading(
        "",
        rounding_of([jaxpr]),
        meshes_of_trace(traced),
        _lines_that_communicate(jaxpr),
        _factors(jaxpr),
    )


def _lines_that_communicate(jaxpr: ClosedJaxpr) -> tuple[str, ...]:
    lines = [(user_line(x), x[0].primitive.name) for x in sites_over(jaxpr)]
    return tuple(
        dict.fromkeys(f"{line} ({operation})" for line, operation in lines if line)
    )


def _factors(jaxpr: ClosedJaxpr) -> tuple[tuple[str, str, complex], ...]:
    sites = [
        x for x in all_sites(jaxpr, plain=True) if x[0].primitive.name in _BY_A_FACTOR
    ]
    factors = [
        (user_line(x), x[0].primitive.name, number)
        for x in sites
        if (number := _factor(x[0])) is not None
    ]
    return tuple(dict.fromkeys(x for x in factors if x[0]))


def _factor(eqn: JaxprEqn) -> complex | None:
    """Find the constant by which an equation multiplies or divides, or None."""
    values: list[Any] = [x.val for x in eqn.invars if isinstance(x, Literal)]
    return next((complex(x) for x in values), None)


def digest_of(program: UserProgram) -> str:
    """Hash a traced program's text and arrays; "" if it is not traced.

    Equal programs have equal hashes.
    """
    traced, _ = program.trace()
    if traced is None:
        return ""
    arrays = traced_arrays(program.traced_args)
    text = f"{traced.jaxpr} {jax.tree.structure(traced.out)} {[*arrays]}"
    digest = hashlib.sha256(_ADDRESS.sub("", text).encode())
    for x in (*arrays.values(), *arrays_in(traced.jaxpr)):
        if isinstance(x, ARRAY_TYPES):  # not a Ref, of whose content nothing is proved
            digest.update(np.asarray(key_data(x)).tobytes())
    return digest.hexdigest()
