"""The hook llm_judge in a real hook process, with a judge on a real HTTP server."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from fakevllm.hooks.hook_runner import HookWorker
from fakevllm.hooks.results import RewardOutcome
from fakevllm.hooks.spec import Sibling, Task
from reward_hooks.llm_judge import parse_scores

HOOK = Path(__file__).parents[2] / "reward_hooks" / "llm_judge.py"


class Judge:
    """A judge that scores an answer by the digits in it, and records the requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.reply: str | None = None
        self.status = 200

    async def answer(self, request: web.Request) -> web.Response:
        body: dict[str, Any] = await request.json()
        self.requests.append(body)
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        text = self.reply or json.dumps({"scores": [int(digits) for digits in self.shown(-1)]})
        message = {"role": "assistant", "content": f"<think>hm</think>{text}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": body["model"]}
        return web.json_response(answer | {"choices": [choice]})

    def shown(self, index: int) -> list[str]:
        """Return the digits of the answers that one request showed, in order."""
        text = self.requests[index]["messages"][1]["content"]
        return re.findall(r"<answer>\nanswer (\d+)", text)


@pytest_asyncio.fixture
async def judge(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Judge]:
    server = Judge()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", server.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    monkeypatch.setenv("FAKEVLLM_JUDGE_BASE_URL", f"http://127.0.0.1:{port}/v1")
    monkeypatch.setenv("FAKEVLLM_JUDGE_MODEL", "the-judge")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    yield server
    await runner.cleanup()


Score = Callable[..., Awaitable[RewardOutcome]]


@pytest_asyncio.fixture
async def score(tmp_path: Path) -> AsyncIterator[Score]:
    """Score texts with the hook in a worker. `mode` is edited in a copy, as a user would do."""
    workers: dict[str, HookWorker] = {}

    async def run(*texts: str, mode: str = "listwise", finish: str = "stop") -> RewardOutcome:
        if mode not in workers:
            copy = tmp_path / f"judge_{mode}.py"
            line = 'MODE: Literal["listwise", "pointwise"] = "listwise"'
            original = HOOK.read_text()
            assert line in original
            copy.write_text(original.replace(line, f'MODE = "{mode}"'))
            workers[mode] = HookWorker(copy, 30)
            await workers[mode].start()
        answers: list[dict[str, Any]] = [
            {"role": "assistant", "content": text, "finish_reason": finish} for text in texts
        ]
        siblings = [Sibling(i, Task(), f"g/{i}", finish) for i in range(len(answers))]
        return await workers[mode].reward(siblings, answers, "the question")

    yield run
    await asyncio.gather(*(worker.close() for worker in workers.values()))


@pytest.mark.parametrize("mode", ["listwise", "pointwise"])
async def test_scores_are_in_the_order_of_the_answers(
    judge: Judge, score: Score, mode: str
) -> None:
    outcome = await score(*(f"answer {digit}" for digit in (3, 9, 0, 5, 7)), mode=mode)
    assert outcome.rewards == [0.3, 0.9, 0.0, 0.5, 0.7]
    assert outcome.annotations[0] == {"judge": "the-judge"}
    assert len(judge.requests) == (1 if mode == "listwise" else 5)
    assert judge.requests[0]["model"] == "the-judge"
    assert "the question" in judge.requests[0]["messages"][1]["content"]


async def test_the_shuffled_order_depends_only_on_the_answers(judge: Judge, score: Score) -> None:
    texts = [f"answer {digit}" for digit in range(8)]
    await score(*texts)
    await score(*texts)
    await score(*texts[1:], "answer 9")
    assert judge.shown(0) == judge.shown(1) != [str(digit) for digit in range(8)]
    assert sorted(judge.shown(0)) == [str(digit) for digit in range(8)]


async def test_answers_are_not_trained_if_the_reply_cannot_be_parsed(
    judge: Judge, score: Score
) -> None:
    judge.reply = "They are both fine."
    outcome = await score("answer 1", "answer 2")
    assert (outcome.rewards, outcome.reason) == ([None, None], None)


async def test_empty_and_cut_off_answers_get_zero_without_the_judge(
    judge: Judge, score: Score
) -> None:
    assert (await score("answer 4", "", "  ")).rewards == [0.4, 0.0, 0.0]
    assert judge.shown(0) == ["4"]
    assert (await score("answer 4", "answer 5", finish="length")).rewards == [0.0, 0.0]
    assert len(judge.requests) == 1


async def test_a_judge_that_refuses_fails_the_group_with_the_reason(
    judge: Judge, score: Score
) -> None:
    judge.status = 401
    outcome = await score("answer 1", "answer 2")
    assert outcome.rewards is None
    assert outcome.reason is not None and "AuthenticationError" in outcome.reason


async def test_missing_settings_are_named(
    judge: Judge, score: Score, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FAKEVLLM_JUDGE_BASE_URL")
    outcome = await score("answer 1", "answer 2")
    assert outcome.reason is not None and "set FAKEVLLM_JUDGE_BASE_URL" in outcome.reason


@pytest.mark.parametrize(
    "text",
    [
        '{"scores": [1]}',
        '{"scores": [1, "2"]}',
        '{"scores": [1, NaN]}',
        '{"scores": [1, true]}',
        '{"scores": 3}',
        '{"score": [1, 2]}',
        "[1, 2]",
        "{",
        "",
    ],
)
def test_a_reply_with_a_missing_or_invalid_score_gives_no_rewards(text: str) -> None:
    assert parse_scores(text, 2) == [None, None]


def test_scores_beyond_the_scale_are_clamped() -> None:
    assert parse_scores('{"scores": [11, -1, 5]}', 3) == [1.0, 0.0, 0.5]
