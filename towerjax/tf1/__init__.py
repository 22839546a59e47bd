"""TensorFlow 1's MirroredStrategy and its model functions, by TensorFlow's names."""

from towerjax.tf1 import estimator as estimator
from towerjax.tf1.steps import MultiStepContext as MultiStepContext
from towerjax.tf1.strategies import MirroredStrategy as MirroredStrategy
from towerjax.tf1.strategies import OneDeviceStrategy as OneDeviceStrategy
from towerjax.tf1.strategies import with_verbs as with_verbs
