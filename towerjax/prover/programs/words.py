"""The words for a number that results must not depend on: of devices, micro-batches."""

import dataclasses
from collections.abc import Mapping

from towerjax.jaxprs.sites import outwards, user_line
from towerjax.prover.equality.answers.causes import Cause
from towerjax.prover.equality.answers.nouns import Nouns
from towerjax.prover.equality.kinds.reasons import Reason

_BY_JAX = (
    " (with check_vma=True jax.grad adds up over devices by itself: differentiate"
    " jax.lax.pmean of the loss)"
)


@dataclasses.dataclass(frozen=True)
class Words:
    """The words for a number that must not change results; "they" are what it counts.

    Attributes:
      option: The name of the option for these numbers, and of the argument of ``make``.
      nouns: The nouns in which the proof tells its reasons.
      alone: A program for one of them.
      letter: The letter that stands for the number.
      sums: The primitives that add up over all of them.
      equals: The reason for a factor: each of them adds an equal copy.
      by_own_number: The reason for a factor: each divides by a number of its own.
      all: The reason for a factor: a sum is divided by their number.
      number: The reason for a factor, if none of these fits.
      quotients: The reason why a quotient of one's own sums is not proved.
      cures: What to write, by the reason why a result is unknown.
    """

    option: str
    nouns: Nouns
    alone: str
    letter: str
    sums: tuple[str, ...]
    equals: str
    by_own_number: str
    all: str
    number: str
    quotients: str
    cures: Mapping[Reason, str]

    @property
    def depends(self) -> str:
        """The first line of an error that lists results which depend on the number."""
        return f"Results of the program depend on the number of {self.nouns.many}:"

    def of_power(self, power: int, cause: Cause | None) -> str:
        """Word a result that is off by a power of the number.

        It has the factor and, if the cause is known, its line and a remedy.
        """
        size = self.letter if abs(power) == 1 else f"{self.letter}^{abs(power)}"
        size = size if power > 0 else f"1/{size}"
        text = f"{size} times what it is {self.alone}"
        line = line_of(cause) if cause else ""
        if cause is None or not line:
            return text
        name = cause.site[0].primitive.name
        is_sum = name in self.sums
        if name != "div" and not is_sum:
            return f"{text}: {self.number.format(line)}."
        if power < 0:
            return f"{text}: {self.all.format(line)}."
        why = (self.equals if is_sum else self.by_own_number).format(line)
        maps = [x for x in outwards(cause.site) if x.primitive.name == "shard_map"]
        is_typed = any(x.params["check_vma"] for x in maps)
        return f"{text}: {why}{_BY_JAX * is_typed}."

    def of_unknown(self, why: str, reason: Reason | None, cause: Cause | None) -> str:
        """Tell why a result is unknown: ``why``, and what to write instead.

        ``cause`` is the wrong number that causes it. Without one, the cure is that of
        the typed ``reason``, if there is one.
        """
        if cause is None:
            cure = self.cures.get(reason) if reason else None
            return f"{why}. {cure}" if cure else why
        if cause.value is not None:
            power = self.of_power(cause.value.power, cause)
            return f"{why}. There a value is {power}"
        return self.quotients.format(line_of(cause))


def line_of(cause: Cause) -> str:
    """Find the line of the user's code at which a cause is."""
    return user_line(cause.site) or "a line of a library"


OF_DEVICES = Words(
    option="devices",
    nouns=Nouns("device", "devices", "a device's", "axis_index"),
    alone="on one device",
    letter="D",
    sums=("psum", "psum_invariant"),
    equals=(
        "a value that is the same on all devices is added up at {}. Leave the sum out,"
        " or write jax.lax.pmean"
    ),
    by_own_number=(
        "each device divides by a number of its own, such as its number of rows, at {},"
        " and the quotients are added up. Write jax.lax.pmean, or divide by the number"
        " of all devices"
    ),
    all=(
        "a sum over devices is divided by their number at {}. Write jax.lax.psum in"
        " place of jax.lax.pmean, or divide by a number that does not depend on the"
        " devices"
    ),
    number=(
        "a number that depends on the number of devices is used at {}. Use one that"
        " does not"
    ),
    quotients=(
        "each device divides by a sum over its own rows at {}. Add both up with"
        " jax.lax.psum, and divide afterwards"
    ),
    cures={
        Reason.SUM_OF_OWN_ROWS: (
            "A device's sum is used before the devices' sums are added up. Add it up"
            " with jax.lax.psum first; clip, or take a norm, afterwards"
        ),
        Reason.MEAN_OF_OWN_ROWS: (
            "A device's mean is that of its own rows alone. Take jax.lax.pmean of it,"
            " or divide jax.lax.psum of the sum by that of the weights"
        ),
        Reason.EXTREME_OF_OWN_ROWS: (
            "A device has the largest of its own rows alone. Take jax.lax.pmax of it."
            " For a logsumexp over all rows, shift by that maximum, without its"
            " gradient, add up the exponentials with jax.lax.psum, and take the"
            " logarithm afterwards"
        ),
        **dict.fromkeys(
            (Reason.OWN_DRAWS, Reason.SAME_DRAWS),
            "Other devices draw other numbers for a row. Use a key for each row:"
            " jax.random.split(key, rows) outside of the map, given like the rows",
        ),
        Reason.ROWS_MEET_ROWS: (
            "Rows meet the rows of the same device alone. Gather those that they meet,"
            " with jax.lax.all_gather(rows, axis, tiled=True)"
        ),
        Reason.DEALT_BY_NUMBER: (
            "Use no dim of devices, and reshape no dim that is split over them:"
            " jax.lax.all_to_all(x, axis, 0, 1, tiled=True) deals out dim 0, such as"
            " experts, and joins rows along dim 1"
        ),
        Reason.OWN_NUMBER: (
            "To choose among a device's own n entries, take v = jax.nn.one_hot(ids -"
            " jax.lax.axis_index(axis) * n, n), and write v @ table, or (v *"
            " logits).sum(-1). Add it up with jax.lax.psum"
        ),
        Reason.OTHER_SIZES: (
            "Give the array one size for any number of devices, or split it over them"
        ),
        Reason.OTHER_ARGUMENTS: (
            "Let make give the same arguments for each number of devices, such as the"
            " whole batch, and split them by in_specs"
        ),
    },
)
OF_MICRO_BATCHES = Words(
    option="micro_batches",
    nouns=Nouns(
        "micro-batch",
        "micro-batches",
        "a micro-batch's",
        "the number of a micro-batch",
    ),
    alone="with one micro-batch",
    letter="n",
    sums=("add", "add_any", "reduce_sum"),
    equals=(
        "each of the n micro-batches adds the same value at {}. Add it once, after the"
        " loop, or divide it by n"
    ),
    by_own_number=(
        "each of the n micro-batches divides by a number of its own, such as its"
        " number of rows, at {}, and the quotients are added up. Divide the sum by n,"
        " or by the number of all rows"
    ),
    all=(
        "a sum over the n micro-batches is divided by n at {}. Divide by a number that"
        " does not depend on n, or not at all"
    ),
    number=(
        "a number that depends on the number n of micro-batches is used at {}. Use one"
        " that does not"
    ),
    quotients=(
        "each micro-batch divides by a sum over its own rows at {}. Add up sums and"
        " weights over the micro-batches, and divide afterwards"
    ),
    cures={
        Reason.SUM_OF_OWN_ROWS: (
            "A micro-batch's sum is used before the sums of all are added up. Clip it,"
            " or take its norm, after the loop"
        ),
        Reason.MEAN_OF_OWN_ROWS: (
            "A micro-batch's mean is that of its own rows alone. Add up sums and"
            " weights over the micro-batches, and divide after the loop"
        ),
        Reason.EXTREME_OF_OWN_ROWS: (
            "A micro-batch has the largest of its own rows alone. Carry the largest"
            " with jnp.maximum, and use it after the loop. For a logsumexp over all"
            " rows, add up the exponentials, and take the logarithm after the loop"
        ),
        **dict.fromkeys(
            (Reason.OWN_DRAWS, Reason.SAME_DRAWS),
            "Other micro-batches draw other numbers for a row. Use a key for each row,"
            " jax.random.split(key, rows), cut like the rows; draw numbers that belong"
            " to no row once, after the loop",
        ),
        Reason.ROWS_MEET_ROWS: (
            "Rows meet the rows of the same micro-batch alone. Compute those that they"
            " meet for all rows, before the loop"
        ),
        Reason.SUM_SO_FAR: (
            "A micro-batch changes or reads the sum of those before it. Let each add"
            " to the sum alone, and do all else once, after the loop"
        ),
        Reason.OWN_NUMBER: (
            "A micro-batch may read its rows by its number i: x.reshape(n, -1,"
            " *x.shape[1:])[i], or every n-th row: x.reshape(-1, n, *x.shape[1:])[:,"
            " i]. In place of a mean so far, add up, and divide after the loop"
        ),
        Reason.OTHER_SIZES: (
            "Give the array one size for any number of micro-batches, or split it over"
            " them"
        ),
        Reason.OTHER_ARGUMENTS: (
            "Let make give the same arguments for each number of micro-batches, such as"
            " the whole batch, and split them in the program"
        ),
    },
)
BY_OPTION = {words.option: words for words in (OF_DEVICES, OF_MICRO_BATCHES)}
"""The words for each option, such as "devices"."""
