"""The server's settings: what contradicts itself is refused before anything starts."""

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
def test_a_backend_names_a_pair_of_engines(backend: str, rollout: str, trainer: str) -> None:
    config = ServerConfig(backend, RUN)
    assert (config.rollout_name, config.trainer_name) == (rollout, trainer)


def test_each_of_the_pair_can_be_another() -> None:
    config = ServerConfig("verl", RUN, rollout="embedded")
    assert (config.rollout_name, config.trainer_name) == ("embedded", "verl")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"port": 80000}, "--port must be 0 to 65535, got 80000"),
        ({"port": -1}, "--port must be 0 to 65535, got -1"),
        ({"backend": "vlm"}, "--backend must be one of"),
        ({"rollout": "verl"}, "--rollout must be one of"),
        ({"trainer": "vllm"}, "--trainer must be one of"),
        ({"rollout": "fake"}, "no tokens in common"),
        ({"rollout_url": "http://gpu:8000"}, "--rollout-url is for --rollout vllm"),
        ({"backend": "vllm", "rollout_key": "k"}, "--rollout-key-file is for --rollout-url"),
        ({"trainer_args": ["--device=cpu"]}, "give --engine-arg"),
        ({"weights_dir": RUN}, "there is one process"),
        ({"backend": "vllm", "engine_args": ["--uds", "/x"]}, "chooses the engine's socket"),
        (
            {"backend": "vllm", "rollout_url": "http://gpu:8000", "engine_args": ["--seed=1"]},
            "not for --rollout-url",
        ),
    ],
)
def test_a_setting_that_names_nothing_or_would_do_nothing_is_refused(
    settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        ServerConfig(**(PLAIN | settings))


def test_a_job_in_lockstep_is_for_engines_that_keep_to_it() -> None:
    job = TrainJob(lockstep=True)
    config = ServerConfig("embedded", RUN, engine_args=["--device=cpu"])
    assert config.engine_args_for(job) == ["--device=cpu", "--lockstep"]
    assert config.engine_args_for(TrainJob()) == ["--device=cpu"]
    for backend, rollout in (("vllm", None), ("fake", None), ("embedded", "vllm")):
        with pytest.raises(ConfigError, match="start the server with --backend embedded"):
            ServerConfig(backend, RUN, rollout=rollout).engine_args_for(job)


@pytest.mark.parametrize("url", ["http://gpu:8000", "https://gpu", "http://[::1]:8000/v1/"])
def test_the_url_of_a_vllm_may_end_in_v1(url: str) -> None:
    assert ServerConfig("vllm", RUN, rollout_url=url).rollout_url == url


@pytest.mark.parametrize(
    "url",
    ["gpu:8000", "http://", "http://gpu:99999", "http://[::1", "http://gpu/api", "http://gpu?x=1"],
)
def test_a_url_that_cannot_be_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="http://HOST:PORT"):
        ServerConfig("vllm", RUN, rollout_url=url)


def test_a_password_in_a_url_is_refused_and_not_repeated() -> None:
    with pytest.raises(ConfigError) as refused:
        ServerConfig("vllm", RUN, rollout_url="http://me:secret@gpu:8000")
    assert "secret" not in str(refused.value)


def test_keys_are_not_shown() -> None:
    config = ServerConfig("vllm", RUN, rollout_url="http://gpu:8000", rollout_key="secret")
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("files", "told"),
    [([], r"no config\.json"), (["config.json", "tokenizer.json"], r"no \*\.safetensors")],
)
def test_a_folder_that_is_no_model_is_refused_before_an_engine_starts(
    tmp_path: Path, files: list[str], told: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(ConfigError, match=told):
        ServerConfig("vllm", RUN, model=str(tmp_path))


OUTSIDE = ["0.0.0.0", "::", "::ffff:0.0.0.0", "0", "", "192.168.0.1", "gpu-box", "localhost.evil"]


@pytest.mark.parametrize("host", OUTSIDE)
def test_an_address_that_others_can_reach_needs_a_key(host: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"is reachable from outside: add --key-file"):
        ServerConfig("fake", RUN, host=host)
    keys = tmp_path / "keys"
    keys.write_text("sk-one\n")
    assert ServerConfig("fake", RUN, host=host, keys=read_keys(keys)).host == host
    for text in ("", "# sk-one\n", f"sha256:{'0' * 64} app today revoked later\n"):
        keys.write_text(text)
        with pytest.raises(ConfigError, match="holds no key that is good"):
            read_keys(keys)


@pytest.mark.parametrize("of_job", [{"kl_loss_coef": 0.1}, {"use_kl_in_reward": True}])
def test_the_verl_trainer_keeps_a_reference_for_jobs_that_need_one(of_job: dict[str, Any]) -> None:
    job = TrainJob.model_validate(of_job)
    verl = ServerConfig("verl", RUN, trainer_args=["--num-workers=2"])
    assert verl.trainer_args_for(job) == ["--num-workers=2", "--keep-reference"]
    assert verl.trainer_args_for(TrainJob()) == ["--num-workers=2"]
    assert ServerConfig("vllm", RUN).trainer_args_for(job) == ()
