"""Makes the models that benchmarks measure: known architectures with random weights, or saved pipelines."""
