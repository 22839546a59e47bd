"""Names that towerjax gives to axes, values and scopes, for its proof to find them."""


class Tag(str):
    """A name that is compared by identity, so that no text of a user's equals it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


# The scope in which a step adds up losses, gradients and metrics over towers.
SUMMED_BY_STEP = Tag("towerjax.sums")

# The scope in which `TowerOptimizer.compute_gradients` differentiates a mean's sum.
OF_A_SUM = Tag("towerjax.gradient_of_sum")

# The scope of loops over a device's towers, and over a tower's micro-batches.
IN_TURN = Tag("towerjax.in_turn")

# The scope that JAX gives to the backward pass of a derivative.
TRANSPOSED = Tag("transpose")

# The name of the flag that tells whether a tower has examples. The flag depends on how
# many rows the tower has, and on no value in the rows.
HAS_EXAMPLES = Tag("towerjax.has_examples")

# The name of a factor of a mean, and of a term that is added to a mean. Both must be
# replicated.
MUST_BE_REPLICATED = Tag("towerjax.replicated")

# The scope in which a batch norm adds up over towers, for each micro-batch alone.
BATCH_NORM = Tag("TowerBatchNorm")

# The scopes of the collectives that a tower function calls as methods of ``tower``.
REDUCED, GATHERED, MERGED = TOWER_CALLS = (
    Tag("tower.reduce"),
    Tag("tower.all_gather"),
    Tag("tower.merge_call"),
)

# The mesh axes of a step's program: devices, and the towers of a device. A psum over
# the device axis alone would leave out towers that share a device, so no user should
# write these names by chance. A tower function uses the axis of all towers.
DEVICE_AXIS = "towerjax_device"
LOCAL_AXIS = "towerjax_local"
TOWER_AXIS = "towerjax_tower"
