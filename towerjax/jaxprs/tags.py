"""Names that towerjax gives to values and scopes of a program, for its proof."""


class Tag(str):
    """A name compared by identity, so that no text of a user's program equals it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


# Scope of the sums that a step itself makes: losses, gradients, metrics.
SUMMED_BY_STEP = Tag("towerjax.sums")

# Scope of a gradient that `TowerOptimizer.compute_gradients` gives of a mean's sum.
OF_A_SUM = Tag("towerjax.gradient_of_sum")

# Scope of the loops over a device's towers, and over a tower's micro-batches.
IN_TURN = Tag("towerjax.in_turn")

# Stands for the scope of a derivative's backward, which JAX itself makes.
TRANSPOSED = Tag("transpose")

# The flag that a tower has examples, which no row's value decides.
HAS_EXAMPLES = Tag("towerjax.has_examples")

# A mean's factor, or a term beside it, that is the same on all towers.
MUST_BE_REPLICATED = Tag("towerjax.replicated")

# Scope of the sums of a batch norm, which each micro-batch has of its own.
BATCH_NORM = Tag("TowerBatchNorm")

# Scopes of the collectives that a tower function calls on ``tower``.
REDUCED, GATHERED, MERGED = TOWER_CALLS = (
    Tag("tower.reduce"),
    Tag("tower.all_gather"),
    Tag("tower.merge_call"),
)
