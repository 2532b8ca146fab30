"""Parts of `benchmarks.hack_zoo`: the tasks, the base model, the reward hooks, the independent
check of answers, one training run, its record, and the table of the detectors."""
