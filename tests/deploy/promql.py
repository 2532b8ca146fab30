"""Read the metrics and labels that a PromQL expression names, and those of a page of `/metrics`.

>>> named_series('sum by (route) (rate(requests_total{state="failed"}[5m]))')
Expression(metrics={'requests_total': frozenset({'state'})}, grouped=frozenset({'route'}))
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|\[[^\]]*\]|[a-zA-Z_:][\w:]*|[0-9.]+\w*|[=!]~|[=!<>]=|\S')
"""Strings, ranges, names, numbers with their units, and operators."""
NAME = re.compile(r"[a-zA-Z_:][\w:]*")
LABEL_LISTS = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
OPERATORS = frozenset({"and", "or", "unless", "bool", "offset"})
MATCHERS = frozenset({"=", "!=", "=~", "!~"})
FROM_PROMETHEUS: Mapping[str, frozenset[str]] = {"up": frozenset()}
"""Metrics that Prometheus itself writes for each target."""
TARGET_LABELS = frozenset({"instance", "job"})
"""Labels that Prometheus itself adds to each series."""


@dataclass(frozen=True, slots=True)
class Expression:
    """The names in one PromQL expression."""

    metrics: dict[str, frozenset[str]]
    """The labels in the braces of each metric, by the metric's name."""
    grouped: frozenset[str]
    """Labels of `by (…)` and similar lists."""


def named_series(expression: str) -> Expression:
    """Return the metrics and labels that the expression names."""
    tokens = TOKEN.findall(expression)
    metrics: dict[str, frozenset[str]] = {}
    grouped: frozenset[str] = frozenset()
    place = 0
    while place < len(tokens):
        token, following = tokens[place], tokens[place + 1 : place + 2]
        place += 1
        if not NAME.fullmatch(token) or token in OPERATORS:
            continue
        if token in LABEL_LISTS:
            end = tokens.index(")", place)
            grouped |= frozenset(one for one in tokens[place:end] if NAME.fullmatch(one))
            place = end
        elif following == ["{"]:
            end = tokens.index("}", place)
            metrics[token] = metrics.get(token, frozenset()) | frozenset(
                tokens[at] for at in range(place, end) if tokens[at + 1] in MATCHERS
            )
            place = end
        elif following != ["("] and not LABEL_LISTS.intersection(following):
            metrics.setdefault(token, frozenset())
    return Expression(metrics, grouped)


def page_series(page: str) -> dict[str, frozenset[str]]:
    """Return the labels of each metric of a page in Prometheus' text format, by the name of the
    series. A metric without a series has an entry without labels, by the name of its type line."""
    labels: dict[str, frozenset[str]] = {}
    for family in text_string_to_metric_families(page):
        suffix = "_total" if family.type == "counter" else ""
        labels.setdefault(family.name + suffix, frozenset())
        for sample in family.samples:
            labels[sample.name] = labels.get(sample.name, frozenset()) | frozenset(sample.labels)
    return labels


def unknown_names(
    expression: str, page: Mapping[str, frozenset[str]], shown_labels: frozenset[str] = frozenset()
) -> Iterator[str]:
    """Yield each name in the expression that the page does not have, as `metric` or
    `metric{label}`. `shown_labels` are labels that a legend shows."""
    named = named_series(expression)
    known = {**page, **FROM_PROMETHEUS}
    for metric, labels in named.metrics.items():
        if metric not in known:
            yield metric
            continue
        for label in labels - known[metric] - TARGET_LABELS:
            yield f"{metric}{{{label}}}"
    found = frozenset[str]().union(*(known.get(metric, frozenset()) for metric in named.metrics))
    for label in (named.grouped | shown_labels) - found - TARGET_LABELS:
        yield f"{expression}: {label}"
