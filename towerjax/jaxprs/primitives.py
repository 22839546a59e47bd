"""Which of JAX's primitives compute by element, add up, or show their code."""

from jax.extend.core import Primitive, primitives

# The params of these primitives hold functions, but do not hide in them what the
# primitive computes. The functions are for derivatives, partitioning or random keys, or
# they are in the params as jaxprs, too.
TRUSTED = frozenset(
    "checkpoint composite core_map custom_jvp_call custom_lin custom_partitioning "
    "custom_vjp_call custom_vmap_call debug_callback inspect_sharding jit linear_call "
    "mpmd_map pallas_call pure_callback random_bits random_fold_in random_gamma "
    "random_seed random_split random_unwrap random_wrap reduce reduce_window remat2 "
    "remat_opt run_state scan select_and_gather_add select_and_scatter_add".split()
)


# The results of these primitives depend on their operands alone. Their params hold no
# code, no jaxpr and no mesh axis.
_PLAIN_NAMES = """
    abs acos acosh add add_jaxvals and argmax argmin asin asinh atan atan2 atanh
    bitcast_convert_type broadcast_in_dim cbrt ceil clamp clz complex concatenate conj
    conv_general_dilated convert_element_type cos cosh cumlogsumexp cummax cummin
    cumprod cumsum digamma div dot_general dynamic_slice dynamic_update_slice eq erf
    erf_inv erfc exp exp2 expm1 floor gather ge gt imag integer_pow iota is_finite le
    lgamma log log1p logistic lt max min mul ne neg nextafter not or pad
    population_count pow real reduce_and reduce_max reduce_min reduce_or
    reduce_precision reduce_prod reduce_sum reduce_xor rem reshape rev round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh slice
    sort sqrt square squeeze sub tan tanh top_k transpose xor
"""


_KNOWN = vars(primitives)  # some versions of JAX do not have all of the names above


PLAIN: frozenset[Primitive] = frozenset(
    _KNOWN[f"{name}_p"] for name in _PLAIN_NAMES.split() if f"{name}_p" in _KNOWN
)
"""Primitives whose results depend on their operands only, so that no rule is needed."""


REDUCTIONS = frozenset(
    "psum psum_invariant pmax pmin unreduced_psum unreduced_pmax unreduced_pmin "
    "all_gather all_gather_invariant all_gather_reduced pbroadcast".split()
)
"""Collectives whose result is the same on all towers."""


SUMS = frozenset("psum psum_invariant unreduced_psum".split())
"""Those of `REDUCTIONS` that add up: a value that is the same on ``T`` towers is added
``T`` times."""


EXTREMES = frozenset("pmax pmin unreduced_pmax unreduced_pmin".split())
"""Those of `REDUCTIONS` that take the largest or smallest value of all towers."""


ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    cbrt ceil clamp clz complex conj convert_element_type cos cosh digamma div eq eq_to
    erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
    integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min mul
    mulhi ne neg nextafter not one_minus_square or polygamma population_count pow
    random_gamma_grad real reduce_precision regularized_incomplete_beta rem round rsqrt
    select_n shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt
    square sub tan tanh xor zeta""".split()
)
"""Primitives that compute an element from the operands' elements at the same place."""


# Result i of these primitives is operand i. Some have a param `axes`, but none
# communicates.
IDENTITIES = (
    "optimization_barrier pvary pcast preduced vary_unreduced_cast_p "
    "vary_unreduced_cast reduced_vary_cast_p reduced_vary_cast device_put copy "
    "sharding_constraint name"
).split()


# No jaxpr shows the code of these primitives, because it is not written in JAX. Their
# results may differ between towers even if their operands are equal.
FOREIGN = frozenset(
    "ffi_call call_exported buffer_callback cudnn_fusion custom_fusion "
    "tpu_custom_call mosaic_gpu_p triton_kernel_call rng_uniform "
    "dma_start dma_wait psend precv get_barrier_semaphore semaphore_read "
    "semaphore_signal semaphore_signal_multicast semaphore_signal_parallel "
    "semaphore_wait multimem_load_reduce multimem_store".split()
)
