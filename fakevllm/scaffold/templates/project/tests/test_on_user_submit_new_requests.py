"""Test of the hook that chooses the number of answers."""

from on_user_submit_new_requests import (
    LONG_QUESTION_CHARS,
    NUM_FOR_LONG_QUESTIONS,
    on_user_submit_new_requests,
)

from fakevllm.hooks.spec import Task


def test_only_a_long_question_gets_fewer_answers() -> None:
    long_question = "x" * (LONG_QUESTION_CHARS + 1)
    assert on_user_submit_new_requests("r1", Task(main_query="What is 3 plus 4?")) is None
    assert on_user_submit_new_requests("r2", Task(main_query=long_question)) == (
        NUM_FOR_LONG_QUESTIONS
    )
