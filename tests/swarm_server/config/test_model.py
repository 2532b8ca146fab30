"""The server's settings: contradictions are refused before an engine starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.config.model import ConfigError, ServerConfig, read_keys

RUN = Path("run")
PLAIN: dict[str, Any] = {"backend": "embedded", "run_dir": RUN}


@pytest.mark.parametrize(
    ("backend", "rollout", "trainer"),
    [("embedded", "embedded", "embedded"), ("vllm", "vllm", "embedded"), ("verl", "vllm", "verl")],
)
def test_a_backend_is_a_rollout_engine_and_a_trainer(
    backend: str, rollout: str, trainer: str
) -> None:
    config = ServerConfig(backend, RUN)
    assert (config.rollout_name, config.trainer_name) == (rollout, trainer)


def test_rollout_and_trainer_override_the_backend() -> None:
    config = ServerConfig("verl", RUN, rollout="embedded")
    assert (config.rollout_name, config.trainer_name) == ("embedded", "verl")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 80000}, "--port must be 0 to 65535, got 80000"),
        ({"port": -1}, "--port must be 0 to 65535, got -1"),
        ({"backend": "vlm"}, "--backend must be one of"),
        ({"rollout": "verl"}, "--rollout must be one of"),
        ({"trainer": "vllm"}, "--trainer must be one of"),
        ({"rollout": "fake"}, "tokens are not those of other engines"),
        ({"rollout_url": "http://gpu:8000"}, "--rollout-url is for --rollout vllm"),
        ({"backend": "vllm", "rollout_key": "k"}, "--rollout-key-file is for --rollout-url"),
        ({"media_domains": ["a.org"]}, "--media-domain is for --rollout vllm"),
        ({"backend": "vllm", "media_domains": ["https://a.org"]}, "takes a host name such as"),
        (
            {"backend": "vllm", "engine_args": ["--allowed-media-domains=a.org"]},
            "use --media-domain HOST instead",
        ),
        ({"trainer_args": ["--device=cpu"]}, "give --engine-arg"),
        ({"weights_dir": RUN}, "here one process samples and trains"),
        ({"backend": "vllm", "engine_args": ["--uds", "/x"]}, "chooses the engine's socket"),
        (
            {"backend": "vllm", "rollout_url": "http://gpu:8000", "engine_args": ["--seed=1"]},
            "not for --rollout-url",
        ),
    ],
)
def test_an_invalid_or_unused_setting_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**(PLAIN | settings))


def test_a_job_in_lockstep_gives_the_engine_an_argument() -> None:
    config = ServerConfig("embedded", RUN, engine_args=["--device=cpu"])
    assert config.engine_args_for(TrainJob(lockstep=True)) == ["--device=cpu", "--lockstep"]
    assert config.engine_args_for(TrainJob()) == ["--device=cpu"]


@pytest.mark.parametrize("url", ["http://gpu:8000", "https://gpu", "http://[::1]:8000/v1/"])
def test_the_url_of_a_vllm_may_end_in_v1(url: str) -> None:
    assert ServerConfig("vllm", RUN, rollout_url=url).rollout_url == url


@pytest.mark.parametrize(
    "url",
    ["gpu:8000", "http://", "http://gpu:99999", "http://[::1", "http://gpu/api", "http://gpu?x=1"],
)
def test_an_invalid_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        ServerConfig("vllm", RUN, rollout_url=url)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig("vllm", RUN, rollout_url="http://me:secret@gpu:8000")
    assert "secret" not in str(refused.value)


def test_keys_are_not_in_the_repr() -> None:
    config = ServerConfig("vllm", RUN, rollout_url="http://gpu:8000", rollout_key="secret")
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("files", "message"),
    [([], r"no config\.json"), (["config.json", "tokenizer.json"], r"no \*\.safetensors")],
)
def test_a_folder_without_a_model_is_refused(
    tmp_path: Path, files: list[str], message: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=message):
        ServerConfig("vllm", RUN, model=str(tmp_path))


PUBLIC_HOSTS = [
    "0.0.0.0",
    "::",
    "::ffff:0.0.0.0",
    "0",
    "",
    "192.168.0.1",
    "gpu-box",
    "localhost.evil",
]


@pytest.mark.parametrize("host", PUBLIC_HOSTS)
def test_a_public_address_needs_a_key_file(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is reachable from outside: add --key-file"):
        ServerConfig("fake", RUN, host=host)
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    assert ServerConfig("fake", RUN, host=host, keys=read_keys(keys)).host == host
    for text in ("", "# sk-one\n", f"sha256:{'0' * 64} app today revoked later\n"):
        keys.write_text(text)
        with pytest.raises(ConfigError, match="has no valid key"):
            read_keys(keys)


@pytest.mark.parametrize("settings", [{"kl_loss_coef": 0.1}, {"use_kl_in_reward": True}])
def test_the_verl_trainer_keeps_a_reference_for_jobs_that_need_one(
    settings: dict[str, Any],
) -> None:
    job = TrainJob.model_validate(settings)
    verl = ServerConfig("verl", RUN, trainer_args=["--num-workers=2"])
    assert verl.trainer_args_for(job) == ["--keep-reference", "--num-workers=2"]
    assert verl.trainer_args_for(TrainJob()) == ["--num-workers=2"]
    assert ServerConfig("vllm", RUN).trainer_args_for(job) == []


def test_the_verl_trainer_is_started_with_the_job_settings_that_change_its_models() -> None:
    job = TrainJob(lr=1e-3, lora_rank=4, lora_alpha=8, seed=3, gradient_checkpointing=True)
    # The model without its adapters is the reference, so no copy of the weights is kept.
    job = job.model_copy(update={"kl_loss_coef": 0.1})
    verl = ServerConfig("verl", RUN, trainer_args=["--no-gradient-checkpointing"])
    assert verl.trainer_args_for(job) == [
        *("--lora-rank=4", "--lora-alpha=8", "--target-modules=all-linear", "--lora-seed=3"),
        *("--gradient-checkpointing", "--no-gradient-checkpointing"),
    ]


def test_host_names_in_upper_case_match_the_header_of_a_request() -> None:
    config = ServerConfig("fake", RUN, allowed_hosts=("GPU-Box",))
    assert "gpu-box" in config.hosts
