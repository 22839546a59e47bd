"""TensorFlow 1's MirroredStrategy and its model functions, by TensorFlow's names."""

from typing import TYPE_CHECKING, NoReturn

import towerjax.types.boundary as _boundary
from towerjax.tf1 import estimator as estimator
from towerjax.tf1.steps import MultiStepContext as MultiStepContext
from towerjax.tf1.strategies import MirroredStrategy as MirroredStrategy
from towerjax.tf1.strategies import OneDeviceStrategy as OneDeviceStrategy
from towerjax.tf1.strategies import with_verbs as with_verbs

if not TYPE_CHECKING:

    @_boundary.api_boundary  # which adds what to write instead
    def __getattr__(name: str) -> NoReturn:
        text = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text, name=name)
