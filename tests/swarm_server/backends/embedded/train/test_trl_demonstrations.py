"""The gradients of sft, dpo and kto equal those of TRL's trainers, in float64."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from swarm_server.backends.embedded.train.demonstration_steps import (
    demonstrations_for,
    gradient_of,
    gradient_of_step,
    wide_model,
)
from transformers import AutoTokenizer

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.backends.embedded.demo_model import DEMO_MODEL_DIR
from fakevllm_server.types.demonstrations import Demonstration

pytestmark = pytest.mark.real

BETA, DESIRABLE, UNDESIRABLE = 0.3, 1.3, 0.7
CLOSE: dict[str, Any] = {"rtol": 1e-6, "atol": 1e-6}


def trl_gradient(
    name: str, folder: Path, output: Path, columns: dict[str, Any], rows: Any, **settings: Any
) -> tuple[torch.Tensor, float]:
    """Return gradient and loss of TRL's trainer `name` for one batch of token ids. The trainer is
    made with a text of its own, because it reads texts; the tokens go in through its collator."""
    trl: Any = import_module("trl")
    datasets: Any = import_module("datasets")
    model = wide_model(folder, seed=1)
    config = getattr(trl, f"{name}Config")(
        output_dir=str(output),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        **settings,
    )
    reference = {} if name == "SFT" else {"ref_model": wide_model(folder)}
    trainer = getattr(trl, f"{name}Trainer")(
        model=model,
        args=config,
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=AutoTokenizer.from_pretrained(DEMO_MODEL_DIR),
        **reference,
    )
    model.train()
    loss = trainer.compute_loss(model, trainer.data_collator(rows))
    loss.backward()
    return gradient_of(model), loss.item()


def check(
    folder: Path, job: TrainJob, rows: list[Demonstration], expected: tuple[torch.Tensor, float]
) -> None:
    actual, metrics = gradient_of_step(folder, job, rows)
    assert expected[0].abs().max() > 0.01
    torch.testing.assert_close(actual, expected[0], **CLOSE)
    assert metrics["loss"] == pytest.approx(expected[1], rel=1e-6)


def test_the_gradient_of_sft_is_that_of_trl(tiny_folder: Path, tmp_path: Path) -> None:
    rows = demonstrations_for("sft")
    tokens = [
        {
            "input_ids": [*row.prompt_ids, *row.response_ids],
            "labels": [-100] * len(row.prompt_ids) + list(row.response_ids),
        }
        for row in rows
    ]
    texts = {"prompt": ["a", "b"], "completion": ["c", "d"]}
    expected = trl_gradient("SFT", tiny_folder, tmp_path, texts, tokens)
    check(tiny_folder, TrainJob(loss="sft"), rows, expected)


def test_the_gradient_of_dpo_is_that_of_trl(tiny_folder: Path, tmp_path: Path) -> None:
    rows = demonstrations_for("dpo")
    tokens = [
        {
            "prompt_ids": list(good.prompt_ids),
            "chosen_ids": list(good.response_ids),
            "rejected_ids": list(bad.response_ids),
        }
        for good, bad in zip(rows[::2], rows[1::2], strict=True)
    ]
    texts = {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]}
    expected = trl_gradient("DPO", tiny_folder, tmp_path, texts, tokens, beta=BETA)
    check(tiny_folder, TrainJob(loss="dpo", preference_beta=BETA), rows, expected)


def test_the_gradient_of_kto_is_that_of_trl(tiny_folder: Path, tmp_path: Path) -> None:
    rows = demonstrations_for("kto")
    tokens = [
        {
            "prompt_ids": list(row.prompt_ids),
            "completion_ids": list(row.response_ids),
            # TRL's pairing, as in KTOTrainer's `add_kl_completion_ids`.
            "KL_completion_ids": list(other.response_ids),
            "label": row.kind == "desirable",
        }
        for row, other in zip(rows, [rows[-1], *rows[:-1]], strict=True)
    ]
    texts = {"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]}
    weights = {"desirable_weight": DESIRABLE, "undesirable_weight": UNDESIRABLE}
    expected = trl_gradient("KTO", tiny_folder, tmp_path, texts, tokens, beta=BETA, **weights)
    job = TrainJob(
        loss="kto",
        preference_beta=BETA,
        desirable_weight=DESIRABLE,
        undesirable_weight=UNDESIRABLE,
    )
    check(tiny_folder, job, rows, expected)
