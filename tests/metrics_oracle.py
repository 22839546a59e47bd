"""The metrics in NumPy float64, written by hand from their definitions.

Each takes the rows of all data, a dict of arrays ``[n]``, and weights ``[n]``; nothing
here uses JAX or towerjax. Scores and thresholds are compared in float32, as they are.
"""

import numpy as np

NUM_CLASSES = 4


def share(part, whole):
    return part / whole if whole else 0.0


def weighted_mean(values, w):
    return share((values[w > 0] * w[w > 0]).sum(), w.sum())


def outcomes(yes, said, w):
    """Weights of true positives, false positives, false negatives, true negatives."""
    return tuple(
        w[(yes == y) & (said == s)].sum()
        for y, s in ((True, True), (False, True), (True, False), (False, False))
    )


def even(n):
    """Even thresholds, or those given, and one below and one above all scores."""
    inner = n if isinstance(n, list) else [(i + 1) / (n - 1) for i in range(n - 2)]
    return np.float32([-1e-7, *inner, 1 + 1e-7])


def curves(rows, w, thresholds):
    """``[n]`` each: true and false positives, false and true negatives."""
    found = [outcomes(rows["yes"], rows["score"] > t, w) for t in thresholds]
    return np.array(found).T


def auc_roc(rows, w, n=200):
    tp, fp, fn, tn = curves(rows, w, even(n))
    if not (tp + fn).any() or not (fp + tn).any():
        return 0.0
    return -np.trapezoid(tp / (tp + fn), fp / (fp + tn))


def auc_pr(rows, w, n=200):
    """The integral of precision over recall, with counts linear in between."""
    tp, fp, fn, _ = curves(rows, w, even(n))
    area = 0.0
    total = tp[0] + fn[0]
    for i in range(n - 1):
        low = tp[i] + fp[i]
        high = tp[i + 1] + fp[i + 1]
        gained = tp[i] - tp[i + 1]
        if gained == 0:
            continue
        slope = gained / (low - high)
        start = tp[i + 1] - slope * high
        curved = start * np.log(low / high) if high > 0 else 0.0
        area += slope * (gained + curved)
    return share(area, total)


def at_nearest(rows, w, wanted, given, n=200):
    found = curves(rows, w, even(n)).T
    pairs = [(share(tn, tn + fp), share(tp, tp + fn)) for tp, fp, fn, tn in found]
    pairs = pairs if given == "specificity" else [pair[::-1] for pair in pairs]
    nearest = min(abs(pair[0] - wanted) for pair in pairs)
    return max(p[1] for p in pairs if abs(p[0] - wanted) <= nearest + 1e-6)


def rate_at_thresholds(rows, w, thresholds, missed):
    tp, fp, fn, _ = curves(rows, w, np.float32(thresholds))
    other = fn if missed else fp
    return [share(a, a + b) for a, b in zip(tp, other, strict=True)]


def mean_iou(rows, w):
    values = []
    for c in range(NUM_CLASSES):
        label = rows["label"] == c
        said = rows["class"] == c
        either = w[label | said].sum()
        if either:
            values.append(w[label & said].sum() / either)
    return np.mean(values) if values else 0.0


def mean_per_class_accuracy(rows, w, divide_by_all=False):
    """Of TensorFlow a class without examples is 0, and all classes are averaged."""
    values = [
        w[(rows["label"] == c) & (rows["class"] == c)].sum()
        / w[rows["label"] == c].sum()
        for c in range(NUM_CLASSES)
        if w[rows["label"] == c].sum()
    ]
    return sum(values) / (NUM_CLASSES if divide_by_all else max(len(values), 1))


def errors(rows):
    return np.float64(rows["value"]) - np.float64(rows["target"])


def said(rows):
    return rows["score"] > np.float32(0.5)


def share_of(rows, w, missed):
    tp, fp, fn, _ = outcomes(rows["yes"], rows["said"], w)
    return share(tp, tp + (fn if missed else fp))


VALUES = {
    "mean": lambda r, w: weighted_mean(np.float64(r["value"]), w),
    "accuracy": lambda r, w: weighted_mean((r["label"] == r["class"]) * 1.0, w),
    "percentage_below": lambda r, w: weighted_mean((r["value"] < 0.5) * 1.0, w),
    "mse": lambda r, w: weighted_mean(errors(r) ** 2, w),
    "rmse": lambda r, w: weighted_mean(errors(r) ** 2, w) ** 0.5,
    "mae": lambda r, w: weighted_mean(abs(errors(r)), w),
    "true_positives": lambda r, w: outcomes(r["yes"], r["said"], w)[0],
    "false_positives": lambda r, w: outcomes(r["yes"], said(r), w)[1],
    "false_negatives": lambda r, w: outcomes(r["yes"], said(r), w)[2],
    "true_negatives": lambda r, w: outcomes(r["yes"], r["said"], w)[3],
    "precision": lambda r, w: share_of(r, w, False),
    "recall": lambda r, w: share_of(r, w, True),
    "auc": auc_roc,
    "auc_pr": auc_pr,
    "auc_few": lambda r, w: auc_roc(r, w, 5),
    "auc_of": lambda r, w: auc_roc(r, w, [0.0, 0.45, 1.0]),
    "auc_pr_few": lambda r, w: auc_pr(r, w, 5),
    "sensitivity": lambda r, w: at_nearest(r, w, 0.8, "specificity"),
    "specificity": lambda r, w: at_nearest(r, w, 0.4, "sensitivity"),
    "precisions": lambda r, w: rate_at_thresholds(r, w, [0.2, 0.5], False),
    "recalls": lambda r, w: rate_at_thresholds(r, w, [0.2, 0.5], True),
    "mean_iou": mean_iou,
    "mean_per_class_accuracy": mean_per_class_accuracy,
    "mean_per_class_accuracy_tf": lambda r, w: mean_per_class_accuracy(r, w, True),
}
