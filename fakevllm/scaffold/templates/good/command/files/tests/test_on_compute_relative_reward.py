"""Test of the reward hook together with the command."""

import asyncio

from on_compute_relative_reward import on_compute_relative_reward

from fakevllm.hooks.spec import Sibling, Task

QUESTION = "What is 3 plus 4?"


def rewards(*texts: str, finish_reason: str = "stop") -> list[float | None]:
    task = Task(main_query=QUESTION, metadata={"answer": 7})
    siblings = [Sibling(i, task, f"test/{i}", finish_reason) for i in range(len(texts))]
    answers = [{"content": text, "finish_reason": finish_reason} for text in texts]
    return asyncio.run(on_compute_relative_reward(siblings, answers, QUESTION))


def test_only_a_complete_answer_that_the_command_accepts_is_rewarded() -> None:
    assert rewards("It is 7.", "3 plus 4 is 8.", "") == [1.0, 0.0, 0.0]
    assert rewards("It is 7", finish_reason="length") == [0.0]
