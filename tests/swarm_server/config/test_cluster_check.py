"""The section `cluster` of a server: what it does to the engines, and what contradicts it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from swarm_server.placement.plans import CONFIG

from fakevllm_adapters.job.model import TrainJob
from fakevllm_server.config.engine_specs import engine_specs
from fakevllm_server.config.memory_check import check_memory, memory_plan
from fakevllm_server.config.model import ConfigError, ServerConfig
from fakevllm_server.config.start_check import check_start
from fakevllm_server.placement.cluster_section import ClusterSection
from fakevllm_server.placement.model_shape import read_model_shape
from fakevllm_server.web.server_state import ServerState

RUN = Path("run")
SECTION = ClusterSection(gpus_per_node=8, training_gpus=4, tensor_parallel=2, data_parallel=2)
ON_VERL: dict[str, Any] = {"backend": "verl", "run_dir": RUN, "cluster": SECTION}
ONE_GPU = ClusterSection(gpus_per_node=1, training_gpus=1, colocate="shared")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "fake"}, "section cluster is for GPUs, and the fake engine has none"),
        ({"backend": "vllm"}, "training_gpus is 4, and the embedded trainer uses one GPU"),
        ({"rollout_url": "http://gpu:8000"}, "cluster places the vLLM that this server starts"),
        ({"rollout": "embedded"}, "cluster gives 4 GPUs to the embedded engine"),
        (
            {"backend": "embedded", "cluster": replace(ONE_GPU, gpus_per_node=2, colocate="none")},
            'on the same GPU: set cluster.colocate to "shared"',
        ),
        (
            {"engine_args": ["--tensor_parallel_size=2"]},
            "--tensor-parallel-size contradicts .*: set cluster.tensor_parallel instead",
        ),
        ({"engine_args": ["-dp", "2"]}, "--data-parallel-size contradicts"),
        ({"engine_args": ["-tp=2"]}, "--tensor-parallel-size contradicts"),
        ({"engine_args": ["--pipeline-parallel-size", "2"]}, "--pipeline-parallel-size contra"),
        ({"trainer_args": ["--num-workers=2"]}, "set cluster.training_gpus instead"),
        ({"trainer_args": ["--ray-address=head:1"]}, "set cluster.nodes and cluster.ray_address"),
        ({"trainer_args": ["--min-workers=1"]}, "set cluster.min_training_gpus instead"),
        (
            {"backend": "vllm", "cluster": replace(ONE_GPU, nodes=2)},
            "nodes is 2, and the embedded trainer runs on one machine: set it to 1, or use",
        ),
        ({"engine_args": ["--model=other"]}, "serve another model than the one that is trained"),
    ],
)
def test_what_contradicts_the_section_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerConfig(**(ON_VERL | settings))


def test_the_section_decides_the_numbers_of_vllm_and_of_verls_workers() -> None:
    config = ServerConfig("verl", RUN, cluster=SECTION, trainer_args=["--micro-batch-tokens=9"])
    job = TrainJob(tensor_model_parallel_size=4, max_num_seqs=8, n_gpu=4)
    assert config.engine_settings_for(job) == {
        "max-num-seqs": "8",
        "tensor-parallel-size": "2",
        "data-parallel-size": "2",
    }
    assert config.trainer_args_for(job) == ["--num-workers=4", "--micro-batch-tokens=9"]
    plain = ServerConfig("verl", RUN)
    assert plain.engine_settings_for(job) == {"max-num-seqs": "8", "tensor-parallel-size": "4"}
    assert plain.trainer_args_for(job) == []
    assert ServerConfig("embedded", RUN, cluster=ONE_GPU).engine_settings_for(job) == {}


@pytest.mark.parametrize(
    ("listed", "rollout", "trainer"),
    [(None, "0,1,2,3", "4,5,6,7"), ("9,8,7,6,5,4,3,2,1", "9,8,7,6", "5,4,3,2")],
)
def test_engine_and_trainer_get_gpus_of_their_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    listed: str | None,
    rollout: str,
    trainer: str,
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    config = ServerConfig("verl", tmp_path, model="demo", cluster=SECTION)
    replicas, of_trainer = engine_specs(config, TrainJob())
    specs = [*replicas, of_trainer]
    visible = [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs]
    assert visible == [rollout, trainer]


def test_several_machines_need_a_shared_folder_for_new_weights(tmp_path: Path) -> None:
    section = ClusterSection(8, 8, nodes=2, ray_address="head:6379")
    config = ServerConfig("verl", RUN, cluster=section)
    with pytest.raises(ConfigError, match=r"nodes is 2, and new weights .*: set --weights-dir to"):
        check_start(config, None, {})
    check_start(replace(config, weights_dir=tmp_path), None, {})


def test_on_several_machines_the_workers_join_the_ray_cluster_of_the_section(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    section = ClusterSection(
        8, 8, nodes=2, ray_address="head:6379", min_training_gpus=4, tensor_parallel=4
    )
    config = ServerConfig("verl", tmp_path, model="demo", cluster=section, weights_dir=tmp_path)
    (rollout,), trainer = engine_specs(config, TrainJob())
    assert rollout.visible_gpus == "0,1,2,3"
    assert trainer.visible_gpus is None
    assert trainer.extra_args == [
        "--num-workers=8",
        "--min-workers=4",
        "--ray-address=head:6379",
        "--max-local-gpus=4",
    ]


def test_without_a_section_the_engines_inherit_the_servers_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    config = ServerConfig("verl", tmp_path, model="demo")
    replicas, of_trainer = engine_specs(config, TrainJob())
    specs = [*replicas, of_trainer]
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["5", "5"]
    assert [spec.visible_gpus for spec in specs] == [None, None]


def test_each_replica_has_gpus_a_folder_and_a_seed_of_its_own(tmp_path: Path) -> None:
    section = ClusterSection(gpus_per_node=8, training_gpus=2, tensor_parallel=2, replicas=3)
    config = ServerConfig("verl", tmp_path, model="demo", cluster=section, seed=5)
    replicas, trainer = engine_specs(config, TrainJob())
    assert [spec.visible_gpus for spec in replicas] == ["0,1", "2,3", "4,5"]
    assert [spec.run_dir for spec in replicas] == [tmp_path / f"replica-{n}" for n in range(3)]
    assert [spec.seed for spec in replicas] == [5, 6, 7]
    assert (trainer.visible_gpus, trainer.run_dir, trainer.seed) == ("6,7", tmp_path, 5)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder that looks like a model of 7.6 B parameters. Its weights are empty."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").touch()
    return str(tmp_path)


def on(memory_gib: float, model: str | None, **settings: Any) -> ServerConfig:
    return ServerConfig(
        "verl", RUN, model=model, cluster=replace(SECTION, gpu_memory_gib=memory_gib), **settings
    )


def test_a_server_whose_job_does_not_fit_is_refused_before_it_starts(model: str) -> None:
    large = TrainJob(micro_batch_tokens=32768)
    check_start(on(79, model), TrainJob(), {})
    with pytest.raises(ConfigError, match=r"A GPU that trains needs .*`fakevllm-server plan` show"):
        check_start(on(79, model), large, {})
    check_start(on(10, model), None, {})  # jobs come later
    fewer = replace(SECTION, gpu_memory_gib=50, min_training_gpus=1)
    with pytest.raises(ConfigError, match=r"^With cluster\.min_training_gpus = 1: A GPU that tra"):
        check_start(ServerConfig("verl", RUN, model=model, cluster=fewer), TrainJob(), {})
    check_start(on(50, model), TrainJob(), {})
    check_start(ServerConfig("verl", RUN, model=model, cluster=SECTION), large, {})
    check_start(ServerConfig("verl", RUN, model=model), large, {"RAY_ADDRESS": "head:1"})


def test_the_last_argument_decides_whether_activations_are_recomputed(model: str) -> None:
    shape = read_model_shape(Path(model))

    def activations(*arguments: str) -> int:
        plan = memory_plan(on(79, model, trainer_args=arguments), TrainJob(), shape)
        return next(
            part.num_bytes
            for role in plan.roles
            for part in role.parts
            if part.name == "activations"
        )

    kept = activations("--no-gradient-checkpointing")
    assert kept > 5 * activations()
    assert activations("--gradient-checkpointing", "--no_gradient_checkpointing") == kept
    assert activations("--no-gradient-checkpointing", "--gradient-checkpointing") == activations()


async def test_a_job_that_does_not_fit_starts_no_engine(model: str, tmp_path: Path) -> None:
    state = ServerState(replace(on(79, model), run_dir=tmp_path / "run"))
    state.job = TrainJob(micro_batch_tokens=32768)
    async with state.engine_lock:
        with pytest.raises(ConfigError, match="A GPU that trains needs"):
            await state.start_engine()
    assert not list((tmp_path / "run").glob("*.log"))
    await state.close()


def test_the_memory_of_an_unknown_model_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not a local folder: remove cluster\.gpu"):
        check_memory(on(79, None, allow_hub=True), TrainJob(), "org/name")
    check_memory(on(79, None), TrainJob(), None)
    check_start(on(79, None), None, {})
