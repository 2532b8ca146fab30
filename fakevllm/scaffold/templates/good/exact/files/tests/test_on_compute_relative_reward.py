"""Test of the reward hook."""

from on_compute_relative_reward import on_compute_relative_reward

from fakevllm.hooks.spec import Sibling, Task

QUESTION = "What is 3 plus 4?"


def rewards(*texts: str, finish_reason: str = "stop", **metadata: object) -> list[float | None]:
    task = Task(main_query=QUESTION, metadata=metadata)
    siblings = [Sibling(i, task, f"test/{i}", finish_reason) for i in range(len(texts))]
    answers = [{"content": text, "finish_reason": finish_reason} for text in texts]
    return on_compute_relative_reward(siblings, answers, QUESTION)


def test_only_a_complete_answer_with_the_right_number_is_rewarded() -> None:
    assert rewards("It is 7.", "3 plus 4 is 8.", "", answer=7) == [1.0, 0.0, 0.0]
    assert rewards("It is 7", answer=7, finish_reason="length") == [0.0]
    assert rewards("It is 7.") == [None]  # no reference answer: not trained
