"""Which GPUs sample and which train, and whether the model fits into their memory.

The section `cluster` of the server's settings says how many GPUs there are and how they are divided
(`cluster_section`). From a model's `config.json` (`model_shape`) follow the bytes of the trainer
(`training_memory`) and of the rollout engine (`rollout_memory`) on one GPU. `memory_plan` adds them
up, and says what does not fit and what to change.

Everything here is arithmetic: no torch, no GPU, no process. Each number has its formula as text.
"""
