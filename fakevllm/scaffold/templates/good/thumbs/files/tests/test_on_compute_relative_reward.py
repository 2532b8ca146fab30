"""Test of the hooks: without feedback all answers are equal, and a thumb decides."""

from on_compute_relative_reward import on_compute_relative_reward, on_feedback

from fakevllm.hooks.spec import Feedback

ANSWER = {"content": "It is 7.", "finish_reason": "stop"}


def test_only_feedback_counts() -> None:
    assert on_compute_relative_reward([], [ANSWER, ANSWER], "What is 3 plus 4?") == [0.0, 0.0]
    up = Feedback(kind="feedback", request_id="r1", answer=ANSWER, thumbs="up")
    down = Feedback(kind="feedback", request_id="r1", answer=ANSWER, thumbs="down")
    assert on_feedback(up) == 1.0
    assert on_feedback(down) == -1.0
