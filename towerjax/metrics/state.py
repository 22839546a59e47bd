from towerjax.outputs import check_metrics


def check(name, x):
    return check_metrics({name: x}, loss_is_free=True)[name]


def compute(s):
    return s.value
