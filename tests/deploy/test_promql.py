"""The check of queries finds names that a page of metrics does not have."""

from __future__ import annotations

import pytest

from tests.deploy.monitoring_files import panel_queries, panels, rule_queries, rules
from tests.deploy.promql import named_series, page_series, unknown_names

PAGE = """
# TYPE requests_total counter
requests_total{route="chat",state="failed"} 1.0
# TYPE open gauge
open 2.0
# TYPE seconds histogram
seconds_bucket{route="chat",le="+Inf"} 1.0
seconds_count{route="chat"} 1.0
seconds_sum{route="chat"} 1.0
# TYPE gain gauge
"""


@pytest.mark.parametrize(
    "expression",
    [
        'sum by (route, instance) (rate(requests_total{state="failed",job="a"}[5m])) > 0.05',
        "histogram_quantile(0.95, sum by (le) (rate(seconds_bucket[10m])))",
        "open >= 1 and changes(open[30m]) == 0",
        "rate(seconds_sum[1m]) / on (route) seconds_count or gain or up == 0",
    ],
)
def test_names_that_the_page_has_are_known(expression: str) -> None:
    assert list(unknown_names(expression, page_series(PAGE))) == []


@pytest.mark.parametrize(
    ("expression", "unknown"),
    [
        ("rate(request_total[5m])", ["request_total"]),
        ('rate(requests_total{status="failed"}[5m])', ["requests_total{status}"]),
        ("sum by (path) (open)", ["sum by (path) (open): path"]),
        ("opened == 1", ["opened"]),
        ("open and (clos or open)", ["clos"]),
        ('gain{bound="low"}', ["gain{bound}"]),
    ],
)
def test_a_name_that_is_misspelt_is_found(expression: str, unknown: list[str]) -> None:
    assert list(unknown_names(expression, page_series(PAGE))) == unknown


def test_a_label_that_only_a_legend_shows_is_checked_too() -> None:
    page = page_series(PAGE)
    assert list(unknown_names("open", page, frozenset({"instance"}))) == []
    assert list(unknown_names("open", page, frozenset({"route"}))) == ["open: route"]


def test_strings_and_ranges_are_no_names() -> None:
    named = named_series('rate(requests_total{route=~"a|b{c}"}[5m:1m] offset 1h)')
    assert (named.metrics, named.grouped) == ({"requests_total": {"route"}}, frozenset())


def test_each_alert_says_what_happened_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(names) == len(set(names)) == len(rule_queries())
    for rule in rules():
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["labels"]["severity"] in ("critical", "warning", "info")


def test_each_panel_has_its_own_place_and_a_query() -> None:
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(places) == len(set(places))
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels())
    assert {query.title for query in panel_queries()} == {panel["title"] for panel in panels()}
