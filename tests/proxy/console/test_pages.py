"""The pages: search, paging, deep links, live parts, and texts with markup."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest

from fakevllm.config.key_file import KeyFile
from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.curve_points import curve_points
from fakevllm.console.proxy_status import ProxyStatus
from fakevllm.ledger import group_reads
from fakevllm.ledger.group_reads import GroupSearch
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm.ledger.records import FeedbackRecord, GroupRecord, StepRow
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.keys import fingerprint, named_key
from tests.proxy.console.console_rig import open_console
from tests.proxy.ledger.ledger_cases import group, sibling
from tests.proxy.ledger.test_session_reads import placed

MARKUP = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'><svg/onload=alert(1)>",
    "</title></textarea></pre></style><script>alert(1)</script>",
    "<a href=javascript:alert(1)>x</a>",
    '" hx-get="http://evil.example" hx-trigger="load" x="',
    "{{ 7 * 7 }}{% raw %}<b>",
    "<!--<script>",
    "&lt;script&gt;<iframe srcdoc='<script>alert(1)</script>'>",
    "\x00<b>\u2028\u202e<plaintext>",
]
"""Texts that break out of elements, attributes, comments or templates if they are not escaped."""


class Elements(HTMLParser):
    """Collects what a browser would run or load in a page."""

    def __init__(self) -> None:
        super().__init__()
        self.unexpected: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        handlers = [name for name in values if name.startswith("on")]
        source = values.get("src") or values.get("href") or values.get("hx-get") or "/"
        is_known = tag in KNOWN_TAGS and not handlers and source.startswith(("/", "#"))
        if not is_known or (tag == "script" and "src" not in values):
            self.unexpected.append(f"{tag} {attrs}")


TAGS = """
    html head meta title link script body header a nav form input button main div h1 h2 h3 p strong
    section dl dt dd table thead tbody tr th td span label select option details summary pre article
    mark b code
"""
KNOWN_TAGS = frozenset(TAGS.split())
"""Elements that the templates have."""


def put(ledger: Ledger, *records: GroupRecord) -> None:
    for record in records:
        ledger.record(record)
    assert ledger.drain()


def links(html: str) -> list[str]:
    return re.findall(r'href="/groups/([^"?]+)"', html)


@pytest.mark.parametrize("text", MARKUP)
async def test_markup_in_any_text_is_shown_as_text(
    text: str, path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    answers = [
        replace(
            sibling(index, 0.5, served=index == 0),
            text=f"{text} {index}",
            message_json=f'{{"content": {text!r}}}',
            annotations_json=text,
            tool_calls_json=text,
            error=text,
            failure=text,
            finish_reason=text,
        )
        for index in range(2)
    ]
    record = replace(
        placed("id/1", text, question=f"{text} {text * 20}"),
        siblings=answers,
        model=text,
        route=text,
        reason=text,
        hook_hash=text,
        request_json=text,
        task_id=text,
        arm=text,
        kind=text,
        evidence=text,
        parent_id=text,
        parent_session_id=text,
        app_key=text,
    )
    put(ledger, record, placed("g2", "other", parent_session_id=text, at=2000.0))
    ledger.feedback.record(
        FeedbackRecord(
            group_id="id/1",
            feedback_id="f",
            received_at=1.0,
            comment=text,
            edited=text,
            thumbs=text,
        )
    )
    assert ledger.drain()
    quoted = quote(text, safe="")
    urls = ["/", "/groups", "/groups/id%2F1", "/sessions", f"/sessions/{quoted}"]
    urls += [f"/groups?text={quoted}&hook={quoted}&session={quoted}"]
    urls += [f"/groups?{name}={quoted}" for name in ("min_reward", "state", "after")]
    urls += ["/learning", f"/learning?run={quoted}"]
    urls += [f"/{quoted}", f"/login?code={quoted}"]
    async with open_console(path) as rig:
        for url in urls:
            for headers in ({}, {"hx-request": "true"}):
                html = (await rig.browser.get(url, headers=headers)).text
                elements = Elements()
                elements.feed(html)
                assert elements.unexpected == [], url
        shown = await rig.get("/groups/id%2F1")
    visible = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    visible = visible.replace("'", "&#39;").replace('"', "&#34;")
    assert visible in shown


async def test_names_of_keys_are_shown_in_place_of_fingerprints(
    path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    KeyFile(keys).add(named_key("secret", "alice", "2026-01-01"))
    put(ledger, replace(group("g1"), app_key=fingerprint("secret")))
    async with open_console(path, app_keys=keys) as rig:
        assert "alice" in await rig.get("/groups")
        assert "alice" in await rig.get("/groups/g1")
        keys.write_text("sha256:broken\n")
        assert fingerprint("secret") in await rig.get("/groups")


async def test_the_search_finds_by_each_field(path: Path, ledger: Ledger) -> None:
    put(
        ledger,
        replace(placed("a", "s1", at=1.0, question="What is a Fox?"), state="trained"),
        replace(placed("b", "s2", at=2.0, rewards=(0.2, None)), hook_hash="feed"),
        replace(placed("c", "s1x", at=3.0, rewards=(None,)), state="dropped", reason="tied"),
        replace(group("e", received_at=4.0), kind="eval"),
    )
    expected = {
        "": ["c", "b", "a"],
        "?text=a+fox": ["a"],
        "?text=ANSWER+1": ["b", "a"],
        "?text=b": ["b"],
        "?text=100%25": [],
        "?state=dropped": ["c"],
        "?min_reward=0.1&max_reward=0.9": ["b"],
        "?min_reward=1": ["a"],
        "?hook=fee": ["b"],
        "?session=s1": ["c", "a"],
        "?session=s1x&state=dropped": ["c"],
    }
    async with open_console(path) as rig:
        for query, ids in expected.items():
            assert links(await rig.get(f"/groups{query}")) == ids, query


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("state=new", "is not a state"),
        ("min_reward=x", "lowest reward x is not a number"),
        ("max_reward=nan", "highest reward nan is not a number"),
        ("min_reward=2&max_reward=1", "exchange them"),
        ("after=x", "begin with the first page"),
        ("text=an%00swer", "field text has a NUL character"),
        ("session=s%001", "field session has a NUL character"),
    ],
)
async def test_a_search_that_cannot_be_understood_says_why(
    query: str, words: str, path: Path, ledger: Ledger
) -> None:
    async with open_console(path) as rig:
        reply = await rig.browser.get(f"/groups?{query}")
        assert reply.status_code == 400 and words in reply.text


async def test_the_pages_of_a_search_have_every_group_once(path: Path, ledger: Ledger) -> None:
    # Several groups have the same time, so the id decides their order.
    put(ledger, *(group(f"g{number:03}", received_at=float(number // 7)) for number in range(120)))
    async with open_console(path) as rig:
        url: str | None = "/groups?text=answer"
        seen: list[str] = []
        while url is not None:
            html = await rig.get(url)
            seen += links(html)
            found = re.search(r'href="([^"]+)">Older', html)
            url = None if found is None else found[1].replace("&amp;", "&")
    assert seen == [f"g{number:03}" for number in reversed(range(120))]


def test_a_search_that_finds_little_ends_early_and_can_go_on(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_reads, "ROWS_PER_SCAN", 10)
    put(ledger, *(group(f"g{number:02}", received_at=float(number)) for number in range(45)))
    reads = ReadOnlyLedger(path).groups
    search = GroupSearch(text="g03")
    first = reads.search(search, 5, max_rows=30)
    assert (first.rows, first.is_cut, first.next_key) == ([], True, (15.0, "g15"))
    assert first.next_key is not None
    second = reads.search(search, 5, first.next_key, max_rows=30)
    assert [row.group_id for row in second.rows] == ["g03"]
    assert (second.is_cut, second.next_key) == (False, None)


async def test_deep_links_show_a_group_and_a_session(path: Path, ledger: Ledger) -> None:
    put(
        ledger,
        placed("a", "s/1", question="first question"),
        placed("b", "s/1", parent_id="a", turn=2, at=1005.0, question="second question"),
    )
    async with open_console(path) as rig:
        shown = await rig.get("/groups/b")
        assert "second question" in shown and 'href="/groups/a"' in shown
        assert 'href="/sessions/s%2F1"' in shown
        session = await rig.get("/sessions/s%2F1")
        assert links(session) == ["b", "a"]
        assert 'href="/sessions/s%2F1"' in await rig.get("/sessions")
        for url in ("/groups/none", "/sessions/none"):
            assert (await rig.browser.get(url)).status_code == 404


async def test_a_group_shows_its_answers_with_their_differences(path: Path, ledger: Ledger) -> None:
    answers = [
        replace(sibling(0, 1.0, served=True), text="The sum is 42, of course."),
        replace(sibling(1, 0.0), text="The sum is 41, of course."),
    ]
    put(ledger, replace(group("g1"), siblings=answers, served_by="best", propensity=0.5))
    async with open_console(path) as rig:
        html = await rig.get("/groups/g1")
    assert "The sum is <mark>41</mark>, of course." in html
    assert "The sum is 42, of course." in html
    assert html.index("sibling 0") < html.index("served</span>") < html.index("sibling 1")
    assert "50%" in html and "raw request" in html


def test_a_point_of_a_chart_has_no_steps_from_both_sides_of_a_change() -> None:
    rows = [
        StepRow(step, 1 + step % 2, 0.5, None, 1, changed="the hooks changed" if step == 3 else "")
        for step in range(6)
    ]
    points = curve_points(rows, max_points=3)
    spans = [(point.first_step, point.last_step, point.changed) for point in points]
    assert spans == [(0, 1, ""), (2, 2, ""), (3, 4, "the hooks changed"), (5, 5, "")]
    assert [point.groups for point in points] == [3, 1, 3, 2]
    assert points[0].policy_mean == 0.5 and points[0].returned_best is None
    assert curve_points([]) == []


async def test_the_learning_page_shows_the_steps_of_a_run(path: Path, ledger: Ledger) -> None:
    def of_run(run_id: str, step: int, at: float, hook: str) -> GroupRecord:
        one = group(f"{run_id}{step}", (0.0, 0.5), served=1, step=step, received_at=at)
        return replace(one, run_id=run_id, hook_hash=hook)

    put(ledger, *(of_run("old", step, step, "h") for step in (1, 2)))
    put(ledger, *(of_run("new", step, 100.0 + step, f"h{step // 3}") for step in (1, 2, 3)))
    async with open_console(path) as rig:
        html = await rig.get("/learning")
        assert "From step 3: the hooks changed" in html
        assert "0.250" in html and "0.500" in html
        curve = (await rig.browser.get("/learning/curve")).json()
        assert [point["first_step"] for point in curve] == [1, 2, 3]
        assert [point["returned_best"] for point in curve] == [0.5] * 3
        old = (await rig.browser.get("/learning/curve?run=old")).json()
        assert len(old) == 2
        assert (await rig.browser.get("/learning?run=none")).status_code == 404


async def test_a_learning_page_without_steps_has_a_place_for_a_later_chart(
    path: Path, ledger: Ledger
) -> None:
    async with open_console(path) as rig:
        html = await rig.get("/learning")
        source = re.search(r'class="chart" data-source="([^"]+)"', html)
        assert source is not None and 'hx-get="/learning"' in html
        put(ledger, replace(group("g1", step=1), run_id="run"))
        assert len((await rig.browser.get(source[1])).json()) == 1


async def test_htmx_gets_only_the_part_that_changes(path: Path, ledger: Ledger) -> None:
    put(ledger, group("g1"))
    async with open_console(path) as rig:
        for url in ("/", "/groups", "/sessions"):
            whole = await rig.get(url)
            part = (await rig.browser.get(url, headers={"hx-request": "true"})).text
            assert "<html" in whole and "<html" not in part
            assert part.strip() in whole


async def test_without_a_proxy_now_says_what_to_do_and_shows_the_ledger(
    path: Path, ledger: Ledger
) -> None:
    put(ledger, group("g1"))
    async with open_console(path) as rig:
        html = await rig.get("/")
    assert "No fakevllm proxy answers" in html and "fakevllm serve" in html
    assert links(html) == ["g1"]


def test_the_status_is_fetched_once_for_all_pages_and_again_after_some_seconds() -> None:
    now = [0.0]
    status = ProxyStatus("http://127.0.0.1:9", None, lambda: now[0])
    first = status.view()
    assert status.view() is first
    now[0] += 60.0
    assert status.view() is not first


def test_the_parts_show_the_link_of_an_allowed_host(tmp_path: Path) -> None:
    from fakevllm.console.settings import ConsoleSettings

    settings = ConsoleSettings(
        tmp_path / "l", "http://127.0.0.1:9", host="0.0.0.0", allowed_hosts=("gpu-box",)
    )
    assert settings.link_root(8001) == "http://gpu-box:8001"
    assert "gpu-box" in settings.hosts
    shown: list[str] = []
    parts = ConsoleParts(
        settings,
        ReadOnlyLedger(tmp_path / "l"),
        ProxyStatus("http://127.0.0.1:9", None),
        None,
        8001,
        show_link=shown.append,
    )
    parts.show_new_link()
    assert shown[0].startswith("console: open http://gpu-box:8001/login?code=")


@pytest.mark.parametrize(
    ("url", "link"),
    [
        ("/%2Fevil.example/x", "/"),
        ("/%5Cevil.example", "/%5Cevil.example"),
        ("/none?a=1&b=2", "/none?a=1&amp;b=2"),
        ("/groups/a%3Fb%20c?x=%C3%A4", "/groups/a%3Fb%20c?x=%C3%A4"),
    ],
)
@pytest.mark.parametrize("is_logged_in", [True, False])
async def test_a_message_links_to_its_own_page_and_never_to_another_site(
    url: str, link: str, is_logged_in: bool, path: Path, ledger: Ledger
) -> None:
    async with open_console(path, is_logged_in=is_logged_in) as rig:
        reply = await rig.browser.get(url)
    assert reply.status_code == (404 if is_logged_in else 401)
    if not is_logged_in:
        assert f'name="next" value="{link}"' in reply.text
    elif link == "/":
        assert "Load this page again" not in reply.text and "evil" not in reply.text
    else:
        assert f'href="{link}">Load this page again' in reply.text


async def test_half_a_surrogate_pair_in_a_request_costs_one_character(
    path: Path, ledger: Ledger
) -> None:
    put(ledger, replace(group("g1"), request_json='{"text": "half \\ud83d of a pair"}'))
    async with open_console(path) as rig:
        assert "half ? of a pair" in await rig.get("/groups/g1")


async def test_a_failing_page_says_so_without_a_traceback(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_console(path) as rig:
        monkeypatch.setattr(rig.parts.proxy, "view", lambda: 1 / 0)
        reply = await rig.browser.get("/")
        assert reply.status_code == 500 and "see the console&#39;s log" in reply.text
        assert "ZeroDivisionError" not in reply.text


def test_the_static_files_name_no_other_site() -> None:
    from fakevllm.console.page_renderer import STATIC, TEMPLATES

    own = [*STATIC.glob("*.*"), *TEMPLATES.glob("*.html")]
    assert len(own) > 10
    for file in own:
        text = file.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, file
        assert not re.search(r"\sstyle=|<script>|<style>|\son\w+=", text), file
