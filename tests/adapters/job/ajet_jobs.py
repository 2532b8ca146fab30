"""The YAML that a stock AgentJet client sends, with every default filled in."""

from __future__ import annotations

from typing import Any

import yaml

Json = dict[str, Any]


def stock(**changes: Any) -> str:
    """Return the stock YAML with changes. In the names of arguments, `__` stands for a dot.

    For example, `ajet__rollout__top_p=0.9` changes `ajet.rollout.top_p`.
    """
    whole: Json = {
        "ajet": {
            "project_name": "ajet_default_project",
            "experiment_name": "read_yaml_name",
            "experiment_dir": "auto",
            "backbone": "verl",
            "model": {"path": "Qwen/Qwen2.5-7B-Instruct"},
            "data": {
                "max_prompt_length": 3000,
                "max_response_length": 15000,
                "train_batch_size": 32,
            },
            "rollout": {
                "user_workflow": None,
                "num_repeat": 4,
                "max_env_worker": 128,
                "max_response_length_in_one_turn": 4096,
                "max_model_len": 18000,
                "max_num_seqs": 64,
                "gpu_memory_utilization": 0.85,
                "tensor_model_parallel_size": 1,
                "n_vllm_engine": 1,
                "name": "vllm",
                "temperature": 0.9,
                "top_p": 1.0,
                "top_k": -1,
                "gamma": 1.0,
                "force_disable_toolcalls": False,
                "compute_madness_checklist": [],
                "agent_madness_termination": True,
                "agent_madness_reward": 0.0,
                "multi_turn": {"max_sample_per_task": 30, "max_steps": 30, "expected_steps": 1},
                "val_kwargs": {"temperature": 0.0, "do_sample": False},
            },
            "trainer_common": {
                "nnodes": 1,
                "n_gpus_per_node": 8,
                "logger": "tensorboard",
                "algorithm": {"adv_estimator": "grpo"},
                "use_kl_in_reward": False,
                "use_kl_loss": True,
                "kl_loss_coef": 0.002,
                "kl_loss_type": "low_var_kl",
                "kl_penalty_type": "kl",
                "mini_batch_num": 1,
                "ppo_epochs": 1,
                "loss_extra_scale_ratio": 1.0,
                "ulysses_sequence_parallel_size": 1,
                "optim": {
                    "optimizer": "AdamW",
                    "lr": 1e-6,
                    "betas": [0.9, 0.999],
                    "weight_decay": 0.01,
                    "grad_clip": 20.0,
                    "lr_scheduler_type": "constant",
                    "lr_warmup_steps": -1,
                    "lr_warmup_steps_ratio": 0.0,
                },
                "save_freq": 20,
                "test_freq": 20,
                "total_epochs": 50,
                "total_training_steps": None,
                "val_before_train": False,
                "val_only": False,
                "val_print_to_markdown_file_path": None,
                "train_print_to_markdown_file_path": None,
                "checkpoint_base_dir": "./saved_checkpoints",
            },
            "lora": {
                "lora_rank": 0,
                "lora_alpha": 16,
                "target_modules": "all-linear",
                "load_format": "auto",
                "layered_summon": False,
            },
            "enable_swarm_mode": True,
            "enable_interchange_server": True,
            "interchange_server": {"interchange_server_port": 10086, "interchange_method": "ipc"},
            "swarm_mode_sample_collection_method": "rollout_until_finish_enough_tasks",
            "swarm_mode_sample_collection_max_cached_episodes": 9999,
            "task_reader": {"type": "random_dummy"},
            "context_tracker": {
                "timeline_merging_policy": {"timeline_compare_level": "text", "ignore_tools": True},
                "fix_retokenization_drift": True,
            },
        },
        "actor_rollout_ref": {
            "actor": {
                "clip_ratio_low": 0.2,
                "clip_ratio_high": 0.2,
                "entropy_coeff": 0,
                "loss_agg_mode": "token-mean",
                "policy_loss": {"loss_mode": "vanilla"},
                "rollout_n": "${oc.select:actor_rollout_ref.rollout.n,1}",
            },
            "rollout": {"n": 1, "val_kwargs": {"n": 1}},
        },
        "data": {"train_batch_size": 1024},
        "trainer": {"n_gpus_per_node": 8},
        "hydra": {"searchpath": ["file://ajet/default_config"]},
        "defaults": ["verl_default", "ajet_default", "_self_"],
    }
    for key, value in changes.items():
        *sections, last = key.split("__")
        mapping = whole
        for section in sections:
            mapping = mapping[section]
        mapping[last] = value
    return yaml.safe_dump(whole, sort_keys=False)
