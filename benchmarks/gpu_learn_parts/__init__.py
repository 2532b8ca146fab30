"""Parts of `benchmarks.gpu_learn`: the made-up tasks, the sizes of model and training, the training
of a model from nothing, one arm of reinforcement learning, and the comparison of the arms."""
