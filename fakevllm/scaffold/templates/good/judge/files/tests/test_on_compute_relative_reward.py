"""Test of the reward hook, with a judge that runs on this machine."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from on_compute_relative_reward import on_compute_relative_reward

from fakevllm.hooks.spec import Sibling, Task

QUESTION = "What is 3 plus 4?"


def rewards(*texts: str) -> list[float | None]:
    task = Task(main_query=QUESTION)
    siblings = [Sibling(i, task, f"test/{i}", "stop") for i in range(len(texts))]
    answers = [{"content": text, "finish_reason": "stop"} for text in texts]
    return asyncio.run(on_compute_relative_reward(siblings, answers, QUESTION))


class Judge(BaseHTTPRequestHandler):
    """A judge that gives 10 to answers with a 7, and 0 to the others."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        shown = body["messages"][-1]["content"].split("<answer>")[1:]
        text = json.dumps({"scores": [10 if "7" in answer else 0 for answer in shown]})
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge"}
        content = json.dumps(reply | {"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        """Print nothing for each request."""


def test_the_judge_scores_complete_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    with HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        monkeypatch.setenv("FAKEVLLM_JUDGE_BASE_URL", url)
        monkeypatch.setenv("FAKEVLLM_JUDGE_MODEL", "judge")
        try:
            assert rewards("It is 7.", "It is 8.", "") == [1.0, 0.0, 0.0]
        finally:
            server.shutdown()


def test_without_a_judge_short_answers_are_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FAKEVLLM_JUDGE_BASE_URL", raising=False)
    assert rewards("It is 7.", "If you add both, it is 7.", "") == [1.0, 3 / 7, 0.0]
