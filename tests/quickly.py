"""Programs are compiled in less time than a user's, where nothing looks at bits."""

import jax
from jax._src import compiler

make_options = compiler.get_compile_options


def with_older_emitters(*args, env_options_overrides=None, **kwargs):
    """Options of a compilation; not optimized, by the emitters that JAX 0.10 has still.

    They take half as long as those that came after them. The programs of an audit are
    not optimized by users, either.
    """
    more = dict(env_options_overrides or {})
    is_audit = more.get("xla_backend_optimization_level") == 0
    if is_audit or jax.config.read("jax_disable_most_optimizations"):
        more["xla_cpu_use_fusion_emitters"] = False
    return make_options(*args, env_options_overrides=more, **kwargs)


def compiled(quickly=True):
    """Whether what this process compiles from here on takes the less time."""
    if jax.version.__version_info__ < (0, 11):
        compiler.get_compile_options = with_older_emitters
    # LLVM's optimizations take longer than most programs of tests run.
    jax.config.update("jax_disable_most_optimizations", quickly)
