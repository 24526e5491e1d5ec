"""Makes the models that are measured: known architectures with random weights, or saved pipelines."""
