from fakevllm_server.training.guards import MAX_S, PROVEN_AFTER_S, RestartBackoff


def test_the_pause_grows_while_engines_die_soon_after_their_boot() -> None:
    back_off = RestartBackoff()
    pauses: list[float] = []
    for now in range(8):
        back_off.engine_started(now)
        pauses.append(back_off.next_pause(now + 0.5))
    assert pauses == [1, 2, 4, 8, 16, MAX_S, MAX_S, MAX_S]


def test_a_long_life_or_work_done_makes_the_next_pause_short() -> None:
    back_off = RestartBackoff()
    for now in range(3):
        back_off.next_pause(now)
    back_off.engine_started(10.0)
    assert back_off.next_pause(10.0 + PROVEN_AFTER_S) == 1.0
    back_off.reset()
    assert back_off.next_pause(1000.0) == 1.0
