"""Names, categories and patterns of kernels."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu_hpc_exporter.diagnosis.kernels import (
    MIN_GROUP,
    OTHER,
    UNNAMED,
    Behaviour,
    Runs,
    category,
    name_within,
    pattern,
    signature,
    slowdown,
)
from gpu_hpc_exporter.model import CATEGORIES, Category, Pattern
from gpu_hpc_exporter.text import MAX_BYTES

LAMBDA = (
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<"
    "at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(float)#1}>"
    "(at::TensorIteratorBase&, float const&)::{lambda(int)#1}>(int, at::native::x<1>::{lambda(int)#1})"
)
KERNELS: list[tuple[str, str, Category]] = [
    (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, array<char*, 3ul> >(x)",
        "vectorized_elementwise_kernel[CUDAFunctor_add]",
        "elementwise",
    ),
    (LAMBDA, "elementwise_kernel[direct_copy_kernel_cuda]", "copy"),
    (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>, 4> >(x)",
        "reduce_kernel[MeanOps]",
        "reduction",
    ),
    (
        "void at::native::vectorized_elementwise_kernel<4, at::BinaryFunctor<int, a::b::MulFunctor<float> > >(x)",
        "vectorized_elementwise_kernel[MulFunctor]",
        "elementwise",
    ),
    (
        "void (anonymous namespace)::softmax_warp_forward<float, 5, false>(float*, int)",
        "softmax_warp_forward",
        "reduction",
    ),
    (
        "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64>, false>(flash::P)",
        "flash_fwd_kernel",
        "attention",
    ),
    (
        "void at::native::multi_tensor_apply_kernel<a::TensorListMetadata<4>, a::FusedAdamMathFunctor<(a::MODE)1> >(x)",
        "multi_tensor_apply_kernel[FusedAdamMathFunctor]",
        "optimizer",
    ),
    (
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_tn_align8>(cutlass::Params)",
        "Kernel2[cutlass_80_tensorop_bf16_s16816gemm_bf16_128x64_tn_align8]",
        "gemm",
    ),
    (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgs<4096ul>)",
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        "communication",
    ),
    ("__fused_kernel_12345", "fused_kernel", "generated"),
    ("triton_poi_fused_add_mul_12", "triton_poi_fused_add_mul", "generated"),
    ("fusion.7", "fusion", "generated"),
    ("cudapy::__main__::add[abi:v1][abi:cw51cXTLSUwHBinCqbbgUAA](Array<float, 1>)", "add", "other"),
    ("_attn_fwd_0d1d2de", "attn_fwd", "attention"),
    ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn", "gemm"),
    ("nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "nvjet_sm90_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "gemm"),
    ("Cijk_Ailk_Bljk_SB_MT64x64x16", "Cijk_Ailk_Bljk_SB_MT64x64x16", "gemm"),
    ("cudnn_infer_winograd_fwd", "cudnn_infer_winograd_fwd", "convolution"),
    ("void my::step<int>(my::step<int>::operator()(int) const)", "step", "other"),
    ("", UNNAMED, "other"),
    ("<<<<(((", UNNAMED, "other"),
    (OTHER, "other[]", "other"),
]


@pytest.mark.parametrize(("name", "expected", "kind"), KERNELS)
def test_signatures_and_categories(name: str, expected: str, kind: Category) -> None:
    """What diagnosis.md section 3 says, for names as PyTorch, cuBLAS, cuDNN, NCCL, Triton and XLA have them."""
    assert (signature(name), category(signature(name))) == (expected, kind)


_NAMES = st.text(max_size=300) | st.text("ab_0129<>(){}[]:,.&* ~kernelFunctorOp\udcff", max_size=300)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        # What torch.compile made, whatever it fused.
        *((f"triton_{kind}_fused__to_copy_add_mul", "generated") for kind in ("poi", "per", "red", "for", "unk")),
        *((f"triton_{kind}_fused_convolution_adam", "generated") for kind in ("poi", "spl")),
        ("triton_tem_fused_flex_attention_0", "attention"),  # a template is what its name says
        ("triton_tem_fused__to_copy_mm_t_1", "gemm"),
        ("cpuadam_step", "optimizer"),
        ("dwconv2d_kernel", "convolution"),
        ("triton_fused_native_layer_norm_backward", "generated"),
        ("triton_mm", "generated"),
        ("triton_flash_attention", "attention"),  # somebody's own
        ("my_triton_poi_copy", "copy"),
        # A word, not what another word ends with.
        ("madam_kernel", "other"),
        ("adamw_step", "optimizer"),
        ("fused_adam_kernel", "optimizer"),
        ("DistAdamFunctor", "optimizer"),
        ("RAdamKernel", "optimizer"),
        ("nadam", "optimizer"),
        ("unconv_scale", "other"),
        ("causal_conv1d_fwd_kernel", "convolution"),
        ("DepthwiseConv2dGPUKernelNHWC", "convolution"),
        ("deconv_kernel", "convolution"),
        ("implicit_convolve_sgemm", "convolution"),
        ("conv_depthwise2d_forward_kernel", "convolution"),
        ("small_reduce_kernel", "reduction"),
        ("multimem_all_reduce_kernel", "communication"),
        ("twoShotAllReduceKernel", "communication"),
        ("cross_device_reduce_1stage", "communication"),
        ("normal_kernel", "other"),
        ("batchnorm_normalize", "reduction"),
        ("diffusion_step", "other"),
        ("loop_add_fusion", "generated"),
        ("softMaxForward", "reduction"),
    ],
)
def test_words_of_categories(kernel: str, kind: Category) -> None:
    """Names in the wild, and such as look like them."""
    assert category(kernel) == kind


@given(_NAMES)
@settings(max_examples=500)
@example("a" * 4096)  # H04
@example("a" * 200 + "1")
@example("void f<" * 3000)
@example("foo&_12")
@example("foo&[abi:[abi:x]y]_1")
@example("_12")
@example('a\udcff\x00\n"')  # H01
@example("x" * 120 + "\N{EURO SIGN}" * 9)
def test_any_name_has_a_signature_that_fits_a_label(name: str) -> None:
    """H01, H04: at most 128 bytes of printable UTF-8, never empty, never the rest's; and it is its own signature."""
    found = signature(name)
    assert 0 < len(found.encode()) <= MAX_BYTES
    assert found.isprintable()
    assert found != OTHER
    assert signature(found) == found
    assert category(found) in CATEGORIES


def test_names_that_are_cut_stay_apart() -> None:
    """H04: equal in the first 200 bytes, two kernels all the same."""
    one, other = signature("a" * 200 + "x"), signature("a" * 200 + "y")
    assert one != other
    assert one[-9] == other[-9] == "~"


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfEEEEvT1_", "reduce_kernel"),
        ("_Z10my_kernel1fPf", "my_kernel1"),
        ("_ZN12_GLOBAL__N_120softmax_warp_forwardIffE", "softmax_warp_forward"),
        ("_ZN9999", "_ZN9999"),
        ("_Z", "_Z"),
        ("plain", "plain"),
        ("", ""),
    ],
)
def test_the_name_within_a_mangled_one(mangled: str, name: str) -> None:
    """For what cannot be demangled within its limits."""
    assert name_within(mangled) == name


@given(st.text("_ZN0123456789abE", max_size=100))
def test_any_text_can_be_looked_into(mangled: str) -> None:
    """Lengths that lie lead nowhere."""
    assert name_within(mangled) in mangled


def seen(
    launches: int = 0,
    executions: int = 0,
    seconds: float = 0,
    deviation: float = 0,
    steady: int = 0,
    *,
    slower: float = 0,
    is_shared: bool = False,
) -> Behaviour:
    """What a kernel did in ten traced seconds."""
    return Behaviour(10, launches, executions, seconds, steady, deviation, slower, is_shared)


@pytest.mark.parametrize(
    ("behaviour", "expected"),
    [
        (seen(10_000, 10_000, 10_000 * 49e-6), "many_short"),
        (seen(10_000, 10_000, 10_000 * 51e-6), None),
        (seen(9_999, 9_999, 9_999 * 10e-6), None),
        (seen(0, 100_000, 100_000 * 5e-6), None),  # in CUDA graphs nothing is launch-bound
        (seen(10, 490, 490 * 1e-3), "few_long"),
        (seen(10, 500, 500 * 1e-3), None),
        (seen(100, 1000, 1000 * 1e-4, 1.1e-4, 1000), "jittery"),
        (seen(100, 1000, 1000 * 1e-4, 0.9e-4, 1000), None),
        (seen(100, 1000, 1000 * 1e-4, 1.1e-4, 99), None),
        (seen(100, 1000, 1000 * 1e-4, 1.1e-4, 499), None),
        (seen(10_000, 10_000, 10_000 * 10e-6, 1, 10_000), "many_short"),  # at most one
        (seen(10, 10, 1e-3, slower=5, is_shared=True), "contended"),
        (seen(10, 10, 1e-3, slower=4.99, is_shared=True), None),
        (seen(10, 10, 1e-3, slower=50), None),  # it is alone
        (seen(10_000, 10_000, 10_000 * 49e-6, slower=5, is_shared=True), "contended"),  # the cause that lies outside
        (seen(10, 490, 490 * 1e-3, slower=5, is_shared=True), "contended"),
        (seen(100, 1000, 1000 * 1e-4, 1.1e-4, 1000, slower=5, is_shared=True), "contended"),
        (seen(), None),
        (Behaviour(0, 1, 1, 1, 1, 1), None),
        (seen(1, 10, float("inf")), None),
    ],
)
def test_patterns(behaviour: Behaviour, expected: Pattern | None) -> None:
    """Each at its limit and beyond."""
    assert pattern(behaviour) == expected


@pytest.mark.parametrize(
    ("minute", "hour", "expected"),
    [
        (Runs(10, 5000), Runs(110, 15_000), 500 / (15_000 / 110)),
        (Runs(9, 4500), Runs(109, 14_500), 0),  # chance
        (Runs(10, 5000), Runs(109, 14_900), 0),  # not enough to know what is usual
        (Runs(0, 0), Runs(1000, 1000), 0),
        (Runs(10, 0), Runs(1000, 0), 0),
    ],
)
def test_how_much_slower_a_minute_is(minute: Runs, hour: Runs, expected: float) -> None:
    """Means against means, once there is enough of both."""
    assert slowdown(minute, hour) == pytest.approx(expected)


RUNS = st.builds(Runs, st.integers(0, 1 << 60), st.integers(0, 1 << 60))


@given(before=RUNS, minute=RUNS)
def test_a_minute_and_its_hour(before: Runs, minute: Runs) -> None:
    """Never a fault, never negative; at most as much slower as the minute's share in the executions allows."""
    hour = Runs(before.executions + minute.executions, before.ns + minute.ns)
    found = slowdown(minute, hour)
    assert hour.since(before) == minute
    assert 0 <= found <= hour.executions / max(1, minute.executions) * (1 + 1e-9)
    if found:
        assert (minute.executions >= 10, before.executions >= MIN_GROUP) == (True, True)


@given(count=st.integers(100, 10**9), each=st.integers(1, 10**9), minute=st.integers(10, 10**9))
def test_a_kernel_that_always_takes_the_same_is_not_slower(count: int, each: int, minute: int) -> None:
    """However long that is and however often it runs."""
    found = slowdown(Runs(minute, minute * each), Runs(count + minute, (count + minute) * each))
    assert found == pytest.approx(1)
