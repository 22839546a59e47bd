"""MirroredStrategy and OneDeviceStrategy: strategies with TensorFlow's methods."""

import copy
from typing import TYPE_CHECKING, Any, Self, TypeVar

import jax
import jax.numpy as jnp

import towerjax as tj
from towerjax.tf1 import assign as assigning
from towerjax.tf1 import call, steps, values
from towerjax.tf1 import reduce as reducing
from towerjax.types import PerTower
from towerjax.types.boundary import api_boundaries, api_boundary
from towerjax.types.refusals import a_type

_Class = TypeVar("_Class", bound=type)


@api_boundaries
class Verbs:
    """TensorFlow's methods of a strategy, which take values of all towers.

    A value is a pytree. Its ``PerTower`` leaves and ``TowerLocal`` variables hold one
    value per tower, and its other leaves are replicated. The methods of `tj.Mirrored`
    say what is refused.
    """

    call_for_each_tower = call.call_for_each_tower
    run_steps_on_dataset = steps.run_steps_on_dataset
    batch_reduce = reducing.batch_reduce
    map = reducing.map_elements
    broadcast = values.broadcast
    select_tower = values.select_tower
    regroup = values.regroup
    fetch = values.fetch
    create_var = assigning.create_var
    assign = assigning.assign
    assign_add = assigning.assign_add
    assign_sub = assigning.assign_sub
    update = assigning.update_var
    read_var = assigning.read_var

    if TYPE_CHECKING:  # the strategy's class has these
        num_towers: int
        placement: Any

    @classmethod
    def _class_like(cls, plain: _Class) -> _Class:
        """Choose the class that adds TensorFlow's methods to the class ``plain``."""
        return _WITH_VERBS[plain]

    @property
    def is_single_tower(self) -> bool:
        """Whether there is only one tower."""
        return self.num_towers == 1

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """The names of all towers' devices, each of which holds all parameters."""
        return self.placement.devices

    @property
    def worker_device_index(self) -> PerTower:
        """The towers' ids, as a per-tower value."""
        return PerTower(jnp.arange(self.num_towers))

    @property
    def between_graph(self) -> bool:
        """Whether several processes each build and run the program."""
        return self.placement.num_processes > 1

    @property
    def should_init(self) -> bool:
        """Whether this is the first process, which does what a job must do once."""
        return jax.process_index() == 0

    should_checkpoint = should_save_summary = should_init

    def configure(
        self,
        *,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> Self:
        """Join a job of several processes, and return this strategy for its devices.

        Call it before JAX is used, like ``tj.cluster.initialize()``. It takes a cluster
        ``{"chief": [...], "worker": ["host:port", ...]}`` and this process's task in
        it, such as ``"worker"`` and its index; None reads the environment.
        """
        if cluster_spec is task_type is task_id is None:
            tj.cluster.initialize()
        else:
            named = tj.cluster.parse_spec(cluster_spec, task_type, task_id)
            tj.cluster.initialize(
                named.coordinator, named.num_processes, named.process_id
            )
        # The copy has no cached placement, so it finds the new devices.
        return copy.copy(self)


class MirroredStrategy(Verbs, tj.Mirrored):
    """`tj.Mirrored` with TensorFlow's methods, such as `call_for_each_tower`.

    The options are those of `tj.Mirrored`, and builders of steps accept it, too. The
    page on TensorFlow's names:
    <https://github.com/towerjax/towerjax/blob/main/docs/reference/mirrored_strategy.md>.

    Example:
      >>> import towerjax as tj
      >>> strategy = tj.tf1.MirroredStrategy(devices=("cpu:0",), towers=2)
      >>> ids = strategy.call_for_each_tower(lambda tower: tower.id)
      >>> strategy.unwrap(ids)
      [Array(0, dtype=int32), Array(1, dtype=int32)]
    """


class OneDeviceStrategy(Verbs, tj.OneDevice):
    """`tj.OneDevice` with TensorFlow's methods, which do nothing for one tower.

    Example:
      >>> import towerjax as tj
      >>> tj.tf1.OneDeviceStrategy("cpu:0").is_single_tower
      True
    """


_WITH_VERBS: dict[Any, Any] = {
    tj.Mirrored: MirroredStrategy,
    tj.OneDevice: OneDeviceStrategy,
}


@api_boundary
def with_verbs(strategy: values.AnyStrategy) -> MirroredStrategy | OneDeviceStrategy:
    """Give a strategy TensorFlow's methods; its options stay.

    Args:
      strategy: A `tj.Mirrored` or `tj.OneDevice`. A strategy that has the methods is
        returned unchanged.

    Returns:
      `MirroredStrategy` or `OneDeviceStrategy`.

    Raises:
      ValueError: ``strategy`` is not a strategy.

    Example:
      >>> import towerjax as tj
      >>> with_verbs(tj.Mirrored(devices=("cpu:0",), towers=2))
      MirroredStrategy(devices=('cpu:0',), towers=2)
    """
    if isinstance(strategy, MirroredStrategy | OneDeviceStrategy):
        return strategy
    if type(strategy) not in _WITH_VERBS:
        raise ValueError(
            f"with_verbs: strategy is {a_type(strategy)}, but must be a tj.Mirrored or"
            " a tj.OneDevice. Write tj.tf1.with_verbs(tj.Mirrored())."
        )
    return _WITH_VERBS[type(strategy)](**strategy.__getstate__())
