"""Names that towerjax gives to values and scopes of a program, for its proof."""


class Tag(str):
    """A name that is known by its object: no text that a program writes equals it."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


# Scope of the sums that a step itself makes: losses, gradients, metrics.
SUMMED_BY_STEP = Tag("towerjax.sums")

# Scope of the derivative that a step makes of a loss.
DIFFERENTIATED = Tag("towerjax.gradient")

# Scope of a gradient that `TowerOptimizer.compute_gradients` gives of a mean's sum.
OF_A_SUM = Tag("towerjax.gradient_of_sum")

# Scope of the loops over a device's towers, and over a tower's micro-batches.
IN_TURN = Tag("towerjax.in_turn")

# A value that a step adds up without a division; what it is follows.
COUNTS_EACH_TOWER = Tag("towerjax.counts_each_tower:")

# Stands for the scope of a derivative's backward, which JAX itself makes.
TRANSPOSED = Tag("transpose")

# The flag that a tower has examples, which no row's value decides.
HAS_EXAMPLES = Tag("towerjax.has_examples")

# A mean's factor, or a term beside it, that is the same on all towers.
SHARED = Tag("towerjax.shared")

# The weight of a gradient, as `tj.value_and_grad` returns it.
GRADIENT_WEIGHT = Tag("towerjax.gradient_weight")

# The sum and the weight of a loss that is a mean.
LOSS_SUM, LOSS_WEIGHT = Tag("towerjax.loss_sum"), Tag("towerjax.loss_weight")

# The number 1 that a gradient begins with, where it depends on the loss.
ONE = Tag("towerjax.one")

# The weight of a mean that a tower returns; the mean's own name follows.
WEIGHT_OF = Tag("towerjax.weight_of:")

# The weights of a tower's own rows.
ROW_WEIGHTS = Tag("towerjax.row_weights")

# The weight of all rows, and a mean over it: neither is counted once a tower.
OF_ALL_ROWS = Tag("towerjax.of_all_rows")

# The values of a mean, ``[b, b]`` of ``b`` rows, weighed by row.
SQUARE = Tag("towerjax.square")

# Scope of the sums of a batch norm, which each micro-batch has of its own.
BATCH_NORM = Tag("TowerBatchNorm")

# What stands for a gradient while only weights are computed.
UNKNOWN_GRADIENT = Tag("towerjax.unknown_gradient")

# A value that towers assign and that is added up over towers.
SUMMED_FOR_A_VARIABLE = Tag("towerjax.summed_for_a_variable")

# Scopes of the collectives that a tower function calls on ``tower``.
REDUCED, GATHERED, MERGED = TOWER_CALLS = (
    Tag("tower.reduce"),
    Tag("tower.all_gather"),
    Tag("tower.merge_call"),
)
