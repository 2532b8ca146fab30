"""What a client says, and what it makes of each answer."""

from __future__ import annotations

import math
from typing import Any

import pytest
from proxy.sdk.scripts import NOBODY, Played, play, said, state

from fakevllm import AsyncSwarmClient, EpisodeAccess, SwarmClient
from fakevllm.sdk import batch_calls, engine_calls, episode_calls
from fakevllm.sdk.callbacks import Syncs
from fakevllm.sdk.episode import Episode
from fakevllm.sdk.protocol import Answer
from fakevllm.sdk.types import (
    EpisodeLost,
    ServerUnreachable,
    SwarmError,
    SwarmServerOfflineError,
)
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.pool import ThrottlePolicy
from fakevllm_adapters.protocol.swarm import EngineStatusReply, Task, WorkflowOutput

PAGE = "<html>\n<head><title>502 Bad Gateway</title></head>\n<body>ray 8f2a01c9</body></html>"
TASK = Task(task_id="t", main_query="q")
OUTPUT = WorkflowOutput(reward=1.0, metadata={"mine": 1})
OK = said(success=True)
CLAIMED = said(
    success=True,
    client_uuid="me",
    episode_uuid="u1",
    openai_base_url="http://inside:10086/e/u1/v1",
    openai_api_key="sk-1",
)
NONE_FREE = "No available episodes to claim. Try again (maybe 1 minute) later."
NOT_CLAIMED = "Episode u1 is not in claimed status, maybe you take **too long** to submit"


def refused(fail_cause: str) -> Answer:
    return said(success=False, client_uuid="me", fail_cause=fail_cause)


def not_ready(name: str) -> Answer:
    return refused(f"Engine not ready. Current status: [ENGINE.{name}]. Try again later.")


# --- episodes


def test_a_claim_is_asked_for_until_there_is_one() -> None:
    answers = [NOBODY, not_ready("BOOTING"), not_ready("WEIGHT_SYNCING"), refused(NONE_FREE)]
    played = play(episode_calls.begin("me", "train", 60.0, None), [*answers, CLAIMED])
    assert played.result == episode_calls.Claim("u1", "/e/u1/v1", "sk-1")
    assert len(played.pauses) == 4 and played.waited_s < 4
    assert len({str(ask.body) for ask in played.asks}) == 1
    another = play(episode_calls.begin("me", "train", 60.0, None), [CLAIMED])
    keys = {ask.body["idempotency_key"] for ask in [played.asks[0], *another.asks] if ask.body}
    assert len(keys) == 2 and "" not in keys


def test_an_engine_that_nobody_has_started_is_waited_for_and_one_that_was_stopped_is_not() -> None:
    waited = play(episode_calls.begin("me", "train", 60.0, None), [not_ready("OFFLINE"), CLAIMED])
    assert waited.result is not None
    with pytest.raises(SwarmServerOfflineError, match="OFFLINE"):
        play(
            episode_calls.begin("me", "train", 60.0, None),
            [refused(NONE_FREE), not_ready("OFFLINE")],
        )
    with pytest.raises(SwarmServerOfflineError, match="OFFLINE"):
        play(episode_calls.begin("me", "train", 60.0, None, was_on=True), [not_ready("OFFLINE")])


def test_a_throttle_policy_travels_with_the_claim() -> None:
    policy = ThrottlePolicy(share=0.4, mix="math", current_task_id="t")
    played = play(episode_calls.begin("me", "train", 60.0, policy), [CLAIMED])
    assert played.asks[0].body is not None
    assert played.asks[0].body["throttle_policy"]["share"] == 0.4
    assert played.asks[0].body["throttle_policy"]["mix"] == "math"


def test_an_end_is_sent_again_in_the_same_words_until_it_is_on_disk() -> None:
    full = said(503, detail="It cannot be written to the journal now (full). Try again later.")
    played = play(episode_calls.end("me", TASK, "u1", OUTPUT), [NOBODY, full, NOBODY, OK])
    bodies = [ask.body for ask in played.asks]
    assert len(bodies) == 4 and all(body == bodies[0] for body in bodies)
    assert bodies[0] is not None
    assert bodies[0]["workflow_output"]["metadata"] == {"mine": 1, "task_id": "t"}
    assert OUTPUT.metadata == {"mine": 1}


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_what_a_gateway_could_not_pass_on_is_asked_again(status: int) -> None:
    page = Answer(status, PAGE)
    ended = play(episode_calls.end("me", TASK, "u1", OUTPUT), [page, NOBODY, page, OK])
    assert len(ended.asks) == 4 and all(ask == ended.asks[0] for ask in ended.asks)
    assert ended.pauses[0].why == f"status {status}, not JSON: 502 Bad Gateway"
    claimed = play(episode_calls.begin("me", "train", 60.0, None), [page, CLAIMED])
    assert claimed.result is not None and claimed.asks[0] == claimed.asks[1]
    assert len(play(episode_calls.abort("me", "u1"), [page, OK]).asks) == 2
    booting = [OK, state("BOOTING"), page, state("ROLLING")]
    assert play(engine_calls.start(None), booting).result is not None


def test_a_gateway_that_never_reaches_the_server_is_told_after_ten_minutes() -> None:
    played: Played[None] = Played()
    with pytest.raises(SwarmError, match="status 502, not JSON: 502 Bad Gateway"):
        play(episode_calls.end("me", TASK, "u1", OUTPUT), [Answer(502, PAGE)] * 1000, played)
    assert played.waited_s == pytest.approx(episode_calls.END_PATIENCE_S)


def test_what_the_server_itself_refuses_is_not_asked_again() -> None:
    with pytest.raises(SwarmError, match="no"):
        play(episode_calls.end("me", TASK, "u1", OUTPUT), [said(500, detail="no")])


def test_an_end_is_given_up_after_ten_minutes() -> None:
    played: Played[None] = Played()
    with pytest.raises(ServerUnreachable):
        play(episode_calls.end("me", TASK, "u1", OUTPUT), [NOBODY] * 1000, played)
    assert played.waited_s == pytest.approx(episode_calls.END_PATIENCE_S)


@pytest.mark.parametrize(("status", "detail"), [(400, NOT_CLAIMED), (404, "claimed by different")])
def test_a_claim_that_is_gone_is_told_as_lost_and_not_sent_again(status: int, detail: str) -> None:
    with pytest.raises(EpisodeLost, match=detail[:20]):
        play(episode_calls.end("me", TASK, "u1", OUTPUT), [said(status, detail=detail)])


@pytest.mark.parametrize("reward", [None, [1.0, 2.0]])
def test_a_reward_that_cannot_be_trained_is_refused_before_anything_is_sent(reward: Any) -> None:
    with pytest.raises(ValueError, match="one finite number"):
        play(episode_calls.end("me", TASK, "u1", WorkflowOutput(reward=reward)), [])


def test_a_task_without_an_id_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="task_id is empty"):
        play(episode_calls.end("me", Task(), "u1", OUTPUT), [])


def test_rewards_that_are_not_finite_cannot_even_be_put_into_an_output() -> None:
    with pytest.raises(ValueError, match="finite"):
        WorkflowOutput(reward=math.nan)


def test_what_the_server_warns_of_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ended = play(
        episode_calls.end("me", TASK, "u1", OUTPUT), [said(success=True, warning="no call")]
    )
    assert [one.text for one in ended.remarks] == ["episode u1 of task t: no call"]
    assert [one.about for one in ended.remarks] == ["no call"]
    play(engine_calls.sync_job(TrainJob()), [said(success=True, warnings=["lr = 1 does nothing"])])
    assert "the job's lr = 1 does nothing" in caplog.text


def test_a_run_that_takes_no_more_steps_is_told_where_it_is_taken_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rolling = said(engine_status="ENGINE.ROLLING", closed="training_finished")
    answers = [rolling, rolling, said(**TrainJob().model_dump(mode="json"))]
    play(engine_calls.ensure_running(TrainJob(), False, None), answers)
    (record,) = caplog.records
    assert "has taken its last step, and nothing more is trained" in record.getMessage()


def test_what_answers_and_is_no_swarm_server_is_told_so() -> None:
    with pytest.raises(SwarmError, match="no swarm server, but perhaps a proxy"):
        play(engine_calls.status(), [said(404, detail="Not Found")])


def test_an_abort_outlasts_a_servers_restart() -> None:
    """Or its claim would, and steps would wait for it until it runs out."""
    played = play(episode_calls.abort("me", "u1"), [NOBODY] * 20 + [OK])
    assert played.waited_s > 30


def test_an_abort_gives_up_after_a_while() -> None:
    played: Played[None] = Played()
    with pytest.raises(ServerUnreachable):
        play(episode_calls.abort("me", "u1"), [NOBODY] * 100, played)
    assert played.waited_s == pytest.approx(episode_calls.ABORT_PATIENCE_S)


def test_a_claim_that_cannot_be_renewed_is_lost() -> None:
    with pytest.raises(EpisodeLost):
        play(episode_calls.renew("me", "u1"), [said(410, detail=NOT_CLAIMED)])


def test_a_renewal_that_got_no_answer_is_sent_again() -> None:
    assert len(play(episode_calls.renew("me", "u1"), [NOBODY, OK]).asks) == 2


# --- the engine


def test_who_shows_no_good_key_is_told_where_to_give_one() -> None:
    with pytest.raises(SwarmError, match=r"asks for a good key.*FAKEVLLM_SWARM_KEY") as raised:
        play(engine_calls.status(), [Answer(401, {"error": "Unauthorized"})])
    assert raised.value.status == 401


def test_an_engine_that_is_off_gets_the_job_and_is_started() -> None:
    answers = [state("OFFLINE"), OK, OK, state("BOOTING"), state("ROLLING")]
    played = play(engine_calls.ensure_running(TrainJob(batch_size=3), False, None), answers)
    assert played.paths[1:3] == ["/sync_train_config", "/start_engine"]
    assert "batch_size: 3" in (played.asks[1].body or {})["yaml_as_string"]


def test_an_engine_that_cannot_start_says_why() -> None:
    failed = [state("OFFLINE"), OK, OK, state("OFFLINE", detail="no such model")]
    with pytest.raises(SwarmServerOfflineError, match="no such model"):
        play(engine_calls.ensure_running(TrainJob(), False, None), failed)


@pytest.mark.parametrize("detail", ["vLLM is not installed", None])
def test_an_engine_that_is_refused_before_it_was_seen_to_boot_says_why(detail: str | None) -> None:
    refused = state("OFFLINE", detail=detail)
    told = detail or "was stopped while it was waited for"
    with pytest.raises(SwarmServerOfflineError, match=told):
        play(engine_calls.start(None), [OK, refused])
    with pytest.raises(SwarmServerOfflineError, match=told):
        play(
            engine_calls.ensure_running(TrainJob(), False, None),
            [state("OFFLINE"), OK, OK, refused],
        )
    with pytest.raises(SwarmServerOfflineError, match=told):
        play(engine_calls.ensure_running(TrainJob(), False, None), [state("BOOTING"), refused])


def test_a_job_that_is_refused_is_told_in_the_servers_words() -> None:
    with pytest.raises(SwarmError, match="does not take this job: lr must be"):
        play(engine_calls.sync_job(TrainJob()), [said(success=False, error="lr must be above 0")])


def test_an_engine_that_runs_stays_and_what_its_job_says_otherwise_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = said(**TrainJob(batch_size=4, lr=0.5).model_dump(mode="json"))
    job = TrainJob(batch_size=8, lr=0.5)
    played = play(engine_calls.ensure_running(job, False, None), [*[state("ROLLING")] * 2, running])
    assert "/start_engine" not in played.paths
    assert "batch_size is 4, not 8" in caplog.text and "lr" not in caplog.text


def test_a_forced_restart_stops_first() -> None:
    answers = [*[state("ROLLING")] * 2, OK, state("OFFLINE"), OK, OK, state("ROLLING")]
    played = play(engine_calls.ensure_running(TrainJob(), True, None), answers)
    paths = [path for path in played.paths if path != "/get_engine_status"]
    assert paths == ["/stop_engine", "/sync_train_config", "/start_engine"]


def test_a_server_that_is_not_there_is_waited_for_a_little_and_the_mend_is_named() -> None:
    with pytest.raises(ServerUnreachable, match="fakevllm-server start"):
        play(engine_calls.ensure_running(TrainJob(), False, None), [NOBODY] * 100)


@pytest.mark.parametrize("url", ["localhost:10086", "ftp://gpu-box", "http://", "gpu-box"])
def test_what_is_no_url_of_a_server_is_refused_before_anything_is_asked(url: str) -> None:
    for client in (SwarmClient, AsyncSwarmClient):
        with pytest.raises(ValueError, match="http://HOST:PORT"):
            client(url)


def test_a_key_in_a_bad_url_is_not_shown() -> None:
    with pytest.raises(ValueError) as raised:
        SwarmClient("alice:sk-secret@gpu-box:10086")
    assert "sk-secret" not in str(raised.value)


def test_a_stranger_on_the_port_is_no_swarm_server() -> None:
    with pytest.raises(SwarmError, match="not answered by a swarm server"):
        play(engine_calls.status(), [Answer(200, "<html>hello</html>")])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"reward": math.nan}, "WorkflowOutput: reward: Input should be a finite number, got nan"),
        ({"reward": "good"}, "WorkflowOutput: reward: must be a number, not text, got 'good'"),
        ({"reward": 1.0, "log_metrics": {"loss": math.nan}}, "WorkflowOutput: log_metrics.loss"),
        (
            {"reward": 1.0, "log_metrics": {"loss": 1e308}},
            "WorkflowOutput: log_metrics.loss: must be at most 1e+30 either way, got 1e+308",
        ),
        (
            {"reward": 1.0, "is_success": "maybe"},
            "WorkflowOutput: is_success: Input should be a valid boolean",
        ),
    ],
)
def test_an_end_that_says_no_reward_is_refused_in_one_line(
    given: dict[str, Any], told: str
) -> None:
    sent: list[WorkflowOutput] = []
    episode = Episode(TASK, EpisodeAccess("http://gpu-box/e/u1/v1", "sk-1", "u1"), sent.append)
    with pytest.raises(ValueError) as raised:
        episode.end(**given)
    assert str(raised.value).startswith(told) and "\n" not in str(raised.value)
    assert not sent and not episode.is_ended


# --- steps


NOT_ACTIVE = "Client me is not in the active list"
NOT_TAKEN = said(success=False, failure_reason=NOT_ACTIVE)
ROLLING = state("ROLLING")


def test_agreeing_waits_until_the_step_begins() -> None:
    answers = [NOT_TAKEN, ROLLING, OK, ROLLING, OK, state("ROLLING_POST")]
    assert play(batch_calls.agree("me"), answers).result is True


def test_agreeing_ends_with_a_batch_of_which_no_step_came() -> None:
    answers = [OK, ROLLING, OK, ROLLING, NOT_TAKEN, ROLLING]
    assert play(batch_calls.agree("me"), answers).result is True


def test_a_step_that_no_poll_saw_ends_it() -> None:
    assert play(batch_calls.agree("me"), [OK, ROLLING, OK, state("ROLLING", 2)]).result is True


@pytest.mark.parametrize("seen", [state("ROLLING", 2), state("WEIGHT_SYNCING"), state("OFFLINE")])
def test_a_step_to_which_it_did_not_agree_ends_it_too(seen: Answer) -> None:
    answers = [NOT_TAKEN, ROLLING, NOT_TAKEN, ROLLING, NOT_TAKEN, seen]
    assert play(batch_calls.agree("me"), answers).result is False


def test_what_was_agreed_with_a_server_that_died_is_agreed_with_the_next() -> None:
    booting, next_one = (state(name, server_id="next") for name in ("BOOTING", "ROLLING"))
    answers = [OK, ROLLING, NOBODY, NOT_TAKEN, NOBODY, booting, NOT_TAKEN, next_one]
    begins = state("ROLLING_POST", server_id="next")
    assert play(batch_calls.agree("me"), [*answers, OK, next_one, OK, begins]).result is True


def test_a_server_that_was_started_again_may_be_at_an_earlier_step() -> None:
    before, after = state("ROLLING", 5), state("ROLLING", 3, server_id="next")
    answers = [OK, before, OK, after, OK, state("ROLLING", 4, server_id="next")]
    assert play(batch_calls.agree("me"), answers).result is True


def test_an_agreement_that_is_refused_for_ten_minutes_is_an_error_with_the_reason() -> None:
    played: Played[bool] = Played()
    with pytest.raises(SwarmError, match=NOT_ACTIVE):
        play(batch_calls.agree("me"), [NOT_TAKEN, ROLLING] * 400, played)
    assert played.waited_s == pytest.approx(batch_calls.REFUSED_S)


def test_others_are_waited_for_however_long_they_take() -> None:
    played = play(batch_calls.agree("me"), [OK, ROLLING] * 1000 + [OK, state("ROLLING_POST")])
    assert played.result is True and played.waited_s > 2 * batch_calls.REFUSED_S


def test_nobody_agrees_while_nothing_is_collected() -> None:
    answers = [said(success=False, failure_reason="..."), state("BOOTING")]
    assert play(batch_calls.agree("me"), answers).result is False


def test_each_weight_sync_is_counted_once_also_one_that_no_poll_saw() -> None:
    syncs = Syncs()
    seen = [("ROLLING", 1), ("WEIGHT_SYNCING", 1), ("WEIGHT_SYNCING", 1), ("ROLLING", 2)]
    seen += [("ROLLING", 3), ("WEIGHT_SYNCING", 3), ("WEIGHT_SYNCING", 4), ("ROLLING", 5)]
    begun = [
        syncs.begun(EngineStatusReply.model_validate(state(name, step).content))
        for name, step in seen
    ]
    assert begun == [False, True, False, False, True, True, True, False]
