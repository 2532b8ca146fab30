"""The queries of the files in deploy/ that Grafana and Prometheus read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
LEGEND_LABEL = re.compile(r"{{\s*(?:\$labels\.)?(\w+)\s*}}")
"""A label in a legend of Grafana, `{{route}}`, or in a Prometheus text, `{{ $labels.route }}`."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query of a panel or of an alert rule."""

    title: str
    expression: str
    shown_labels: frozenset[str]
    """Labels whose values are shown to people."""


def panels() -> list[dict[str, Any]]:
    document = json.loads((DEPLOY / "grafana" / "fakevllm.json").read_text())
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def panel_queries() -> list[Query]:
    return [
        Query(
            panel["title"],
            # Grafana replaces its variables by a range and by a regular expression.
            target["expr"].replace("$__rate_interval", "1m"),
            frozenset(LEGEND_LABEL.findall(target["legendFormat"])),
        )
        for panel in panels()
        for target in panel["targets"]
    ]


def rules() -> list[dict[str, Any]]:
    document = yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())
    return [rule for group in document["groups"] for rule in group["rules"]]


def rule_queries() -> list[Query]:
    return [
        Query(
            rule["alert"],
            rule["expr"],
            frozenset(LEGEND_LABEL.findall(" ".join(rule["annotations"].values()))),
        )
        for rule in rules()
    ]
