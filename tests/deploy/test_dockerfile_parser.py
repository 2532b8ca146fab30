"""The reader of Dockerfiles, with which their steps are run and checked without Docker."""

from __future__ import annotations

import doctest

import pytest

from benchmarks.container_parts import compose_service, dockerfile, image_builder, pip_settings
from benchmarks.container_parts.dockerfile import (
    DockerfileError,
    IgnoreRules,
    exec_form,
    final_config,
    parse,
)


@pytest.mark.parametrize("module", [compose_service, dockerfile, image_builder, pip_settings])
def test_the_examples_in_the_docstrings_hold(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # pyright: ignore[reportArgumentType]


def test_comments_are_left_out_and_continued_lines_are_joined() -> None:
    steps = parse("# a comment\nRUN a \\\n# inside\n    && b\n\nUSER 1:1\n")
    assert [(step.name, step.text, step.line) for step in steps] == [
        ("RUN", "a     && b", 2),
        ("USER", "1:1", 6),
    ]


@pytest.mark.parametrize("text", ["ADD a /b/", "RUN", "ONBUILD RUN a", "RUN a \\"])
def test_an_instruction_that_is_not_known_is_an_error(text: str) -> None:
    with pytest.raises(DockerfileError, match="line 1: "):
        parse(text)


@pytest.mark.parametrize("text", ["CMD fakevllm up", 'CMD "fakevllm"', "CMD []"])
def test_the_shell_form_of_a_command_is_an_error(text: str) -> None:
    (step,) = parse(text)
    with pytest.raises(DockerfileError):
        exec_form(step)


def test_settings_are_those_after_the_last_instruction() -> None:
    config = final_config(
        parse(
            "ARG WHERE=/data\nENV PATH=/opt/bin:$PATH A=1\nUSER 0:0\nUSER 5:6\nWORKDIR ${WHERE}\n"
            'EXPOSE 1 2\nVOLUME /data/runs\nHEALTHCHECK --retries=3 CMD ["a", "b"]\nCMD ["c"]\n'
        )
    )
    assert config.environment == {"PATH": f"/opt/bin:{dockerfile.DEFAULT_PATH}", "A": "1"}
    assert (config.user, str(config.folder), config.ports) == ("5:6", "/data", (1, 2))
    assert (config.volumes, config.command) == (("/data/runs",), ("c",))
    assert config.health_check is not None
    assert config.health_check.command == ["a", "b"]
    assert config.health_check.options == {"retries": "3"}


def test_the_last_rule_that_matches_a_file_or_its_folder_decides() -> None:
    rules = IgnoreRules.parse("# comment\n*\n!a\na/secret\n**/*.pyc\n!b/c.txt\n")
    kept = ["a/x", "a/b/x", "b/c.txt"]
    left_out = ["x", "b/x", "a/secret", "a/secret/x", "a/b/x.pyc", "x.pyc"]
    assert [path for path in kept + left_out if not rules.ignores(path)] == kept


def test_pip_settings_of_files_and_of_the_environment_add_up() -> None:
    settings = pip_settings.settings_of(
        ":env:.find-links='/a'\nglobal.find-links='/a'\nglobal.extra-index-url='file:///b/c d'\n"
        "global.timeout='5'\nfreeze.timeout='7'\n"
    )
    assert settings.environment == {
        "PIP_FIND_LINKS": "/a",
        "PIP_EXTRA_INDEX_URL": "file:///b/c d",
        "PIP_TIMEOUT": "5",
    }
