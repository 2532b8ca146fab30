"""Settings of a job that have no effect. They are accepted because AgentJet's jobs have them."""

from __future__ import annotations

NEVER_USED = {
    "base_yaml_config": "the SDK reads this file, the server does not",
    "ensure_new_experiment": "the SDK names experiments, the server does not",
    "experiment_dir": "all files of a run are in the server's --run-dir",
    "logging": "the curves are in the server's run log",
    "train_print_to_markdown_file_path": "the metrics of a step are in the server's run log",
    "val_print_to_markdown_file_path": "the server runs no validation",
    "swarm_mode": "clients always run the episodes",
    "compute_madness_checklist": "the server does not check answers; check them in the reward",
    "timeline_compare_level": "tokens are compared, as with the value token",
    "nnodes": "the server trains on the nodes that it was given, such as those of a Ray cluster",
    "kl_penalty_type": "the KL in the reward is kl, which is also called k1",
    "ulysses_sequence_parallel_size": "each sequence is processed on one GPU",
    "lora_load_format": "LoRA adapters are always safetensors",
    "layered_summon": "LoRA adapters are merged into the weights before the engine loads them",
}
"""Settings that no server uses, with the explanation for the user."""
