"""The file of `start --config`: it sets flags, and the command line overrides it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fakevllm_server.backends.process.engine_registry import ROLLOUTS, TRAINERS
from fakevllm_server.cli.main import app
from fakevllm_server.config.model import ServerConfig
from fakevllm_server.placement.cluster_section import ClusterSection

CONFIGS = sorted((Path(__file__).parents[3] / "server/configs").iterdir())


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    """The configurations of servers that would have been started. No server is started, so the
    packages of its engines need not be installed."""
    settings: list[ServerConfig] = []

    def record(config: ServerConfig, **_: object) -> None:
        settings.append(config)

    monkeypatch.setattr("fakevllm_server.web.http_server.serve", record)
    no_modules = dict.fromkeys(ROLLOUTS | TRAINERS, ())
    monkeypatch.setattr("fakevllm_runtime.engines.REQUIRED_MODULES", no_modules)
    return settings


def started(file: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["start", "--config", str(file), *arguments])


def check_refusal(result: Result, message: str, served: list[ServerConfig]) -> None:
    """Check that the command ended with one line that matches `message`, and started nothing."""
    assert result.exit_code == 2 and served == []
    assert result.output.count("\n") == 1
    assert result.output.startswith("fakevllm-server: ")
    assert re.search(message, result.output), result.output


def written(folder: Path, text: str) -> Path:
    file = folder / "server.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_a_shipped_configuration_starts_a_server(file: Path, served: list[ServerConfig]) -> None:
    result = started(file, "--model", "demo")
    assert result.exit_code == 0, result.output
    assert served[0].engine_args and all(part for part in served[0].engine_args)


def test_a_file_sets_a_valid_log_format(tmp_path: Path, served: list[ServerConfig]) -> None:
    assert started(written(tmp_path, "backend: fake\nlog-format: json\n")).exit_code == 0
    refused = started(written(tmp_path, "backend: fake\nlog-format: xml\n"))
    assert refused.exit_code == 2 and "human" in refused.output
    assert len(served) == 1


def test_a_file_sets_flags_with_dashes_or_underscores(
    tmp_path: Path, served: list[ServerConfig]
) -> None:
    text = (
        "backend: fake\nrun_dir: runs/x\nport: 7\nallow-hub: true\n"
        "engine-arg: [--vocabulary=7, --slow]\nallow_host: [a, b]\n"
    )
    assert started(written(tmp_path, text)).exit_code == 0
    (config,) = served
    assert (config.backend, config.run_dir, config.port) == ("fake", Path("runs/x"), 7)
    assert config.allow_hub
    assert list(config.engine_args) == ["--vocabulary", "7", "--slow"]
    assert list(config.allowed_hosts) == ["a", "b"]


def test_the_command_line_overrides_the_file(tmp_path: Path, served: list[ServerConfig]) -> None:
    file = written(tmp_path, "backend: fake\nport: 7\nseed: 3\nengine-arg: [--a]\n")
    arguments = ("--port", "8", "--engine-arg=--b=1", "--no-allow-hub")
    assert started(file, *arguments).exit_code == 0
    (config,) = served
    assert (config.port, config.seed, list(config.engine_args)) == (8, 3, ["--b", "1"])


def test_an_empty_file_leaves_the_defaults(tmp_path: Path, served: list[ServerConfig]) -> None:
    assert started(written(tmp_path, "# nothing yet\n")).exit_code == 0
    (config,) = served
    assert (config.backend, config.port, config.model) == ("embedded", 10086, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("backnd: vllm\n", "Unknown key `backnd` in .*: write backend.$"),
        ("run-dirs: a\n", "Unknown key `run-dirs` in .*: write run-dir.$"),
        ("folder: a\n", "Unknown key `folder` in .*known keys are backend, rollout"),
        ("until-stdin-closes: true\n", "Unknown key `until-stdin-closes`"),
        ("config: other.yaml\n", "Unknown key `config`"),
        ("port: '7'\n", "`port` in .* must be a whole number, got '7'"),
        ("seed: true\n", "`seed` in .* must be a whole number, got True"),
        ("model: 0.6\n", "`model` in .* must be a text, got 0.6: put it in quotes"),
        ("model:\n", "`model` in .* must be a text, got nothing"),
        ("allow-hub: maybe\n", "`allow-hub` in .* must be true or false, got 'maybe'"),
        ("engine-arg: --a=1\n", "`engine-arg` in .* must be a list of texts, got '--a=1'"),
        ("engine-arg: [--a, 1]\n", "`engine-arg` in .* must be a list of texts"),
        ("run-dir: a\nrun_dir: b\n", "`run_dir` occurs twice in"),
        ("port: [\n", r"is not valid YAML \(line 2\)"),
        ("- port\n", "is not a YAML mapping: write one `flag: value` per line"),
        ("backend: nonesuch\n", "--backend must be one of"),
    ],
)
def test_a_mistake_in_the_file_is_one_line_and_exit_code_2(
    text: str, message: str, tmp_path: Path, served: list[ServerConfig]
) -> None:
    check_refusal(started(written(tmp_path, text)), message, served)


def test_a_missing_file_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    result = started(tmp_path / "none.yaml")
    assert result.exit_code == 2
    assert "none.yaml cannot be read: No such file" in result.output


def test_the_same_rollout_url_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("backend: vllm\nrollout-url: http://127.0.0.1:1\n")
    urls = ["http://127.0.0.1:2", "http://127.0.0.1:3", "http://127.0.0.1:2/v1/"]
    result = started(file, *(part for url in urls for part in ("--rollout-url", url)))
    assert result.exit_code == 2
    assert "--rollout-url http://127.0.0.1:2 is given twice" in result.stderr


def test_a_rollout_url_in_a_file_is_a_text_or_a_list(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    for value in ("http://127.0.0.1:1", "[http://127.0.0.1:1, http://127.0.0.1:2]"):
        file.write_text(f"backend: embedded\nrollout-url: {value}\n")
        result = started(file)
        assert result.exit_code == 2 and "--rollout-url is for --rollout vllm" in result.stderr
    file.write_text("backend: vllm\nrollout-url: 8000\n")
    assert "must be a text or a list of texts" in started(file).stderr
    file.write_text("backend: vllm\nrollout-url: [http://127.0.0.1:1]\nreplicas: 2\n")
    assert "--replicas is for engines that this server starts" in started(file).stderr


def written_toml(folder: Path, text: str) -> Path:
    file = folder / "fakevllm.toml"
    file.write_text(text)
    return file


def test_a_toml_file_sets_flags_in_its_table_server(
    tmp_path: Path, served: list[ServerConfig]
) -> None:
    text = '[proxy]\nport = 1\n[server]\nbackend = "vllm"\nport = 2\nengine-arg = ["--a=1"]\n'
    result = started(written_toml(tmp_path, text), "--port", "3")
    assert result.exit_code == 0, result.output
    assert (served[0].backend, served[0].port, served[0].engine_args) == ("vllm", 3, ["--a", "1"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[proxy]\nport = 1\n", r"has no table \[server\]: add one"),
        ("server = 1\n", r"has no table \[server\]"),
        ("[server\n", "is not valid TOML"),
        ("[server]\nprot = 1\n", r"Unknown key `prot` in \[server\] of .*: write port"),
        ("[server]\nport = 1.5\n", r"`port` in \[server\] of .* must be a whole number"),
        ("[server.model]\nname = 1\n", "`model` in .* must be a text"),
        ("[server]\ncheck = true\n", "Unknown key `check`"),
        ('[server]\n[tracking]\nto = ["wand"]\n', "Unknown tracker 'wand': .* wandb or none"),
        ('[server]\n[tracking]\nto = "wandb"\n', r"`to` in \[tracking\] .* a list of texts"),
        ("[server]\n[tracking]\ntoo = []\n", r"Unknown key `too` in \[tracking\]"),
        ('tracking = "wandb"\n[server]\n', "`tracking` in .* is not a table"),
        ('[server]\ntrack = ["none"]\n[tracking]\nto = []\n', "sets `track` in .* remove one"),
        ('[server]\ntrack = ["none", "wandb"]\n', "--track none does not go with other"),
        (
            "[server]\ntrack-samples = 1\n[tracking]\nsamples = 1\n",
            r"sets `track-samples` in \[server\] and `samples` in \[tracking\]: remove one",
        ),
        ("[server]\n[tracking]\nsamples = true\n", r"`samples` in \[tracking\] .* whole number"),
        (
            "[server]\n[tracking]\nsamples = -1\n",
            r"`samples` in \[tracking\]\) must be at least 0, got -1",
        ),
        ("[server]\ntrack-samples = 65\n", "must be at most 64, got 65"),
        (
            "[server]\n[tracking]\nsamples_every = 0\n",
            r"`samples_every` in \[tracking\]\) must be at least 1",
        ),
    ],
)
def test_a_mistake_in_a_toml_file_is_one_line_and_exit_code_2(
    text: str, message: str, tmp_path: Path, served: list[ServerConfig]
) -> None:
    check_refusal(started(written_toml(tmp_path, text)), message, served)


@pytest.mark.parametrize(
    ("table", "trackers"),
    [
        ("", ("tensorboard",)),
        ("[tracking]\n", ("tensorboard",)),
        ('[tracking]\nto = ["wandb", "tensorboard", "wandb"]\n', ("wandb", "tensorboard")),
        ("[tracking]\nto = []\n", ()),
    ],
)
def test_the_table_tracking_names_the_trackers(
    tmp_path: Path, served: list[ServerConfig], table: str, trackers: tuple[str, ...]
) -> None:
    file = written_toml(tmp_path, f'[server]\nbackend = "fake"\n{table}')
    assert started(file).exit_code == 0
    assert started(file, "--track", "none").exit_code == 0
    assert [one.trackers for one in served] == [trackers, ()]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("fakevllm.toml", '[server]\nbackend = "fake"\ntrack = []\n'),
        ("server.yaml", "backend: fake\ntrack: []\n"),
    ],
)
def test_an_empty_list_of_trackers_is_no_tracker_wherever_it_stands(
    tmp_path: Path, served: list[ServerConfig], name: str, text: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert started(file).exit_code == 0
    assert [one.trackers for one in served] == [()]


@pytest.mark.parametrize(
    ("text", "samples"),
    [
        ("", (0, 10)),
        ("[tracking]\nsamples = 3\n", (3, 10)),
        ("[tracking]\nsamples = 3\nsamples_every = 2\n", (3, 2)),
        ("track-samples = 4\n[tracking]\nto = []\n", (4, 10)),
    ],
)
def test_the_table_tracking_says_which_samples_are_written(
    tmp_path: Path, served: list[ServerConfig], text: str, samples: tuple[int, int]
) -> None:
    assert started(written_toml(tmp_path, f'[server]\nbackend = "fake"\n{text}')).exit_code == 0
    assert [(one.samples.num_groups, one.samples.every) for one in served] == [samples]


def test_a_check_prints_the_address_and_starts_nothing(
    tmp_path: Path, served: list[ServerConfig]
) -> None:
    file = written(tmp_path, "backend: fake\nport: 5\n")
    result = started(file, "--run-dir", str(tmp_path / "run"), "--check")
    assert result.exit_code == 0 and served == [] and not (tmp_path / "run").exists()
    assert json.loads(result.output) == {
        "host": "127.0.0.1",
        "port": 5,
        "run_dir": str(tmp_path / "run"),
        "engines": ["fake"],
    }
    assert started(file, "--host", "0.0.0.0", "--check").exit_code == 2


CLUSTER = "backend: vllm\ncluster:\n  gpus-per-node: 2\n  training_gpus: 1\n"


def test_a_file_divides_the_gpus(tmp_path: Path, served: list[ServerConfig]) -> None:
    result = started(written(tmp_path, CLUSTER + "  gpu_memory_gib: 79.5\n  tensor-parallel: 1\n"))
    assert result.exit_code == 0, result.output
    table = '[server]\nbackend = "vllm"\n[server.cluster]\ngpus_per_node = 2\ntraining_gpus = 1\n'
    assert started(written_toml(tmp_path, table + "gpu_memory_gib = 80\n")).exit_code == 0
    assert started(written(tmp_path, "backend: vllm\n")).exit_code == 0
    sections = [config.cluster for config in served]
    assert sections == [
        ClusterSection(gpus_per_node=2, training_gpus=1, gpu_memory_gib=79.5),
        ClusterSection(gpus_per_node=2, training_gpus=1, gpu_memory_gib=80),
        None,
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cluster: 8\n", "`cluster` in .* must be a table of settings, got 8"),
        ("cluster: {gpus_per_node: 2}\n", "`training_gpus` is missing in cluster of .*: add it"),
        (CLUSTER + "  gpus: 2\n", "Unknown key `gpus` in cluster of .*"),
        (CLUSTER + "  nodes: two\n", "`nodes` in cluster of .* must be a whole number, got 'two'"),
        (CLUSTER + "  gpu_memory_gib: big\n", "`gpu_memory_gib` in .* must be a number, got 'big'"),
        (CLUSTER + "  colocate: true\n", "`colocate` in .* must be a text, got True"),
        (CLUSTER + "  nodes: 2\n  replicas: 3\n", "nodes is 2, and the embedded trainer runs"),
        (CLUSTER + "  tensor_parallel: 2\n", "cluster needs 3 GPUs"),
        (CLUSTER + "engine-arg: [--tensor-parallel-size=2]\n", "contradicts the section cluster"),
    ],
)
def test_a_mistake_in_the_section_cluster_is_one_line_and_exit_code_2(
    text: str, message: str, tmp_path: Path, served: list[ServerConfig]
) -> None:
    check_refusal(started(written(tmp_path, text)), message, served)


def test_the_job_of_the_file_is_checked_against_the_memory(
    tmp_path: Path, served: list[ServerConfig]
) -> None:
    text = (
        '[server]\nbackend = "vllm"\nmodel = "demo"\n[server.cluster]\ngpus_per_node = 2\n'
        "training_gpus = 1\ngpu_memory_gib = 6\n[job]\nmicro_batch_tokens = "
    )
    assert started(written_toml(tmp_path, text + "64"), "--check").exit_code == 0
    large = started(written_toml(tmp_path, text + "4000000"))
    check_refusal(large, "A GPU that trains needs .*: lower micro_batch_tokens to", served)
    check_refusal(
        started(written_toml(tmp_path, text + "0")), r"\[job\] of .*: micro_batch_tokens", served
    )
