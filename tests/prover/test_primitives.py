"""Every primitive of JAX has a rule in the analysis; a new one fails here."""

import dataclasses
import subprocess
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from analysed import AXIS, psum, study
from jax.experimental import hijax
from jax.experimental import pallas as pl
from jax.extend.core import Primitive

import towerjax as tj
from towerjax.jaxprs.primitives import FOREIGN, PLAIN, REDUCTIONS
from towerjax.prover.replication.analysis import _RULES

# A function of its operands alone: the same on all towers where they are.
PURE = """
abs accum_grad_in_ref acos acosh add add_any add_dependency addupdate after_all and
approx_top_k argmax argmin asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast
bitcast_convert_type box_get box_set broadcast_in_dim broadcast_to cbrt ceil cholesky
cholesky_update clamp clz complex concatenate conj conv conv_general_dilated
convert_element_type cos cosh create_token cumlogsumexp cummax cummin cumprod cumsum
dce_sink digamma dim_as_value dimension_size div dot_general dot_product_attention_bwd
dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd
dot_product_attention_fp8_fwd_wrapper dot_product_attention_fwd
dot_product_attention_fwd_wrapper dynamic_slice dynamic_update_slice eig eigh
einshape_lo empty empty2 empty_ref eq eq_to erf erf_inv erfc exp exp2 expm1 fft floor
free_ref freeze from_edtype gather ge geqp3 geqrf get gt has_memory_space hessenberg
householder_product igamma igamma_grad_a igammac imag inspect_sharding integer_pow iota
iota_2x32_shape is_finite layout_cast layout_constraint le le_to lgamma log log1p log2
log_extend log_read logistic lt lt_to lu lu_pivots_to_permutation masked_cummax
masked_cummin masked_cumsum masked_sort max max_contiguous min mul mulhi multiple_of ne
neg new_box new_log new_ref nextafter not one_minus_square or ormqr pack pack_dtype
pack_elementwise pad philox2x32 philox4x32 pin platform_index polygamma polynomial
population_count pow program_order qr ragged_dot_general random_clone random_seed
random_unwrap random_wrap real reciprocal reduce_and reduce_max reduce_min reduce_or
reduce_precision reduce_prod reduce_sum reduce_window_max reduce_window_min
reduce_window_sum reduce_xor regularized_incomplete_beta relayout rem
remove_memory_space reshape reshard rev roll round rsqrt scaled_dot scaled_matmul
scaled_matmul_wrapper scan_count schur select_and_gather_add select_and_scatter_add
select_n shape_assertion shard_alike shift_left shift_right_arithmetic
shift_right_logical sign sin sinh slice sort split sqrt square squeeze stack stage
stochastic_round stop_gradient sub svd swap symmetric_product tan tanh threefry2x32
threefry4x32 tie tile to_edtype top_k trace_value transpose triangular_solve tridiagonal
tridiagonal_solve unique unpack unpack_dtype unpack_elementwise unpin unreachable
unstack with_memory_space_constraint xla_metadata_value xor zeros_like zeta _copysign
all_reduce_ffs all_reduce_population_count elementwise_inline_asm
elementwise_inline_asm_p
""".split()

# Holds jaxprs, which are walked: as a call where they fit, else all on all.
INNER = """
call call_hi_primitive call_hi_primitive_linearized checkpoint closed_call composite
compute_on core_map custom_jvp_call custom_jvp_call_jaxpr custom_lin
custom_partitioning custom_vjp_call custom_vmap_call emit_pipeline
eval_jaxpr fusible jaxpr_call jit linear_call mpmd_map pallas_call parallel_loop
pipeline_body reduce reduce_window remat2 remat_opt run_scoped run_state scatter
scatter-add scatter-max scatter-min scatter-mul scatter-sub select_and_scatter
xla_metadata_call create_linear
""".split()

# Names its axes, and gives a tower a part of its own, or is read as if it did.
COMMUNICATES = """
all_gather_done all_gather_reduced_start all_gather_start all_to_all all_to_all_done
all_to_all_start pbroadcast_done pbroadcast_dynamic pbroadcast_start ppermute
ppermute_done ppermute_start psum_done psum_invariant_start psum_start
ragged_all_to_all reduce_scatter reduce_scatter_done reduce_scatter_start
unreduced_psum_start unreduced_reduce_scatter unreduced_reduce_scatter_start
""".split()

# Has an effect of its own: its results may be anything.
EFFECTFUL = """
check debug_callback debug_print io_callback pure_callback print_layout delay
""".split()

# Stands in a kernel alone, which is opaque: each of its values depends on all.
IN_KERNELS = """
async_copy_scales_to_tmem async_copy_smem_to_tmem async_copy_sparse_metadata_to_tmem
async_load async_prefetch async_store_smem async_store_tmem atomic_cas atomic_rmw
barrier barrier_arrive barrier_arrive_and_wait barrier_test barrier_wait commit_group
commit_smem commit_tmem copy_gmem_to_smem copy_smem_to_gmem debug_barrier
debug_barrier_p griddepcontrol_launch_dependents griddepcontrol_wait inline_mgpu
inline_mgpu_p load masked_load masked_swap matmul_acc_lhs matmul_lhs_fifo matmul_pop
matmul_pop_fifo matmul_push_rhs mgpu_atomic_store mma mosaic_gpu_reduce_max
mosaic_gpu_reduce_min mosaic_gpu_reduce_prod mosaic_gpu_reduce_sum num_programs
prng_join prng_random_bits prng_seed prng_split program_id query_cluster_cancel
sc_fetch_and_add set_max_registers set_max_registers_p store get_global
tcgen05_commit_arrive tcgen05_mma try_cluster_cancel wait_gmem_to_smem wait_load_tmem
wait_smem_to_gmem wgmma wgmma_accumulator_deref wgmma_accumulator_deref_p
wgmma_accumulator_store wgmma_accumulator_store_p wgmma_ref wgmma_wait
""".split()

_NAMES = """
import gc, importlib, pkgutil, warnings
warnings.simplefilter("ignore")
import jax, jax._src
from jax.extend.core import Primitive
for module in pkgutil.walk_packages(jax._src.__path__, "jax._src."):
    if not any(x in module.name for x in ("test", "debugger", "nccl", "tpu_info")):
        try:
            importlib.import_module(module.name)
        except ImportError:
            pass
print(*{x.name for x in gc.get_objects() if isinstance(x, Primitive)})
"""


@pytest.mark.slow
def test_every_primitive_of_jax_has_been_looked_at():
    done = subprocess.run(
        [sys.executable, "-c", _NAMES], capture_output=True, text=True, check=True
    )
    names = {x for x in done.stdout.split() if not x.startswith("thunky.")}
    assert len(names) > 300
    known = {*PURE, *INNER, *COMMUNICATES, *EFFECTFUL, *IN_KERNELS}
    assert names - known - _RULES.keys() - REDUCTIONS - FOREIGN == set()


def test_no_primitive_has_two_rules():
    tables = [PURE, INNER, COMMUNICATES, EFFECTFUL, IN_KERNELS, FOREIGN]
    names = [name for table in [*tables, _RULES, REDUCTIONS] for name in table]
    assert sorted(names) == sorted(set(names))


def test_what_the_walks_pass_by_is_a_function_of_its_operands_alone():
    names = {x.name for x in PLAIN}
    assert names < {*PURE} and len(names) > 75


def made_up(name, effects=frozenset()):
    """A primitive that the analysis has never seen, of one operand."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, **params: x)
    primitive.def_effectful_abstract_eval(lambda x, **params: (x, effects))
    return primitive


# As in an installed library, of which no line is the user's.
_LIBRARY = {"jax": jax, "AXIS": AXIS}
_CODE = "def by_id(w, held): return w * jax.lax.axis_index(AXIS)"
exec(compile(_CODE, "site-packages/library.py", "exec"), _LIBRARY)


def source_of(tower):
    [dependence] = study(tower).outputs
    return dependence and dependence.source


def test_an_unknown_function_of_equals_is_the_same_and_of_others_is_not():
    primitive = made_up("towerjax_test_pure")
    assert source_of(lambda w, x: primitive.bind(w, size=3)) is None
    assert source_of(lambda w, x: primitive.bind(x)) == "batch['x']"
    assert source_of(lambda w, x: psum(primitive.bind(x))) is None


def test_code_that_a_primitive_hides_may_be_that_primitive():
    """It is opened as often as its params differ, and not for ever."""
    primitive = made_up("towerjax_test_nested")
    opened = []

    def code(x, code, left):
        opened.append(left)
        left = max(left - 1, -1)
        return primitive.bind(x + 1, code=code, left=left) if left else x

    primitive.def_impl(code)
    given = {"code": code, "left": 3}
    assert source_of(lambda w, x: primitive.bind(w, **given)) is None
    assert source_of(lambda w, x: primitive.bind(x, **given)) == "batch['x']"
    opened.clear()
    endless = {"code": code, "left": -1}
    assert source_of(lambda w, x: primitive.bind(w, **endless)) == primitive.name
    assert opened == [-1]


@pytest.mark.parametrize("params", [
    {"along": AXIS},
    {"options": (("mesh", ("other", AXIS)),)},
    {"axis_name": AXIS},
    {"axes": (AXIS,)},
])  # fmt: skip
def test_an_unknown_primitive_that_names_the_axis_may_be_anything(params):
    primitive = made_up("towerjax_test_collective")
    assert source_of(lambda w, x: primitive.bind(w, **params)) == primitive.name
    assert source_of(lambda w, x: psum(primitive.bind(w, **params))) is None


def test_an_unknown_primitive_with_an_effect_may_be_anything():
    class _Effect(jax._src.effects.Effect):
        pass

    jax._src.effects.control_flow_allowed_effects.add_type(_Effect)
    primitive = made_up("towerjax_test_effect", frozenset([_Effect()]))
    assert source_of(lambda w, x: primitive.bind(w)) == primitive.name


@pytest.mark.parametrize("name", ["ffi_call", "psend", "thunky.all_reduce"])
def test_what_another_language_does_may_be_anything(name):
    primitive = made_up(name)
    assert source_of(lambda w, x: primitive.bind(w)) == name


@pytest.mark.parametrize("hide", [lambda j: j, lambda j: (("a", (j, 1)),)])
def test_an_unknown_primitive_with_a_jaxpr_is_walked(hide):
    primitive = made_up("towerjax_test_call")

    def tower(inner):
        def fn(w, x):
            jaxpr = jax.make_jaxpr(inner)(w)
            return primitive.bind(w, body=hide(jaxpr))

        return fn

    assert source_of(tower(lambda w: jnp.tanh(w))) is None
    by_id = tower(lambda w: w * jax.lax.axis_index(AXIS))
    assert source_of(by_id) == "tower.id"
    parts = tower(lambda w: w[:1] * jax.lax.axis_index(AXIS))  # as in a kernel
    assert source_of(parts) == "tower.id"


class Holder:
    """Neither a pytree nor a tuple: what an object may hold a program in."""

    __slots__ = ("inside",)

    def __init__(self, inside):
        self.inside = inside


@dataclasses.dataclass(frozen=True)
class Frozen:
    inside: Any


HIDING = [Holder, Frozen, lambda x: Holder({"a": [x]}), lambda x: Frozen(Holder(x))]


@pytest.mark.parametrize("hide", HIDING)
def test_a_jaxpr_is_found_in_any_object(hide):
    primitive = made_up("towerjax_test_holder")

    def source(inner):
        def fn(w, x):
            return primitive.bind(w, held=hide(jax.make_jaxpr(inner)(w)))

        return source_of(fn)

    assert source(jnp.tanh) is None
    assert source(lambda w: w * jax.lax.axis_index(AXIS)) == "tower.id"


@pytest.mark.parametrize("hide", [lambda f: f, partial, *HIDING])
def test_code_in_params_is_opened_or_distrusted(hide):
    def source(code, impl=None):
        primitive = made_up("towerjax_test_code")
        if impl is not None:
            primitive.def_impl(impl)
        return source_of(lambda w, x: primitive.bind(w, held=hide(code)))

    def by_id(w):
        return w * jax.lax.axis_index(AXIS)

    assert source(jnp.tanh) == "towerjax_test_code"
    assert source(by_id, impl=lambda w, held: by_id(w)) == "tower.id"
    assert source(jnp.tanh, impl=lambda w, held: psum(by_id(w))) is None
    # It takes arrays only, or more of them, so that it cannot be traced.
    for impl in (lambda w, held: np.asarray(w), lambda w, held: jax.lax.psum(w, "x")):
        assert source(jnp.tanh, impl=impl) == "towerjax_test_code"

    def mistaken(w, held):
        raise RuntimeError("mistaken")

    primitive = made_up("towerjax_test_code")
    primitive.def_impl(mistaken)
    found = study(lambda w, x: primitive.bind(w, held=hide(jnp.tanh)))
    [failure] = found.failures  # which a step tells, and which refuses nobody
    assert failure.error == "RuntimeError: mistaken" and "<lambda>" in failure.line


def test_code_that_calls_itself_is_distrusted():
    primitive = made_up("towerjax_test_itself")
    primitive.def_impl(lambda w, **params: jax.jit(primitive.bind)(w, **params))
    assert source_of(lambda w, x: primitive.bind(w, held=jnp.tanh)) == primitive.name


def test_code_that_some_towers_reach_might_hang():
    primitive = made_up("towerjax_test_hang")

    def hangs():
        def body(v):
            return primitive.bind(v, held=print)

        def tower(w, x):
            return psum(jax.lax.while_loop(lambda v: v.sum() > 0, body, x[0]))

        return [(hang.primitive, hang.control) for hang in study(tower).hangs]

    assert hangs() == [(primitive.name, "while")]
    primitive.def_impl(lambda v, held: psum(v))
    assert hangs() == [("psum", "while")]
    primitive.def_impl(lambda v, held: jnp.tanh(v))
    assert hangs() == []


def test_a_line_of_opened_code_is_never_that_of_who_asks_for_the_proof():
    primitive = made_up("towerjax_test_line")

    def tower(w, x):
        return primitive.bind(w, held=print)  # of the tower

    primitive.def_impl(lambda w, held: w * jax.lax.axis_index(AXIS))
    [dependence] = study(tower).outputs
    assert dependence.line.endswith("(<lambda>)")
    primitive.def_impl(_LIBRARY["by_id"])
    [dependence] = study(tower).outputs
    assert dependence.line.endswith("(tower)")


# JAX 0.12 has it under another name.
HiPrimitive: Any = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive


class TimesId(HiPrimitive):
    """What its class says that it does is in no jaxpr."""

    def __init__(self, aval, reduced):
        self.in_avals = (aval,)
        self.out_aval = aval
        self.params = {"reduced": reduced, "shown": jax.make_jaxpr(jnp.tanh)(aval)}
        super().__init__()

    def expand(self, w):
        own = w * jax.lax.axis_index(AXIS)
        return psum(own) if self.params["reduced"] else own


@pytest.mark.parametrize("reduced, source", [(False, "tower.id"), (True, None)])
def test_a_primitive_of_hijax_is_opened(reduced, source):
    assert source_of(lambda w, x: TimesId(jax.typeof(w), reduced)(w)) == source


@pytest.mark.parametrize("by_id, source", [(False, None), (True, "tower.id")])
@pytest.mark.parametrize("out", [False, True])
def test_the_index_maps_of_a_kernel_are_walked(by_id, source, out):
    def own(i):
        return (jax.lax.axis_index(AXIS) if by_id else i,)

    def same(i):
        return (i,)

    def kernel(w_ref, out_ref):
        out_ref[...] = w_ref[...]

    def tower(w, x):
        return pl.pallas_call(
            kernel,
            out_shape=w,
            grid=(4,),
            in_specs=[pl.BlockSpec((1,), same if out else own)],
            out_specs=pl.BlockSpec((1,), own if out else same),
        )(w)

    assert source_of(tower) == source


def test_a_foreign_call_in_the_program_is_refused():
    def tower(w, x):
        call = jax.ffi.ffi_call("towerjax_test", jax.ShapeDtypeStruct((4,), w.dtype))
        return call(w), psum(call(x[0]))

    foreign, reduced = study(tower).outputs
    assert foreign.source == "ffi_call" and reduced is None


def einsums(params, batch, tower):
    return jnp.einsum("bi,i->b", batch["x"], params["w"])


def first_positive(params, batch, tower):
    (at,) = jax.vmap(lambda x: jnp.nonzero(x > 0, size=1))(batch["x"])
    return batch["x"] @ params["w"] * (at[:, 0] + 1)


def in_bins(params, batch, tower):
    at = jnp.searchsorted(jnp.array([-1.0, 0.0, 1.0]), batch["x"][:, 0])
    return batch["x"] @ params["w"] * at


@pytest.mark.parametrize("losses", [einsums, first_positive, in_bins])
def test_what_may_be_a_primitive_of_hijax_is_read(losses):
    """Newer versions of JAX hold some functions as objects in ``params["_prim"]``."""

    def loss_fn(params, batch, tower):
        return tj.Weighted.mean(losses(params, batch, tower), tower.weight)

    step = tj.build_train_step(loss_fn, optax.sgd(0.1), tj.Mirrored(towers=2))
    draw = np.random.default_rng(0)
    batch = {"x": draw.normal(size=(4, 3)).astype(np.float32)}
    state = step.init({"w": np.ones(3, np.float32)})
    why = " ".join(step.check(state, batch).unproved.values())
    # An object that the proof cannot look into is unknown, and no fault of the proof.
    assert "the proof failed" not in why
    assert not why or "call_hi_primitive" in why, why
