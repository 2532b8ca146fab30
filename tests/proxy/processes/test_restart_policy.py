"""When a process that died is started again, and when it is given up."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fakevllm.processes.restart_policy import (
    BAD_SETTINGS_CODE,
    FIRST_PAUSE_S,
    MAX_EARLY_DEATHS,
    STABLE_S,
    RestartPolicy,
)

CODES = st.integers(-64, 255).filter(lambda code: code != BAD_SETTINGS_CODE)
LIVES = st.floats(0, 2 * STABLE_S, allow_nan=False)


def pauses(policy: RestartPolicy, lives_s: list[float], codes: list[int]) -> list[float | None]:
    """Return the pause after each death, until the process is given up."""
    now_s, result = 1000.0, list[float | None]()
    for life_s, code in zip(lives_s, codes, strict=True):
        policy.record_start(now_s)
        now_s += life_s
        pause_s = policy.pause_after_death(code, now_s)
        result.append(pause_s)
        if pause_s is None:
            break
        now_s += pause_s
    return result


def test_a_process_that_dies_at_once_is_started_later_and_later_and_then_given_up() -> None:
    found = pauses(RestartPolicy(), [0.1] * 20, [1] * 20)
    doubled = [FIRST_PAUSE_S * 2**number for number in range(MAX_EARLY_DEATHS - 2)]
    assert found == [0.0, *doubled, None]


@given(code=CODES)
def test_a_process_that_lived_long_is_started_again_at_once_however_often_it_dies(
    code: int,
) -> None:
    assert pauses(RestartPolicy(), [STABLE_S] * 50, [code] * 50) == [0.0] * 50


@given(lives=st.lists(LIVES, max_size=MAX_EARLY_DEATHS - 2))
def test_a_process_that_refuses_its_settings_is_never_started_again(lives: list[float]) -> None:
    codes = [1] * len(lives) + [BAD_SETTINGS_CODE]
    assert pauses(RestartPolicy(), [*lives, STABLE_S * 9], codes)[-1] is None


@given(lives=st.lists(st.tuples(LIVES, CODES), max_size=40))
def test_a_process_is_given_up_exactly_after_so_many_early_deaths_in_a_row(
    lives: list[tuple[float, int]],
) -> None:
    found = pauses(RestartPolicy(), [life for life, _ in lives], [code for _, code in lives])
    in_a_row = 0
    for pause_s, (life_s, _) in zip(found, lives, strict=False):
        in_a_row = in_a_row + 1 if life_s < STABLE_S else 0
        assert (pause_s is None) is (in_a_row == MAX_EARLY_DEATHS)
    assert None not in found[:-1]
