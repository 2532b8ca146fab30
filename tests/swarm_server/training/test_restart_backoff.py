from fakevllm_server.training.stop_and_restart import MAX_S, PROVEN_AFTER_S, RestartBackoff


def test_the_pause_grows_while_engines_die_soon_after_their_start() -> None:
    backoff = RestartBackoff()
    pauses: list[float] = []
    for now in range(8):
        backoff.engine_started(now)
        pauses.append(backoff.next_pause(now + 0.5))
    assert pauses == [1, 2, 4, 8, 16, MAX_S, MAX_S, MAX_S]


def test_a_long_uptime_or_a_completed_step_resets_the_pause() -> None:
    backoff = RestartBackoff()
    for now in range(3):
        backoff.next_pause(now)
    backoff.engine_started(10.0)
    assert backoff.next_pause(10.0 + PROVEN_AFTER_S) == 1.0
    backoff.reset()
    assert backoff.next_pause(1000.0) == 1.0
