"""Categories of kernels, by names from traces of H100, H200 and A100, and by operators."""

from __future__ import annotations

import pytest

from sdfastgn.bench.kernel_categories import (
    ATTENTION,
    CONVOLUTION,
    COPIES,
    GEMM,
    NORMALIZATION,
    OTHER,
    POINTWISE,
    category,
    kernels_of_the_package,
    operator_category,
)

MYSTERY = "void some_library::mystery<float>(float*, int)"
BY_NAME = {
    CONVOLUTION: [
        "sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64_warpgr",
        "sm90_xmma_dgrad_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x64x64",
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_execute_kernel__5x_cudnn",
        "_ZN7cutlass6KernelINS_4conv6kernel38ImplicitGemmConvolutionFusionPerSamp",
        "void convolve_common_engine_float_NHWC<__half, __half, 128, 5, 5, 3, 3, 3>(...)",
        "void implicit_convolve_sgemm<float, float, 128, 5, 5, 3, 3, 3, 1, false, false, true>(...)",
        "void cudnn::winograd_nonfused::winogradForwardFilter4x4<float, float>(...)",
        "ampere_scudnn_128x64_relu_interior_nn_v1",
        "void cudnn::cnn::conv2d_grouped_direct_kernel<false, true, false, false, 0, 0, int>(...)",
        "void fft2d_r2c_32x32<float, false, 1u, true>(float2*, float const*, int, int, int, int, int)",
        "void at::native::im2col_kernel<c10::Half>(long, c10::Half const*, long, long, long, long)",
        "cudnn_generated_fort_native_conv_sm90_fwd_wgmma_f16_knob_3_128x128x64_kernel0_0",
    ],
    GEMM: [
        "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNN",
        "nvjet_tst_192x160_64x4_2x1_v_bz_coopB_bias_TNT",
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_execute_segment_k_off_kernel__5x_cublas",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __half, float, false, true>(...)",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_32x1_tn_align8>(...)",
        "void gemv2T_kernel_val<int, int, __half, __half, __half, float, 128, 16, 4, 4, false, false>(...)",
    ],
    ATTENTION: [
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, fa",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_fwd_kernel_trait",
        "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass",
        "void (anonymous namespace)::softmax_warp_forward<c10::Half, c10::Half, float, 10, false>(...)",
        "triton_red_fused__softmax_mul_4",
    ],
    NORMALIZATION: [
        "void at::native::(anonymous namespace)::RowwiseMomentsCUDAKernel<c10::Half>(long, float)",
        "void at::native::elementwise_kernel<128, 4, (anonymous namespace)::GroupNormKernelImpl",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernel<c10::Half>",
        "void cudnn::bn_fw_tr_1C11_kernel_NCHW<__half, float, 512, true, 1>(...)",
        "triton_red_fused_native_group_norm_0",
        "triton_poi_fused_convolution_native_group_norm_silu_17",
        "group_norm_4d_channels_last_forward_collect_stats_kernel_stage_1",
    ],
    POINTWISE: [
        "void at::native::vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::si",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy_contig<at::native::OpaqueType<2u>>(...)",
        "void at::native::(anonymous namespace)::upsample_nearest2d_nhwc_out_frame<c10::Half>(...)",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::Half, at::native::MeanOps>>",
        "Memset (Device)",
        "triton_poi_fused_convolution_4",
        "triton_poi_fused__unsafe_index_convolution_33",
        "triton_for_fused_0",
    ],
    COPIES: [
        "void cudnn::ops::nchwToNhwcKernel<__half, __half, float, false, true, (cudnnKernelDataT",
        "void nhwcAddPaddingKernel<__half, __half, float, true, (cudnnKernelDataType_t)0>(...)",
        "void cudnn::ops::convertTensor_kernel<float, float, float, (cudnnKernelDataType_t)0>(...)",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda(at::TensorIter",
        "void at::native::vectorized_elementwise_kernel<4, at::native::float16_copy_kernel_cuda(",
        "Memcpy DtoD (Device -> Device)",
        "triton_poi_fused_clone_9",
        "triton_poi_fused__to_copy_view_2",
    ],
    OTHER: [
        MYSTERY,
        "user_fft2d",
        "",
    ],
}

# (kernel, the operator that launched it) -> category
WITH_OPERATOR = {
    # GEMM by name, a convolution by what launched it
    ("nvjet_hsh_128x128_64x4_1x2_h_bz_TNN", "aten::cudnn_convolution"): CONVOLUTION,
    ("void cutlass::Kernel2<cutlass_80_tensorop_f16_s16816gemm>", "aten::convolution_backward"): CONVOLUTION,
    ("nvjet_hsh_128x128_64x4_1x2_h_bz_TNN", "aten::_scaled_dot_product_attention_math"): ATTENTION,
    ("void at::native::vectorized_elementwise_kernel<4>", "aten::native_group_norm"): NORMALIZATION,
    ("Memset (Device)", "aten::addmm"): GEMM,
    (MYSTERY, "sfast::cublas_lowp_linear"): GEMM,
    (MYSTERY, "aten::add_"): POINTWISE,
    (MYSTERY, "aten::copy_"): COPIES,
    # the name says more than the operator
    ("void cudnn::ops::nchwToNhwcKernel<__half, __half>(...)", "aten::cudnn_convolution"): COPIES,
    ("Memcpy DtoD (Device -> Device)", "aten::cat"): COPIES,
    ("triton_red_fused_native_group_norm_0", "triton_red_fused_native_group_norm_0"): NORMALIZATION,
    ("apply_kernel", "aten::convolution"): NORMALIZATION,
    # an operator that says nothing leaves it to the name
    ("nvjet_hsh_128x128_64x4_1x2_h_bz_TNN", "Torch-Compiled Region: 0/0"): GEMM,
    (MYSTERY, "aten::view"): OTHER,
}
OPERATORS = {
    "aten::mkldnn_convolution": CONVOLUTION,
    "aten::_slow_conv2d_forward": CONVOLUTION,
    "aten::bmm": GEMM,
    "aten::linear": GEMM,
    "aten::_addmm_activation": GEMM,
    "aten::_scaled_dot_product_flash_attention_for_cpu": ATTENTION,
    "aten::native_layer_norm": NORMALIZATION,
    "sdfastgn::group_norm": NORMALIZATION,
    "sdfastgn::cat_with_statistics": NORMALIZATION,
    "aten::silu": POINTWISE,
    "aten::upsample_bilinear2d": POINTWISE,  # not a linear
    "aten::clone": COPIES,
    "aten::as_strided": None,
    "aten::linalg_vector_norm": None,  # not a norm
}


@pytest.mark.parametrize("expected", BY_NAME)
def test_by_name(expected):
    assert {name: category(name) for name in BY_NAME[expected]} == dict.fromkeys(BY_NAME[expected], expected)


@pytest.mark.parametrize(("launch", "expected"), WITH_OPERATOR.items())
def test_with_the_operator_that_launched_it(launch, expected):
    if launch[0] == "apply_kernel":
        pytest.importorskip("triton")
    assert category(*launch) == expected


def test_of_operators():
    assert {name: operator_category(name) for name in OPERATORS} == OPERATORS
    assert all(category("", name) == (expected or OTHER) for name, expected in OPERATORS.items())


def test_the_packages_kernels_are_found_with_a_category():
    pytest.importorskip("triton")
    found = kernels_of_the_package()
    assert len(found) > 10
    without = [name for name, own in found.items() if own is None]
    assert not without, f"say in kernel_categories._OWN_FILES what the kernels of a new file are: {without}"
    norms = ("apply_kernel", "small_kernel", "channels_kernel", "merge_kernel", "_statistics_kernel")
    assert {category(name) for name in norms} == {NORMALIZATION}
