"""The pages: search, paging, deep links, live parts, and texts with markup."""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from fakevllm.admission.dataset import IndexedDataset, read_tasks
from fakevllm.config.key_file import KeyFile
from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.pages.groups import MAX_LIVE_SEARCH_S
from fakevllm.console.sources.curve_points import SharedCurve
from fakevllm.console.sources.proxy_status import ProxyStatus
from fakevllm.console.sources.server_releases import ServerReleases
from fakevllm.console.sources.server_status import ServerStatus
from fakevllm.ledger import group_reads
from fakevllm.ledger.forgotten_groups import Cause
from fakevllm.ledger.group_reads import GroupSearch
from fakevllm.ledger.read_only_ledger import ReadOnlyLedger
from fakevllm.ledger.records import FeedbackRecord, GroupRecord
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.keys import fingerprint, named_key
from fakevllm_adapters.protocol.swarm import Task
from tests.proxy.console.console_rig import open_console
from tests.proxy.ledger.ledger_cases import group, sibling
from tests.proxy.ledger.test_session_reads import placed
from tests.proxy.markup import MARKUP
from tests.proxy.scripted_swarm import ROLLING, ScriptedSwarm


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
    mark b code textarea ul li
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
    put(ledger, replace(record, group_id="unrated"))
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
    urls = [
        "/",
        "/groups",
        "/groups/id%2F1",
        "/tokens/id%2F1?sibling=0",
        "/sessions",
        f"/sessions/{quoted}",
    ]
    urls += [f"/groups?text={quoted}&hook={quoted}&session={quoted}"]
    urls += [f"/groups?{name}={quoted}" for name in ("min_reward", "state", "after")]
    urls += ["/learning", f"/learning?run={quoted}"]
    urls += [f"/tokens/{quoted}?sibling={quoted}"]
    urls += ["/feedback", "/feedback/id%2F1", f"/feedback?after={quoted}", f"/feedback/{quoted}"]
    urls += [f"/{quoted}", f"/login?code={quoted}"]
    async with open_console(path) as rig:
        for url in urls:
            for headers in ({}, {"hx-request": "true"}):
                html = (await rig.browser.get(url, headers=headers)).text
                elements = Elements()
                elements.feed(html)
                assert elements.unexpected == [], url
        shown = await rig.get("/groups/id%2F1")
        form = {"form_token": await rig.form_token("/"), "edited": text, "comment": text}
        for headers in ({}, {"hx-request": "true"}):
            reply = await rig.browser.post("/feedback/unrated", data=form, headers=headers)
            assert reply.status_code == 409
            elements = Elements()
            elements.feed(reply.text)
            assert elements.unexpected == []
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
        "?text=answer_1": [],
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


def test_a_slow_search_ends_early_and_can_go_on(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_reads, "ROWS_PER_SCAN", 10)
    monkeypatch.setattr(group_reads, "MAX_SEARCH_S", -1.0)
    put(ledger, *(group(f"g{number:02}", received_at=float(number)) for number in range(25)))
    reads = ReadOnlyLedger(path).groups
    ends: list[float] = []
    page = reads.search(GroupSearch(text="g03"), 5)
    while page.is_cut and page.next_key is not None:
        ends.append(page.next_key[0])
        page = reads.search(GroupSearch(text="g03"), 5, page.next_key)
    assert ends == [15.0, 5.0]
    assert [row.group_id for row in page.rows] == ["g03"]


def test_a_search_in_an_answer_that_repeats_the_text_is_fast(path: Path, ledger: Ledger) -> None:
    long = replace(sibling(0), text="a" * 1_000_000)
    put(ledger, replace(group("g1"), siblings=[long]))
    began = time.process_time()
    assert ReadOnlyLedger(path).groups.search(GroupSearch(text="a" * 499 + "b"), 5).rows == []
    assert time.process_time() - began < 0.5


async def test_only_a_fast_search_shows_new_groups_by_itself(path: Path, ledger: Ledger) -> None:
    put(ledger, group("g1"))
    async with open_console(path) as rig:
        assert "hx-get" in await rig.get("/groups?text=a")
        rig.clock.step = MAX_LIVE_SEARCH_S + 0.1
        html = await rig.get("/groups?text=a")
        assert "hx-get" not in html and "load the page again" in html


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
        assert links(session) == ["a", "b"]
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


async def test_a_group_shows_the_row_of_its_dataset_with_the_right_answer(
    path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    file = tmp_path / "held_out.jsonl"
    file.write_text('{"question": "1+1?", "level": 3, "answer": "<b>2</b>"}\n')
    (row,) = read_tasks(file, "question")
    registered = Task(task_id="t", main_query="1+2?", metadata={"sum": 3, "messages": ["left out"]})
    ledger.put_tasks([registered])
    put(
        ledger,
        group("file", task_id=row.task_id),
        group("registered", task_id="t"),
        group("other", task_id="x-0"),
        group("none"),
    )
    async with open_console(path, datasets=[tmp_path / "missing.jsonl", file]) as rig:
        html = await rig.get("/groups/file")
        assert '<b class="row-text">&lt;b&gt;2&lt;/b&gt;</b>' in html
        assert html.index('<th scope="row">answer') < html.index('<th scope="row">level')
        shown = await rig.get("/groups/registered")
        assert '<th scope="row">sum</th>' in shown and "left out" not in shown
        for group_id in ("other", "none"):
            assert "Row of the dataset" not in await rig.get(f"/groups/{group_id}")
        file.write_text('{"question": "changed"}\n')
        assert "Row of the dataset" not in await rig.get("/groups/file")


async def test_a_dataset_file_is_read_outside_of_the_time_limit_of_the_ledger(
    path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    num_blocks, num_in_block = 0, list[int]()
    reading, find_row = ReadOnlyLedger.reading, IndexedDataset.find_row

    @contextmanager
    def counted_reading(reader: ReadOnlyLedger) -> Generator[None]:
        nonlocal num_blocks
        num_blocks += 1
        try:
            with reading(reader):
                yield
        finally:
            num_blocks -= 1

    def recorded_find_row(dataset: IndexedDataset, row_id: str) -> dict[str, Any] | None:
        num_in_block.append(num_blocks)
        return find_row(dataset, row_id)

    monkeypatch.setattr(ReadOnlyLedger, "reading", counted_reading)
    monkeypatch.setattr(IndexedDataset, "find_row", recorded_find_row)
    put(ledger, group("g1", task_id="x-0"))
    async with open_console(path, datasets=[tmp_path / "rows.jsonl"]) as rig:
        await rig.get("/groups/g1")
    assert num_in_block == [0]


@pytest.mark.parametrize("cause", Cause)
async def test_a_group_whose_contents_were_deleted_shows_no_row(
    cause: Cause, path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1?", "answer": "two"}\n')
    (row,) = read_tasks(file, "question")
    ledger.put_tasks([Task(task_id="t", main_query="1+2?", metadata={"answer": "two"})])
    put(ledger, group("file", task_id=row.task_id), group("registered", task_id="t"))
    async with open_console(path, datasets=[file]) as rig:
        for group_id in ("file", "registered"):
            assert "Row of the dataset" in await rig.get(f"/groups/{group_id}")
            ledger.settle(group_id, "dropped", "reason", None, [], "r")
            ledger.forgotten.forget([group_id], cause, 1.0)
            assert ledger.drain()
            assert "Row of the dataset" not in await rig.get(f"/groups/{group_id}")


async def test_a_row_of_a_file_is_not_shown_while_texts_are_redacted(
    path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1?", "email": "a@example.org"}\n')
    (row,) = read_tasks(file, "question")
    ledger.put_tasks([Task(task_id="t", main_query="1+2?", metadata={"email": "[email]"})])
    put(ledger, group("file", task_id=row.task_id), group("registered", task_id="t"))
    async with open_console(path, datasets=[file], redacts=True) as rig:
        assert "Row of the dataset" not in await rig.get("/groups/file")
        assert "[email]" in await rig.get("/groups/registered")
    for privacy in ({"redact": ["email"]}, {"patterns": {"name": "Ann"}}, {"retention_days": 1.0}):
        async with ScriptedSwarm() as swarm:
            status = ROLLING.model_copy(update={"privacy": privacy})
            swarm.answers["/get_engine_status"] = status
            async with open_console(path, datasets=[file], server_url=swarm.url) as rig:
                is_shown = "a@example.org" in await rig.get("/groups/file")
                assert is_shown == ("retention_days" in privacy)


def test_all_pages_share_a_curve_until_the_ledger_is_written(path: Path, ledger: Ledger) -> None:
    put(ledger, replace(group("g1", step=1), run_id="r"))
    reader = ReadOnlyLedger(path)
    curve = SharedCurve(reader)
    with reader.reading():
        first = curve.points("r")
        assert curve.points("r") is first and len(first) == 1
        assert curve.points("other") == []
        put(ledger, replace(group("g2", step=2), run_id="r"))
        assert [point.first_step for point in curve.points("r")] == [1, 2]


async def test_a_run_is_chosen_by_its_whole_id_first(path: Path, ledger: Ledger) -> None:
    for number, run_id in enumerate(("", "abc", "abcd")):  # the newest one is the last one
        one = group(f"g{number}", step=number + 1, received_at=1000.0 + number)
        put(ledger, replace(one, run_id=run_id))
    expected = {"": 3, "?run=": 1, "?run=abc": 2, "?run=abcd": 3, "?run=ab": 3}
    async with open_console(path) as rig:
        for query, step in expected.items():
            curve = (await rig.browser.get(f"/learning/curve{query}")).json()
            assert [point["first_step"] for point in curve] == [step], query
        assert '<option value="" selected>' in await rig.get("/learning?run=")
        assert '<option value="abc" selected>' in await rig.get("/learning?run=abc")


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


def steps_of(html: str) -> list[int]:
    """Return the first column of the page's table."""
    return [int(step) for step in re.findall(r'<td class="main">(\d+)</td>', html)]


async def test_the_learning_page_says_how_the_reward_has_changed_and_can_show_all_steps(
    path: Path, ledger: Ledger
) -> None:
    rewards = [0.0] * 20 + [1.0] * 20
    put(
        ledger,
        *(
            replace(group(f"g{step}", (reward, reward), step=step), run_id="run")
            for step, reward in enumerate(rewards, 1)
        ),
    )
    async with open_console(path) as rig:
        html = await rig.get("/learning")
        assert "was 0.000 in steps 1 to 20, and 1.000 in steps 21 to 40." in html
        assert steps_of(html) == list(range(40, 20, -1))
        curve = (await rig.browser.get("/learning/curve")).json()
        assert curve[24]["policy_average"] == pytest.approx(0.5)
        (link,) = re.findall(r'href="([^"]+)">Show all steps', html)
        whole = await rig.get(link.replace("&amp;", "&"))
        assert steps_of(whole) == list(range(40, 0, -1)) and "Show all steps" not in whole


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
    assert "also of a run that has ended" in html
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
        ServerReleases("http://127.0.0.1:9", None),
        ServerStatus("http://127.0.0.1:9", None),
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
