"""Known architectures with random weights, and saved pipelines."""
