"""Extensions for rarer steps and updates, which use only the public names."""

from towerjax.contrib.by_owner import by_owner as by_owner
from towerjax.contrib.diloco import DiLoCo as DiLoCo
from towerjax.contrib.diloco import LocalSGD as LocalSGD
from towerjax.contrib.precision import LossScale as LossScale
from towerjax.contrib.train import ema_params as ema_params
from towerjax.contrib.train import train_step as train_step
from towerjax.contrib.train import with_ema as with_ema
