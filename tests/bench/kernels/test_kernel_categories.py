"""Categories of kernels: names as traces of H100, H200 and A100 show them, alone and with the operator that launched them."""

from __future__ import annotations

import pytest

from sdfastgn.bench.kernel_categories import (
    ATTENTION,
    CATEGORIES,
    CONVOLUTION,
    COPIES,
    FLOOR,
    GEMM,
    NORMALISATION,
    OTHER,
    POINTWISE,
    category,
    kernels_of_the_package,
    operator_category,
)

COPY_FUNCTOR = (
    "at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}"
    "::operator()() const::{lambda()#12}::operator()() const::{lambda(c10::Half)#1}>(at::TensorIteratorBase&, ...)"
)
SILU_FUNCTOR = "at::native::(anonymous namespace)::silu_kernel(at::TensorIteratorBase&)::{lambda()#1}::operator()() const"
ADD_FUNCTOR = "at::native::CUDAFunctor_add<c10::Half>"
NORM_FUNCTOR = (
    "at::native::(anonymous namespace)::GroupNormKernelImplInternal<c10::Half>(at::Tensor const&, long)"
)
CUDNN = "nhwckrsc_nhwc_tilesize128x128x64_warpgroupsize1x1x1_g1"
CUTLASS_CONV = "cutlass_tensorop_f16_s16816fprop_optimized_f16_256x64_32x4_nhwc_align8"
FLASH = "Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass::half_t>"
EFFICIENT = "PyTorchMemEffAttention::AttentionKernel<cutlass::half_t, cutlass::arch::Sm80, true, 64, 64, 64, true, true>"

BY_NAME = [
    # cuDNN
    (
        CONVOLUTION,
        "sm90-fprop",
        f"sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_{CUDNN}_execute_kernel__5x_cudnn",
    ),
    (
        CONVOLUTION,
        "sm80-indexed",
        "sm80_xmma_fprop_implicit_gemm_indexed_wo_smem_f16f16_f16f32_f32_nhwckrsc_nhwc",
    ),
    (
        CONVOLUTION,
        "sm90-dgrad",
        "sm90_xmma_dgrad_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x64",
    ),
    (
        CONVOLUTION,
        "sm80-wgrad",
        "sm80_xmma_wgrad_implicit_gemm_indexed_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize64x64x64",
    ),
    (
        CONVOLUTION,
        "1x1-as-gemm",
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_execute_kernel__5x_cudnn",
    ),
    (CONVOLUTION, "cutlass-fprop", f"void cutlass__5x_cudnn::Kernel<{CUTLASS_CONV}>({CUTLASS_CONV}::Params)"),
    (CONVOLUTION, "cutlass3x", "void cutlass3x_sm100_tensorop_s256x256x16implicit_gemm_fprop_bf16_void_bf16"),
    (CONVOLUTION, "mangled", "_ZN7cutlass6KernelINS_4conv6kernel38ImplicitGemmConvolutionFusionPerSamp"),
    (
        CONVOLUTION,
        "direct-nhwc",
        "void convolve_common_engine_float_NHWC<__half, __half, 128, 5, 5, 3, 3, 3>(...)",
    ),
    (
        CONVOLUTION,
        "sgemm",
        "void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1, false, false, true>(...)",
    ),
    (CONVOLUTION, "winograd", "void cudnn::winograd_nonfused::winogradForwardFilter4x4<float, float>(...)"),
    (CONVOLUTION, "scudnn", "ampere_scudnn_128x64_relu_interior_nn_v1"),
    (
        CONVOLUTION,
        "grouped",
        "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false, 0, 0, int>(...)",
    ),
    (
        CONVOLUTION,
        "fft",
        "void fft2d_r2c_32x32<float, false, 1u, true>(float2*, float const*, int, int, int, int, int)",
    ),
    (
        CONVOLUTION,
        "im2col",
        "void at::native::im2col_kernel<c10::Half>(long, c10::Half const*, long, long, long, long)",
    ),
    (
        CONVOLUTION,
        "generated",
        "cudnn_generated_fort_native_conv_sm90_fwd_wgmma_f16_knob_3_128x128x64_kernel0_0",
    ),
    # cuBLAS and CUTLASS
    (GEMM, "nvjet-fp16", "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN"),
    (GEMM, "nvjet-splitk", "nvjet_hsh_32x64_64x16_4x1_v_bz_splitK_TNN"),
    (GEMM, "nvjet-bias", "nvjet_tst_192x160_64x4_2x1_v_bz_coopB_bias_TNT"),
    (
        GEMM,
        "xmma-cublas",
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas",
    ),
    (
        GEMM,
        "splitk-reduce",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __half, float, false, true>(...)",
    ),
    (GEMM, "ampere", "ampere_fp16_s16816gemm_fp16_128x64_ldg8_f2f_stages_64x3_tn"),
    (
        GEMM,
        "cutlass-gemm",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_32x1_tn_align8>(...)",
    ),
    (
        GEMM,
        "gemv",
        "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false, false>(...)",
    ),
    (GEMM, "gemmk1", "void gemmk1_kernel<int, float, 256, 5, false, false, false, false>(...)"),
    # attention: cuDNN's is called fprop, PyTorch's holds cutlass
    (
        ATTENTION,
        "cudnn",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
    ),
    (ATTENTION, "flash", f"void pytorch_flash::flash_fwd_kernel<{FLASH}>(pytorch_flash::Flash_fwd_params)"),
    (ATTENTION, "flash-splitkv", f"void pytorch_flash::flash_fwd_splitkv_combine_kernel<{FLASH}>(...)"),
    (
        ATTENTION,
        "flash-backward",
        f"void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<{FLASH}>(...)",
    ),
    (ATTENTION, "efficient", f"fmha_cutlassF_f16_aligned_64x64_rf_sm80({EFFICIENT}::Params)"),
    (
        ATTENTION,
        "softmax",
        "void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 10, false>(...)",
    ),
    (
        ATTENTION,
        "softmax-large",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::Half, float>(...)",
    ),
    (ATTENTION, "softmax-inductor", "triton_red_fused__softmax_mul_4"),
    # norms
    (
        NORMALISATION,
        "moments",
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::Half>(long, float)",
    ),
    (
        NORMALISATION,
        "fused-params",
        "void at::native::(anonymous namespace)::ComputeFusedParamsCUDAKernel<c10::Half>(...)",
    ),
    (
        NORMALISATION,
        "group-norm-apply",
        f"void at::native::elementwise_kernel<128, 4, {NORM_FUNCTOR}>(int, {NORM_FUNCTOR})",
    ),
    (
        NORMALISATION,
        "layer-norm",
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float>(...)",
    ),
    (
        NORMALISATION,
        "layer-norm-backward",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<c10::Half>",
    ),
    (NORMALISATION, "batch-norm", "void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float, 512, true, 1>(...)"),
    (NORMALISATION, "inductor", "triton_red_fused_native_group_norm_0"),
    (NORMALISATION, "inductor-silu", "triton_poi_fused_convolution_native_group_norm_silu_17"),
    (NORMALISATION, "inductor-per", "triton_per_fused_add_native_layer_norm_view_3"),
    (NORMALISATION, "stable-fast", "group_norm_4d_channels_last_forward_collect_stats_kernel_stage_1"),
    # pointwise
    (
        POINTWISE,
        "silu",
        f"void at::native::vectorized_elementwise_kernel<4, {SILU_FUNCTOR}, std::array<char*, 2ul>>(...)",
    ),
    (
        POINTWISE,
        "add",
        f"void at::native::vectorized_elementwise_kernel<4, {ADD_FUNCTOR}, std::array<char*, 3ul>>(...)",
    ),
    (
        POINTWISE,
        "cat",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::OpaqueType<2u>>(...)",
    ),
    (
        POINTWISE,
        "upsample",
        "void at::native::(anonymous namespace)::upsample_nearest2d_nhwc_out_frame<c10::Half>(...)",
    ),
    (
        POINTWISE,
        "reduction",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::Half, at::native::MeanOps>>",
    ),
    (POINTWISE, "memset", "Memset (Device)"),
    (POINTWISE, "inductor-bias", "triton_poi_fused_convolution_4"),
    (POINTWISE, "inductor-residual", "triton_poi_fused_add_convolution_div_12"),
    (POINTWISE, "inductor-geglu", "triton_poi_fused_gelu_mul_split_7"),
    (POINTWISE, "inductor-upsample", "triton_poi_fused__unsafe_index_convolution_33"),
    (POINTWISE, "inductor-combo", "triton_for_fused_0"),
    # moves of memory
    (
        COPIES,
        "to-nhwc",
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true, (cudnnKernelDataType_t)0>(...)",
    ),
    (
        COPIES,
        "to-nchw",
        "void cudnn::engines_precompiled::nhwcToNchwKernel<__half, __half, float, true, false>(...)",
    ),
    (
        COPIES,
        "padding",
        "void nhwcAddPaddingKernel<__half, __half, float, true, (cudnnKernelDataType_t)0>(...)",
    ),
    (
        COPIES,
        "convert",
        "void cudnn::ops::convertTensor_kernel<float, float, float, (cudnnKernelDataType_t)0>(...)",
    ),
    (
        COPIES,
        "contiguous",
        f"void at::native::elementwise_kernel<128, 4, {COPY_FUNCTOR}>(int, {COPY_FUNCTOR})",
    ),
    (
        COPIES,
        "cast",
        "void at::native::vectorized_elementwise_kernel<4, at::native::float16_copy_kernel_cuda(...)::{lambda()}>",
    ),
    (COPIES, "memcpy", "Memcpy DtoD (Device -> Device)"),
    (COPIES, "memcpy-pinned", "Memcpy HtoD (Pinned -> Device)"),
    (COPIES, "inductor-clone", "triton_poi_fused_clone_9"),
    (COPIES, "inductor-cast", "triton_poi_fused__to_copy_view_2"),
    # not known: never put anywhere silently
    (OTHER, "unknown", "void some_library::mystery<float>(float*, int)"),
    (OTHER, "unknown-fft", "user_fft2d"),
    (OTHER, "empty", ""),
]

WITH_OPERATOR = [
    # GEMM by name, a convolution by what launched it
    (CONVOLUTION, "nvjet-1x1", "nvjet_hsh_128x128_64x4_1x2_h_bz_TNN", "aten::cudnn_convolution"),
    (
        CONVOLUTION,
        "cutlass-conv",
        "void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm>",
        "aten::convolution_backward",
    ),
    (GEMM, "memset-of-split-k", "Memset (Device)", "aten::addmm"),
    (GEMM, "linear", "void some_library::mystery<float>(float*, int)", "aten::_addmm_activation"),
    (GEMM, "sfast", "void some_library::mystery<float>(float*, int)", "sfast::cublas_lowp_linear"),
    (ATTENTION, "math", "nvjet_hsh_128x128_64x4_1x2_h_bz_TNN", "aten::_scaled_dot_product_attention_math"),
    (
        NORMALISATION,
        "apply",
        f"void at::native::vectorized_elementwise_kernel<4, {ADD_FUNCTOR}>",
        "aten::native_group_norm",
    ),
    (POINTWISE, "bias-of-a-convolution", "void some_library::mystery<float>(float*, int)", "aten::add_"),
    (POINTWISE, "upsample", "void some_library::mystery<float>(float*, int)", "aten::upsample_nearest2d"),
    (COPIES, "clone", "void some_library::mystery<float>(float*, int)", "aten::copy_"),
    # the name says more than the operator
    (
        COPIES,
        "layout-in-a-convolution",
        "void cudnn::ops::nchwToNhwcKernel<__half, __half>(...)",
        "aten::cudnn_convolution",
    ),
    (COPIES, "memcpy-in-cat", "Memcpy DtoD (Device -> Device)", "aten::cat"),
    (
        NORMALISATION,
        "inductor",
        "triton_red_fused_native_group_norm_0",
        "triton_red_fused_native_group_norm_0",
    ),
    # an operator that says nothing leaves it to the name
    (GEMM, "replay", "nvjet_hsh_128x128_64x4_1x2_h_bz_TNN", "Torch-Compiled Region: 0/0"),
    (OTHER, "nothing-known", "void some_library::mystery<float>(float*, int)", "aten::view"),
]


@pytest.mark.parametrize(
    ("expected", "name"),
    [pytest.param(expected, name, id=f"{expected}-{case}") for expected, case, name in BY_NAME],
)
def test_by_name(expected: str, name: str) -> None:
    assert category(name) == expected


@pytest.mark.parametrize(
    ("expected", "name", "operator"),
    [
        pytest.param(expected, name, operator, id=f"{expected}-{case}")
        for expected, case, name, operator in WITH_OPERATOR
    ],
)
def test_with_the_operator_that_launched_it(expected: str, name: str, operator: str) -> None:
    assert category(name, operator) == expected


@pytest.mark.parametrize(
    ("expected", "operator"),
    [
        pytest.param(CONVOLUTION, "aten::mkldnn_convolution", id="convolution"),
        pytest.param(CONVOLUTION, "aten::_slow_conv2d_forward", id="slow-convolution"),
        pytest.param(GEMM, "aten::bmm", id="bmm"),
        pytest.param(GEMM, "aten::linear", id="linear"),
        pytest.param(ATTENTION, "aten::_scaled_dot_product_flash_attention_for_cpu", id="attention"),
        pytest.param(NORMALISATION, "aten::native_layer_norm", id="layer-norm"),
        pytest.param(NORMALISATION, "sdfastgn::group_norm", id="ours"),
        pytest.param(NORMALISATION, "sdfastgn::cat_with_statistics", id="our-statistics"),
        pytest.param(POINTWISE, "aten::silu", id="silu"),
        pytest.param(POINTWISE, "aten::upsample_bilinear2d", id="not-a-linear"),
        pytest.param(COPIES, "aten::clone", id="clone"),
        pytest.param(None, "aten::as_strided", id="view"),
        pytest.param(None, "aten::linalg_vector_norm", id="not-a-norm"),
    ],
)
def test_of_operators(expected: str | None, operator: str) -> None:
    assert operator_category(operator) == expected
    assert category("", operator) == (expected or OTHER)


def test_the_floor_is_part_of_the_categories() -> None:
    assert FLOOR == CATEGORIES[:3] == (CONVOLUTION, GEMM, ATTENTION)


# ---- the package's own kernels


def test_the_packages_kernels_are_found_with_a_category() -> None:
    pytest.importorskip("triton")
    found = kernels_of_the_package()
    assert len(found) > 10
    without = [name for name, own in found.items() if own is None]
    assert not without, f"say in kernel_categories._OWN_FILES what the kernels of a new file are: {without}"


@pytest.mark.parametrize(
    "name",
    ["apply_kernel", "small_kernel", "channels_kernel", "merge_kernel", "_statistics_kernel", "_rows_kernel"],
)
def test_kernels_of_norms_are_normalisation(name: str) -> None:
    pytest.importorskip("triton")
    assert category(name) == NORMALISATION
    assert category(name, "aten::convolution") == NORMALISATION
