"""How is compiled what the tests run? Faster where the compiler can, for one process.

JAX 0.10's takes a third less time without its fusion emitters. Programs of their own,
and runs whose bits are compared on different devices, are compiled as everywhere.
"""

import jax
import pytest

FLAGS = "--xla_cpu_use_fusion_emitters=false"
FLAGS = FLAGS if jax.__version_info__[:2] == (0, 10) else ""
AS_EVERYWHERE = {"xla_cpu_use_fusion_emitters": True} if FLAGS else None


def use():
    """Have this process, and none that it starts, compile with the flags."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FLAGS", FLAGS, " ")
        jax.jit(lambda: 0)()  # they are read once
