"""Names that towerjax gives to axes, values and scopes of a program, for its proof."""


class Tag(str):
    """A name compared by identity, so that no text of a user's program equals it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


# The scope of the sums that a step itself makes: of losses, gradients and metrics.
SUMMED_BY_STEP = Tag("towerjax.sums")

# The scope of a gradient of a mean's sum, in `TowerOptimizer.compute_gradients`.
OF_A_SUM = Tag("towerjax.gradient_of_sum")

# The scope of the loops over a device's towers, and over a tower's micro-batches.
IN_TURN = Tag("towerjax.in_turn")

# This stands for the scope that JAX gives to the backward part of a derivative.
TRANSPOSED = Tag("transpose")

# The name of the flag that a tower has examples. It depends on no value of a row.
HAS_EXAMPLES = Tag("towerjax.has_examples")

# The name of a mean's factor, or of a term beside it, that must be replicated.
MUST_BE_REPLICATED = Tag("towerjax.replicated")

# The scope of the sums of a batch norm: each micro-batch has its own.
BATCH_NORM = Tag("TowerBatchNorm")

# The scopes of the collectives that a tower function calls on ``tower``.
REDUCED, GATHERED, MERGED = TOWER_CALLS = (
    Tag("tower.reduce"),
    Tag("tower.all_gather"),
    Tag("tower.merge_call"),
)

# The axes of a program. No user writes such names by chance: a psum over the device
# axis alone would leave out towers that share a device. Users get the tower axis, which
# is over all towers.
DEVICE_AXIS = "towerjax_device"
LOCAL_AXIS = "towerjax_local"
TOWER_AXIS = "towerjax_tower"
