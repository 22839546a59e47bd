"""Which cross-tower op does a text name? As one writes it in Python."""

import ast
from typing import Any

from towerjax.collectives.all_reduce import AllReduce
from towerjax.collectives.base import CrossTowerOps
from towerjax.collectives.compressed import Compressed
from towerjax.collectives.hierarchical import Hierarchical
from towerjax.collectives.one_device import ReduceToOneDevice
from towerjax.collectives.packed import Packed
from towerjax.collectives.pinned_tree import PinnedTree

_OPS = (AllReduce, PinnedTree, Packed, ReduceToOneDevice, Hierarchical, Compressed)


def ops_of(text: str) -> CrossTowerOps:
    """The cross-tower op that a text writes."""
    kinds = {kind.__name__: kind for kind in _OPS}
    try:
        call: Any = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError(f"{text} is no call; write {text}().")
        func: Any = call.func
        arguments = {str(k.arg): ast.literal_eval(k.value) for k in call.keywords}
        if call.args:
            raise ValueError("Name each option.")
        return kinds[func.id](**arguments)
    except (SyntaxError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"cross_tower_ops={text!r} is not one of {', '.join(kinds)}, its options"
            f" named, such as 'AllReduce()' or 'Packed(num_packs=2)': {error}"
        ) from error
