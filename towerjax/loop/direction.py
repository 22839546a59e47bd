"""Tell whether a metric is better if it is less, or if it is more."""

import re
from typing import Literal, TypeAlias, get_args

from towerjax.types.options import check_choice

Direction: TypeAlias = Literal["min", "max"]
"""Whether less of a metric is better, or more."""

# Words in the names of metrics that are better if they are less, or more.
_LESS = set(
    "loss losses error errors err cost costs nll xent crossentropy mse rmse mae mape"
    " perplexity ppl wer cer".split()
)
_MORE = set(
    "accuracy accuracies acc auc auroc auprc precision recall iou miou f1 bleu psnr"
    .split()
)  # fmt: skip
# Words that change what the other words of a name mean: another sign, how much a value
# changed or varies, when it was reached, or a number beside it.
_OTHERWISE = set(
    "neg negative negated negation minus inverse inverted inv reciprocal complement"
    " opposite flipped reversed non not no without free vs versus drop drops dropped"
    " decline decrease decreased degradation deterioration decay fall reduction"
    " reduced improvement improved increase increased gain gains growth rise delta"
    " deltas diff difference change changes changed slope trend gradient grad ratio"
    " gap margin savings saved recovered explained corrected fixed avoided removed std"
    " stdev stddev sd sem stderr se var variance deviation spread range iqr ci"
    " interval uncertainty skew kurtosis disparity disagreement inequality penalty"
    " time times to until reached steps epochs iterations rounds seconds minutes hours"
    " duration since below within above exceeds exceeding beyond rank percentile scale"
    " scaling threshold tolerance weight weights coefficient coeff budget d2 skill"
    " correction detection detected speedup forgetting regret bias violations fpr fnr"
    " fdr far frr miss missed latency flops anti oneminus half"
    .split()
)  # fmt: skip
# In scikit-learn more of a score is better, also if it is made of a loss.
_SCORES = {"score", "scores"}
# "1-accuracy", "val_1 - acc" and "-loss".
_MINUS = re.compile(
    r"(?:(?<![^\W_])(?:1(?:\.0*)?|100%?)[\s_]*|^\s*|[/(\[:=,\s])[-\u2212\u2013][\s_]*[^\W\d_]"
)
# "top-1-accuracy" and "recall@1-val" subtract nothing.
_FIRST = re.compile(r"(?i)(top|at|rank|hits?|pass|recall|precision|acc|k|@)[-_@ ]*1+")


def sign_of(name: str, metric: str, mode: Direction | None) -> int:
    """Choose the factor, 1 or -1, that makes less of a metric better.

    If ``mode`` is None, the words of the metric's name tell: ``"eval/loss"`` and
    ``"RMSE"`` mean ``"min"``, ``"top5_accuracy"`` and ``"val_auc"`` mean ``"max"``. A
    name such as ``"neg_log_loss"``, ``"1-accuracy"`` or ``"accuracy_std"`` does not
    tell.

    Args:
      name: The name of the option, for errors.
      metric: The name of the metric.
      mode: The option's value.

    Raises:
      ValueError: ``mode`` is none of ``"min"``, ``"max"`` and None; or it is None, and
        the metric's name does not tell.
    """
    check_choice(name, mode, (*get_args(Direction), None))
    if mode is None:
        mode = _mode_of(metric)
    if mode is None:
        raise ValueError(
            f"{name}=None: the name of the metric {metric!r} does not tell whether less"
            " of it is better, or more. Write mode='min' or mode='max'."
        )
    return 1 if mode == "min" else -1


def _mode_of(metric: str) -> Direction | None:
    """Read the direction in a metric's name; None if it does not tell."""
    words = _words_of(metric)
    is_less = not words.isdisjoint(_LESS)
    is_more = not words.isdisjoint(_MORE)
    subtracts = _MINUS.search(_FIRST.sub("x", metric))
    means_otherwise = subtracts or not words.isdisjoint(_OTHERWISE)
    is_score = is_less and not words.isdisjoint(_SCORES)
    if is_less == is_more or means_otherwise or is_score:
        return None
    return "min" if is_less else "max"


def _words_of(metric: str) -> set[str]:
    """Split a name into words in small letters.

    Each word is also returned without digits at its end.
    """
    text = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", metric.replace("IoU", "Iou")).lower()
    text = re.sub(r"[\W_]+", " ", text).replace("cross entropy", "crossentropy")
    words = text.split()
    return {*words, *(word.rstrip("0123456789") for word in words)}
