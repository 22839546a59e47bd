"""What the suite sets in the package: a shard's least size, and what audits unasked."""

from towerjax.check import first_call
from towerjax.mesh import placement

LEAST_SHARD = placement.LEAST_SHARD  # as users have it


def shards_from(elements):
    """Leaves of fewer elements per device stay whole from here on."""
    placement.LEAST_SHARD = elements


def audits(unasked):
    """Whether steps that say nothing of an audit are proved and audited."""
    first_call.CHECKS_UNASKED = unasked
