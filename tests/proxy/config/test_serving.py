"""The section [serve]: the rules of each route."""

from pathlib import Path

import pytest

from fakevllm.config.model import load
from fakevllm.config.serving import RouteRules, ServeRules, ServeSection
from fakevllm.errors import ConfigError


def section(folder: Path, text: str) -> ServeSection:
    file = folder / "fakevllm.toml"
    file.write_text(text)
    return load(file, {}).serve


def test_a_route_has_the_sections_rules_except_for_its_own(tmp_path: Path) -> None:
    serve = section(
        tmp_path,
        '[serve]\nquorum = 3\non_disconnect = "finish"\n'
        '[serve.routes.messages]\npolicy = "lead"\n[serve.routes.chat]\nquorum = 2\n',
    )
    assert serve.rules("responses") == ServeRules(quorum=3, on_disconnect="finish")
    assert serve.rules("chat") == ServeRules(quorum=2, on_disconnect="finish")
    assert serve.rules("messages") == ServeRules(policy="lead", on_disconnect="finish")


def test_a_route_may_serve_the_best_when_the_section_does_not() -> None:
    routes = {"chat": RouteRules(policy="best", deadline_s=2.0)}
    serve = ServeSection(policy="greedy", routes=routes)
    assert serve.rules("chat") == ServeRules(deadline_s=2.0)
    assert serve.rules("messages").streams_lead


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'policy = "lead"\nquorum = 2',
            r'^`serve.quorum` in .*toml: is for policy = "best", not for "lead": .*\(got 2\)\.$',
        ),
        (
            'policy = "greedy"\nrandom_fraction = 0.1',
            r"^`serve.random_fraction` .*\(got 0\.1\)\.$",
        ),
        ("deadline_s = nan", "serve.deadline_s"),
        ("quorum = 0", "greater than or equal to 1"),
        (
            "routes = { embeddings = { quorum = 2 } }",
            r"^`serve.routes.embeddings` in .*: is not a route: write one .*'embeddings'\)\.$",
        ),
        (
            'routes = { chat = { policy = "lead", quorum = 2 } }',
            r'^`serve.routes` in .*: chat.quorum = 2 is for policy = "best", not [^{]*$',
        ),
        (
            'policy = "lead"\nroutes = { chat = { quorum = 2 } }',
            r'^`serve.routes` in .*: chat.quorum = 2 is for policy = "best", not [^{]*$',
        ),
        (
            "routes = { chat = { quorom = 2 } }",
            r"^Unknown key `serve.routes.chat.quorom` .*: take it out, or write quorum\.$",
        ),
        (
            "routes = { chat = { half = 2 } }",
            r"^Unknown key `serve.routes.chat.half` .*: .* keys are policy, quorum, .*ect\.$",
        ),
        ('policy = "worst"', "serve.policy"),
    ],
)
def test_a_setting_without_effect_is_refused_in_one_line(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        section(tmp_path, f"[serve]\n{text}\n")
    assert "\n" not in str(refused.value)


def test_the_serve_policy_can_be_set_by_a_flag() -> None:
    assert load(None, {"serve": {"policy": "lead"}}).serve.policy == "lead"
    with pytest.raises(ConfigError, match="--serve-policy"):
        load(None, {"serve": {"policy": "worst"}})
