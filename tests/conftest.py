"""Eight CPU devices, no implicit broadcasting, warnings are errors."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")
