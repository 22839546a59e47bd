"""A namespace shows its public names, and says where a name that it lacks is now."""

import functools
import json
import re
import types
from pathlib import Path

import pytest
from checkout import ROOT, TESTS

import towerjax as tj

SPACES = """
tf1 estimator towers metrics collectives loop testing tools contrib cluster sparse
layers
""".split()


def resolve(chain):
    return functools.reduce(getattr, chain.split("."), tj)


def note_of(owner, name):
    """The note in the error for a name that an object lacks."""
    with pytest.raises(AttributeError) as caught:
        getattr(owner, name)
    [note] = caught.value.__notes__
    return note


def check_that_names_exist(note):
    """Each name and page of towerjax that a note names is there."""
    for chain in re.findall(r"\btj((?:\.[A-Za-z_]\w*)+)", note):
        resolve(chain[1:])
    for path in re.findall(r"/main/(docs/\S+\.md)", note):
        assert (Path(ROOT) / path).exists(), path


@pytest.mark.parametrize("space", SPACES)
def test_a_namespace_shows_its_public_names_alone(space):
    names = dir(getattr(tj, space))
    assert names and not {"TYPE_CHECKING", "NoReturn"} & {*names}
    for name in names:
        value = resolve(f"{space}.{name}")
        is_space = isinstance(value, types.ModuleType)
        assert not is_space or name in ("estimator", "testing", "sparse")


def test_a_name_of_another_namespace_is_given_in_full():
    assert note_of(tj, "TowerOptimizer") == "Write tj.estimator.TowerOptimizer."
    assert note_of(tj.tf1, "read_local") == "Write tj.towers.read_local."
    assert note_of(tj.estimator, "Mirrored") == "Write tj.Mirrored."
    assert note_of(tj, "Wieghted") == "Did you mean tj.Weighted?"


def test_a_private_name_has_no_note():
    with pytest.raises(AttributeError, match="no attribute '__path_of__'") as caught:
        tj.tf1.__path_of__  # noqa: B018
    assert not hasattr(caught.value, "__notes__")


def names_of_tensorflow():
    """The names that the pages on TensorFlow's two systems tell of."""
    pages = json.loads((TESTS / "names_of_tensorflow.json").read_text())
    rows = [
        row for tables in pages.values() for table in tables.values() for row in table
    ]
    spans = [span for row in rows for span in re.findall(r"`(.+?)`", row)]
    names = [re.match(r"(?:\w+\.)*([A-Za-z_]\w*)(?=[(.:]|$)", span) for span in spans]
    return sorted({match[1] for match in names if match})


STRATEGY = tj.tf1.MirroredStrategy(("cpu:0",))
OWNERS = [tj, *[getattr(tj, x) for x in SPACES]]
OWNERS += [STRATEGY, tj.Tower, tj.tf1.MultiStepContext, tj.estimator.TowerOptimizer]
OWNERS += [tj.estimator.ReplicatedModel, tj.towers.InputContext, tj.towers.MirroredVar]
OWNERS += [tj.Reduction, tj.estimator.LossReduction, tj.estimator.Mode]


def test_each_name_of_tensorflow_is_here_or_says_what_to_write():
    fields = {x for owner in OWNERS for x in getattr(owner, "__annotations__", ())}
    fields |= {*tj.estimator.ModelSpec.__dataclass_fields__}
    names = names_of_tensorflow()
    assert len(names) > 200
    silent = []
    for name in names:
        if name in fields or any(name in dir(owner) for owner in OWNERS):
            continue
        notes = []
        for owner in (tj.tf1, STRATEGY):
            try:
                getattr(owner, name)
            except AttributeError as error:
                notes += getattr(error, "__notes__", [])
        if not notes:
            silent.append(name)
        for note in notes:
            check_that_names_exist(note)
    assert not silent
