# Read by kernel-builder, which refuses a project without this file.
{
  description = "Kernels of sdfastgn: GroupNorm, channel norm, LayerNorm and BatchNorm";

  inputs.kernel-builder.url = "github:huggingface/kernels";

  outputs =
    { self, kernel-builder, ... }:
    kernel-builder.lib.genKernelFlakeOutputs {
      inherit self;
      path = ./.;
    };
}
