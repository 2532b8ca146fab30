"""Parts of `benchmarks.forest` and `benchmarks.forest_gpu`: sessions to train on, the variants that
are compared, measurement, the comparison with TRL, and the report."""
