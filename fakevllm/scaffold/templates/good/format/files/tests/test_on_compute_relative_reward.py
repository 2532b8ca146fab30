"""Test of the reward hook."""

from on_compute_relative_reward import on_compute_relative_reward

from fakevllm.hooks.spec import Sibling, Task

QUESTION = "What is 3 plus 4?"


def rewards(*texts: str, finish_reason: str = "stop") -> list[float | None]:
    task = Task(main_query=QUESTION)
    siblings = [Sibling(i, task, f"test/{i}", finish_reason) for i in range(len(texts))]
    answers = [{"content": text, "finish_reason": finish_reason} for text in texts]
    return on_compute_relative_reward(siblings, answers, QUESTION)


def test_an_answer_must_end_with_a_number_and_short_ones_are_better() -> None:
    short, long, wrong = rewards("It is 7.", "If you add both, it is 7.", "It is seven.")
    assert short is not None and long is not None
    assert 1.0 >= short > long > wrong == 0.0
    assert rewards("It is 7", finish_reason="length") == [0.0]
