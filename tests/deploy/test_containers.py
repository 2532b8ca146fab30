"""The files in deploy/ from which containers are made fit the code and each other.

`python -m benchmarks.container_steps` carries them out.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from benchmarks.container_parts.compose_service import mounts_of, read_services
from benchmarks.container_parts.dockerfile import IgnoreRules, final_config, parse
from benchmarks.container_parts.image_builder import kept_files
from fakevllm.cli import main
from fakevllm.config.model import Config, load
from fakevllm.errors import ConfigError
from fakevllm.hooks.check import check
from fakevllm.hooks.recorded_group import RecordedGroup
from fakevllm.hooks.spec import Task
from fakevllm.up.programs import STOP_TIMEOUT_S
from fakevllm_adapters.http.access_guard import LOOPBACK, OPEN_PATHS, is_loopback
from fakevllm_server.cli import main as server_cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")
SERVICES = read_services(DEPLOY / "compose.yaml")
PROGRAMS = {"fakevllm": main.app, "fakevllm-server": server_cli.app}
SECONDS = re.compile(r"(\d+)s")


@pytest.fixture(scope="module")
def config() -> Config:
    return load(DEPLOY / "fakevllm.toml", {})


def read_yaml(*names: str) -> Any:
    return yaml.safe_load(DEPLOY.joinpath(*names).read_text())


def parse_command(words: list[str]) -> None:
    """Parse a command line with the program's own parser. Raises an error for a command or a flag
    that does not exist."""
    program = typer.main.get_group(PROGRAMS[words[0]])
    context = program.make_context(words[0], words[1:])
    name, command, arguments = program.resolve_command(context, words[1:])
    assert name is not None and command is not None
    command.make_context(name, arguments, parent=context)


def test_a_command_or_a_flag_that_does_not_exist_is_found() -> None:
    parse_command(["fakevllm", "up", "--detach"])
    for words in (["fakevllm", "upp"], ["fakevllm", "up", "--detached"]):
        with pytest.raises(Exception, match="No such"):
            parse_command(words)


@pytest.mark.parametrize("name", DOCKERFILES)
def test_an_image_runs_a_command_that_exists_as_a_numbered_user(name: str) -> None:
    config = final_config(parse((DEPLOY / name).read_text()))
    assert re.fullmatch(r"[1-9]\d+:[1-9]\d+", config.user)
    parse_command(list(config.command))
    assert config.ports == (Config().proxy.port, Config().console.port)
    assert f"{config.folder}/runs" in config.volumes


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_health_check_asks_a_route_that_needs_no_key(name: str) -> None:
    health = final_config(parse((DEPLOY / name).read_text())).health_check
    assert health is not None
    python, flag, code = health.command
    assert (python, flag) == ("python", "-c")
    compile(code, name, "exec")
    found = re.search(rf"http://127.0.0.1:{Config().proxy.port}(/\w+)'", code)
    assert found is not None and found[1] in OPEN_PATHS


@pytest.mark.parametrize("name", DOCKERFILES)
def test_the_extras_of_an_image_exist(name: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    found = re.search(r'ARG FAKEVLLM_EXTRAS="(.*)"', (DEPLOY / name).read_text())
    assert found is not None and set(found[1].split(",")) <= extras.keys()


def test_no_file_names_a_registry() -> None:
    images = [service["image"] for service in SERVICES.values()]
    steps = [step for name in DOCKERFILES for step in parse((DEPLOY / name).read_text())]
    images += [step.text for step in steps if step.name == "FROM"]
    first_parts = [image.partition("/")[0] for image in images if "/" in image]
    assert not [part for part in first_parts if re.search(r"[.:]|localhost", part)]


def test_only_files_of_the_package_go_to_the_build() -> None:
    rules = IgnoreRules.parse((ROOT / ".dockerignore").read_text())
    for path in ("deploy/.env", ".git/config", "runs/default/keys", "fakevllm/__pycache__/a.pyc"):
        assert rules.ignores(path), path
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    needed = wheel["targets"]["wheel"]["packages"]
    needed += wheel["targets"]["wheel"]["force-include"].keys()
    for folder in needed:
        assert kept_files(ROOT, ROOT / folder, rules), folder
    for file in ("pyproject.toml", "README.md", "LICENSE", "constraints.txt"):
        assert not rules.ignores(file)


@pytest.mark.parametrize("name", SERVICES)
def test_published_ports_are_on_the_loopback_address(name: str) -> None:
    for port in SERVICES[name]["ports"]:
        address, _, ports = port.partition(":")
        assert address in LOOPBACK and re.fullmatch(r"\d+:\d+", ports), port
    assert SERVICES[name].get("network_mode") is None


@pytest.mark.parametrize("name", SERVICES)
def test_mounted_files_exist_and_are_read_only(name: str) -> None:
    volumes = read_yaml("compose.yaml")["volumes"]
    for mount in mounts_of(SERVICES[name]):
        if mount.is_volume:
            assert mount.source in volumes and not mount.is_read_only
        else:
            assert (DEPLOY / mount.source).exists() and mount.is_read_only, mount


def test_the_service_runs_a_command_that_exists_and_has_time_to_stop(config: Config) -> None:
    service = SERVICES["fakevllm"]
    parse_command(service["command"])
    grace = SECONDS.fullmatch(service["stop_grace_period"])
    assert grace is not None and int(grace[1]) >= STOP_TIMEOUT_S
    published = [int(port.rpartition(":")[2]) for port in service["ports"]]
    assert published == [config.proxy.port, config.console.port]
    image = final_config(parse((DEPLOY / "Dockerfile").read_text()))
    targets = {mount.source: mount.target for mount in mounts_of(service)}
    assert targets["./fakevllm.toml"] == f"{image.folder}/fakevllm.toml"
    assert targets["./hooks"] == f"{image.folder}/{config.hooks.path}"
    assert targets["runs"] in image.volumes
    assert (image.folder / config.proxy.run_dir).is_relative_to(targets["runs"])
    assert (image.folder / config.key_file).is_relative_to(targets["runs"])


def test_the_container_does_not_start_without_a_key_file(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_loopback(config.proxy.host) and not is_loopback(config.console.host)
    assert config.console.key_file == config.proxy.key_file
    assert "host" not in config.server  # only the container itself reaches the server
    with pytest.raises(ConfigError, match=r"keys does not exist: make one with `fakevllm keys add"):
        config.keys()


def test_prometheus_reads_the_proxy_of_the_container(config: Config) -> None:
    alone, in_compose = (
        read_yaml("prometheus", "prometheus.yml"),
        read_yaml("prometheus", "prometheus.compose.yml"),
    )
    assert in_compose["rule_files"] == alone["rule_files"]
    (job,) = in_compose["scrape_configs"]
    assert job["job_name"] == alone["scrape_configs"][0]["job_name"]
    (target,) = job["static_configs"][0]["targets"]
    host, _, port = target.partition(":")
    assert host in SERVICES and int(port) == config.proxy.port
    assert host in config.proxy.allowed_hosts
    (secret,) = SERVICES["prometheus"]["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
    assert secret in read_yaml("compose.yaml")["secrets"]


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    (source,) = read_yaml("grafana", "provisioning", "datasources", "prometheus.yml")["datasources"]
    host, _, port = source["url"].removeprefix("http://").partition(":")
    assert host in SERVICES
    assert port in {one.rpartition(":")[2] for one in SERVICES[host]["ports"]}
    (folder,) = read_yaml("grafana", "provisioning", "dashboards", "fakevllm.yml")["providers"]
    targets = {mount.source: mount.target for mount in mounts_of(SERVICES["grafana"])}
    dashboard = Path(targets["./grafana/fakevllm.json"])
    assert str(dashboard.parent) == folder["options"]["path"]
    variables = json.loads((DEPLOY / "grafana/fakevllm.json").read_text())["templating"]["list"]
    assert source["type"] in {one["query"] for one in variables if one["type"] == "datasource"}


@pytest.mark.parametrize(
    ("question", "rewards"),
    [
        ("What is 3 plus 4?", [1.0, 0.0, 0.0, 0.0]),
        ("What is 3 times 4?", [None] * 4),
    ],
)
async def test_the_hook_rewards_finished_answers_to_sums(
    question: str, rewards: list[float | None]
) -> None:
    answers = [("It is 7.", "stop"), ("It is 8.", "stop"), ("It is 7", "length"), ("", "stop")]
    group = RecordedGroup(
        "group",
        Task(main_query=question),
        question,
        [{"content": text, "finish_reason": reason} for text, reason in answers],
    )
    report = await check(DEPLOY / "hooks", group)
    assert report.ok and report.outcome.rewards == rewards
