"""Train, evaluate and predict with one model function on all devices."""

from towerjax.tf1.estimator.losses import LossReduction as LossReduction
from towerjax.tf1.estimator.losses import compute_weighted_loss as compute_weighted_loss
from towerjax.tf1.estimator.model_fn import ClassificationOutput as ClassificationOutput
from towerjax.tf1.estimator.model_fn import Mode as Mode
from towerjax.tf1.estimator.model_fn import ModelSpec as ModelSpec
from towerjax.tf1.estimator.model_fn import PredictOutput as PredictOutput
from towerjax.tf1.estimator.model_fn import RegressionOutput as RegressionOutput
from towerjax.tf1.estimator.optimizer import TowerOptimizer as TowerOptimizer
from towerjax.tf1.estimator.replicate import ReplicatedModel as ReplicatedModel
from towerjax.tf1.estimator.replicate import replicate_model_fn as replicate_model_fn
from towerjax.tf1.estimator.train import evaluate as evaluate
from towerjax.tf1.estimator.train import predict as predict
from towerjax.tf1.estimator.train import train_and_evaluate as train_and_evaluate
from towerjax.tf1.estimator.variables import VariablePlacement as VariablePlacement
