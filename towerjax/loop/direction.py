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


def sign_of(name: str, metric: str, mode: Direction | None) -> int:
    """Return the factor, 1 or -1, that makes less of a metric better.

    If ``mode`` is None, the words of the metric's name tell: ``"eval/loss"`` and
    ``"RMSE"`` mean ``"min"``, ``"top5_accuracy"`` and ``"val_auc"`` mean ``"max"``.

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
    """Return the direction that a metric's name tells, or None."""
    words = _words_of(metric)
    is_less = not words.isdisjoint(_LESS)
    is_more = not words.isdisjoint(_MORE)
    if is_less == is_more:
        return None
    return "min" if is_less else "max"


def _words_of(metric: str) -> set[str]:
    """Return the words of a name in small letters.

    Each word is also returned without digits at its end.
    """
    text = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", metric.replace("IoU", "Iou")).lower()
    text = re.sub(r"[\W_]+", " ", text).replace("cross entropy", "crossentropy")
    words = text.split()
    return {*words, *(word.rstrip("0123456789") for word in words)}
