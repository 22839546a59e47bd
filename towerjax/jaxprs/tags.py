"""Names that towerjax gives to axes, values and scopes of a program, for its proof."""


class Tag(str):
    """A name compared by identity, so that no text of a user's program equals it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


# A step adds up losses, gradients and metrics in this scope.
SUMMED_BY_STEP = Tag("towerjax.sums")

# `TowerOptimizer.compute_gradients` differentiates the sum of a mean in this scope.
OF_A_SUM = Tag("towerjax.gradient_of_sum")

# This scope is around the loops over a device's towers and a tower's micro-batches.
IN_TURN = Tag("towerjax.in_turn")

# This tag stands for the scope that JAX gives to the backward pass of a derivative.
TRANSPOSED = Tag("transpose")

# This is the name of the flag that says whether a tower has examples. The flag
# depends on the number of its rows, and on no value in them.
HAS_EXAMPLES = Tag("towerjax.has_examples")

# This is the name of a mean's factor, and of a term added to a mean. Both must be
# replicated.
MUST_BE_REPLICATED = Tag("towerjax.replicated")

# A batch norm adds up in this scope. Each micro-batch has sums of its own.
BATCH_NORM = Tag("TowerBatchNorm")

# These are the scopes of the collectives that a tower function calls on ``tower``.
REDUCED, GATHERED, MERGED = TOWER_CALLS = (
    Tag("tower.reduce"),
    Tag("tower.all_gather"),
    Tag("tower.merge_call"),
)

# These are the axes of a step's program. No user writes such names by chance, because a
# psum over the device axis alone would leave out towers that share a device. A tower
# function communicates over the tower axis, which is over all towers.
DEVICE_AXIS = "towerjax_device"
LOCAL_AXIS = "towerjax_local"
TOWER_AXIS = "towerjax_tower"
