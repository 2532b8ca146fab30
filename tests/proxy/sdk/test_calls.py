"""The requests of server calls, and their handling of each reply."""

from __future__ import annotations

import math
from typing import Any

import pytest
from proxy.sdk.scripted_calls import NO_ANSWER, CallRecord, engine_reply, reply, run_call

from fakevllm import AsyncSwarmClient, EpisodeAccess, SwarmClient
from fakevllm.sdk import engine_control, episode_calls
from fakevllm.sdk.episode import Episode
from fakevllm.sdk.protocol import ServerReply
from fakevllm.sdk.types import (
    EpisodeLost,
    ServerUnreachable,
    SwarmError,
    SwarmServerOfflineError,
)
from fakevllm.sdk.weight_sync_callbacks import SyncDetector
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.protocol.batch_status import ThrottlePolicy
from fakevllm_adapters.protocol.swarm import EngineStatusReply, Task, WorkflowOutput

PAGE = "<html>\n<head><title>502 Bad Gateway</title></head>\n<body>ray 8f2a01c9</body></html>"
TASK = Task(task_id="t", main_query="q")
OUTPUT = WorkflowOutput(reward=1.0, metadata={"mine": 1})
OK = reply(success=True)
CLAIMED = reply(
    success=True,
    client_uuid="me",
    episode_uuid="u1",
    openai_base_url="http://inside:10086/e/u1/v1",
    openai_api_key="sk-1",
)
NONE_FREE = "No available episodes to claim. Try again (maybe 1 minute) later."
NOT_CLAIMED = "Episode u1 is not in claimed status, maybe you take **too long** to submit"


def refused(fail_cause: str) -> ServerReply:
    return reply(success=False, client_uuid="me", fail_cause=fail_cause)


def not_ready(name: str) -> ServerReply:
    return refused(f"Engine not ready. Current status: [ENGINE.{name}]. Try again later.")


# --- episodes


def test_a_claim_is_retried_with_one_idempotency_key_until_it_is_granted() -> None:
    answers = [NO_ANSWER, not_ready("BOOTING"), not_ready("WEIGHT_SYNCING"), refused(NONE_FREE)]
    record = run_call(episode_calls.begin("me", "train", 60.0, None), [*answers, CLAIMED])
    assert record.result == episode_calls.Claim("u1", "/e/u1/v1", "sk-1")
    assert len(record.pauses) == 4 and record.waited_s < 4
    assert len({str(request.body) for request in record.requests}) == 1
    another = run_call(episode_calls.begin("me", "train", 60.0, None), [CLAIMED])
    keys = {
        request.body["idempotency_key"]
        for request in [record.requests[0], *another.requests]
        if request.body
    }
    assert len(keys) == 2 and "" not in keys


def test_a_claim_waits_for_an_engine_that_was_never_on_but_not_for_a_stopped_one() -> None:
    waited = run_call(
        episode_calls.begin("me", "train", 60.0, None), [not_ready("OFFLINE"), CLAIMED]
    )
    assert waited.result is not None
    with pytest.raises(SwarmServerOfflineError, match="OFFLINE"):
        run_call(
            episode_calls.begin("me", "train", 60.0, None),
            [refused(NONE_FREE), not_ready("OFFLINE")],
        )
    with pytest.raises(SwarmServerOfflineError, match="OFFLINE"):
        run_call(
            episode_calls.begin("me", "train", 60.0, None, has_seen_engine=True),
            [not_ready("OFFLINE")],
        )


def test_a_claim_contains_the_throttle_policy() -> None:
    policy = ThrottlePolicy(share=0.4, mix="math", current_task_id="t")
    record = run_call(episode_calls.begin("me", "train", 60.0, policy), [CLAIMED])
    assert record.requests[0].body is not None
    assert record.requests[0].body["throttle_policy"]["share"] == 0.4
    assert record.requests[0].body["throttle_policy"]["mix"] == "math"


def test_the_same_end_is_retried_until_it_is_on_disk() -> None:
    full = reply(503, detail="It cannot be written to the journal now (full). Try again later.")
    record = run_call(episode_calls.end("me", TASK, "u1", OUTPUT), [NO_ANSWER, full, NO_ANSWER, OK])
    bodies = [request.body for request in record.requests]
    assert len(bodies) == 4 and all(body == bodies[0] for body in bodies)
    assert bodies[0] is not None
    assert bodies[0]["workflow_output"]["metadata"] == {"mine": 1, "task_id": "t"}
    assert OUTPUT.metadata == {"mine": 1}


@pytest.mark.parametrize("status", [429, 502, 503, 504])
def test_requests_are_retried_after_transient_statuses(status: int) -> None:
    page = ServerReply(status, PAGE)
    ended = run_call(episode_calls.end("me", TASK, "u1", OUTPUT), [page, NO_ANSWER, page, OK])
    assert len(ended.requests) == 4 and all(
        request == ended.requests[0] for request in ended.requests
    )
    assert ended.pauses[0].reason == f"status {status}, not JSON: 502 Bad Gateway"
    claimed = run_call(episode_calls.begin("me", "train", 60.0, None), [page, CLAIMED])
    assert claimed.result is not None and claimed.requests[0] == claimed.requests[1]
    assert len(run_call(episode_calls.abort("me", "u1"), [page, OK]).requests) == 2
    booting = [OK, engine_reply("BOOTING"), page, engine_reply("ROLLING")]
    assert run_call(engine_control.start(None), booting).result is not None


def test_an_end_fails_after_ten_minutes_of_gateway_errors() -> None:
    record: CallRecord[None] = CallRecord()
    with pytest.raises(SwarmError, match="status 502, not JSON: 502 Bad Gateway"):
        run_call(
            episode_calls.end("me", TASK, "u1", OUTPUT), [ServerReply(502, PAGE)] * 1000, record
        )
    assert record.waited_s == pytest.approx(episode_calls.END_RETRY_S)


def test_a_request_that_the_server_refuses_is_not_retried() -> None:
    with pytest.raises(SwarmError, match="no"):
        run_call(episode_calls.end("me", TASK, "u1", OUTPUT), [reply(500, detail="no")])


def test_an_end_fails_after_ten_minutes_without_an_answer() -> None:
    record: CallRecord[None] = CallRecord()
    with pytest.raises(ServerUnreachable):
        run_call(episode_calls.end("me", TASK, "u1", OUTPUT), [NO_ANSWER] * 1000, record)
    assert record.waited_s == pytest.approx(episode_calls.END_RETRY_S)


@pytest.mark.parametrize(("status", "detail"), [(400, NOT_CLAIMED), (404, "claimed by different")])
def test_the_end_of_a_lost_claim_raises_episode_lost_without_a_retry(
    status: int, detail: str
) -> None:
    with pytest.raises(EpisodeLost, match=detail[:20]):
        run_call(episode_calls.end("me", TASK, "u1", OUTPUT), [reply(status, detail=detail)])


@pytest.mark.parametrize("reward", [None, [1.0, 2.0]])
def test_a_reward_that_cannot_be_trained_is_refused_before_anything_is_sent(reward: Any) -> None:
    with pytest.raises(ValueError, match="one finite number"):
        run_call(episode_calls.end("me", TASK, "u1", WorkflowOutput(reward=reward)), [])


def test_a_task_without_an_id_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="task_id is empty"):
        run_call(episode_calls.end("me", Task(), "u1", OUTPUT), [])


def test_rewards_that_are_not_finite_cannot_even_be_put_into_an_output() -> None:
    with pytest.raises(ValueError, match="finite"):
        WorkflowOutput(reward=math.nan)


def test_warnings_of_the_server_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    ended = run_call(
        episode_calls.end("me", TASK, "u1", OUTPUT), [reply(success=True, warning="no call")]
    )
    assert [warning.text for warning in ended.warnings] == ["episode u1 of task t: no call"]
    assert [warning.kind for warning in ended.warnings] == ["no call"]
    run_call(
        engine_control.sync_job(TrainJob()), [reply(success=True, warnings=["lr = 1 does nothing"])]
    )
    assert "the job's lr = 1 does nothing" in caplog.text


def test_connecting_to_a_closed_run_logs_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rolling = reply(engine_status="ENGINE.ROLLING", closed="training_finished")
    answers = [rolling, rolling, reply(**TrainJob().model_dump(mode="json"))]
    run_call(engine_control.ensure_running(TrainJob(), False, None), answers)
    (record,) = caplog.records
    assert "has taken its last step, and nothing more is trained" in record.getMessage()
    assert "To begin a new run, set another experiment_name in the job" in record.getMessage()


def test_a_404_for_a_known_path_is_reported_as_no_swarm_server() -> None:
    with pytest.raises(SwarmError, match="no swarm server; perhaps it is a proxy"):
        run_call(engine_control.status(), [reply(404, detail="Not Found")])


def test_an_abort_is_retried_during_a_servers_restart() -> None:
    """Otherwise the claim would survive, and steps would wait for it until it expires."""
    record = run_call(episode_calls.abort("me", "u1"), [NO_ANSWER] * 20 + [OK])
    assert record.waited_s > 30


def test_an_abort_fails_after_its_retry_time() -> None:
    record: CallRecord[None] = CallRecord()
    with pytest.raises(ServerUnreachable):
        run_call(episode_calls.abort("me", "u1"), [NO_ANSWER] * 100, record)
    assert record.waited_s == pytest.approx(episode_calls.ABORT_RETRY_S)


def test_a_refused_renewal_raises_episode_lost() -> None:
    with pytest.raises(EpisodeLost):
        run_call(episode_calls.renew("me", "u1"), [reply(410, detail=NOT_CLAIMED)])


def test_a_renewal_without_an_answer_is_retried() -> None:
    assert len(run_call(episode_calls.renew("me", "u1"), [NO_ANSWER, OK]).requests) == 2


# --- the engine


def test_a_401_is_reported_with_the_ways_to_pass_a_key() -> None:
    with pytest.raises(SwarmError, match=r"needs a valid API key.*FAKEVLLM_SWARM_KEY") as raised:
        run_call(engine_control.status(), [ServerReply(401, {"error": "Unauthorized"})])
    assert raised.value.status == 401


def test_ensure_running_sends_the_job_and_starts_an_engine_that_is_off() -> None:
    answers = [engine_reply("OFFLINE"), OK, OK, engine_reply("BOOTING"), engine_reply("ROLLING")]
    job = TrainJob(batch_size=3)
    running = reply(**job.model_dump(mode="json"))
    record = run_call(engine_control.ensure_running(job, False, None), [*answers, running])
    assert record.paths[1:3] == ["/sync_train_config", "/start_engine"]
    assert "batch_size: 3" in (record.requests[1].body or {})["yaml_as_string"]


@pytest.mark.parametrize("change", [{"experiment_name": "b"}, {"model": "theirs"}], ids=str)
def test_a_start_fails_if_another_client_has_meanwhile_sent_a_job_of_another_run(
    change: dict[str, str],
) -> None:
    job = TrainJob(experiment_name="a", model="mine")
    running = reply(**job.model_copy(update=change).model_dump(mode="json"))
    answers = [engine_reply("OFFLINE"), OK, OK, engine_reply("ROLLING"), running]
    with pytest.raises(SwarmError, match=r"Another client changed .* is '(b|theirs)', not '"):
        run_call(engine_control.ensure_running(job, False, None), answers)


def test_another_job_of_the_same_run_that_was_sent_before_the_start_is_warned_about(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = reply(**TrainJob(experiment_name="", lr=0.5).model_dump(mode="json"))
    answers = [engine_reply("OFFLINE"), OK, OK, engine_reply("ROLLING"), running]
    run_call(engine_control.ensure_running(TrainJob(lr=0.1), False, None), answers)
    assert "lr is 0.5, not 0.1" in caplog.text


@pytest.mark.parametrize("before", [[], [OK]], ids=["before the job", "before the start"])
def test_an_engine_that_another_client_has_just_started_is_used(
    before: list[ServerReply], caplog: pytest.LogCaptureFixture
) -> None:
    refused = reply(400, detail="Cannot start engine when engine is not offline.")
    running = reply(**TrainJob(batch_size=4).model_dump(mode="json"))
    booting = [refused, engine_reply("BOOTING"), engine_reply("BOOTING"), engine_reply("ROLLING")]
    answers = [engine_reply("OFFLINE"), *before, *booting, running]
    run_call(engine_control.ensure_running(TrainJob(batch_size=8), False, None), answers)
    assert "batch_size is 4, not 8" in caplog.text


def test_a_refused_start_of_an_engine_that_is_off_is_reported() -> None:
    answers = [engine_reply("OFFLINE"), OK, reply(400, detail="no"), engine_reply("OFFLINE")]
    with pytest.raises(SwarmError, match="no"):
        run_call(engine_control.ensure_running(TrainJob(), False, None), answers)


def test_a_start_is_retried_while_the_server_cannot_write_it_to_its_disk() -> None:
    full = reply(503, detail="It cannot be written to the journal now (full). Try again later.")
    off, on = engine_reply("OFFLINE"), engine_reply("ROLLING")
    record = run_call(engine_control.start(None), [full, off, full, off, OK, on])
    assert record.paths.count("/start_engine") == 3 and len(record.pauses) == 2


def test_a_start_ends_if_the_server_has_started_the_engine_by_itself() -> None:
    full = reply(503, detail="It cannot be written to the journal now (full). Try again later.")
    answers = [full, engine_reply("BOOTING"), engine_reply("ROLLING")]
    assert run_call(engine_control.start(None), answers).paths.count("/start_engine") == 1


def test_a_start_that_the_disk_refuses_for_too_long_is_reported() -> None:
    full = reply(503, detail="It cannot be written to the journal now (full). Try again later.")
    with pytest.raises(SwarmError, match="cannot be written to the journal"):
        run_call(engine_control.start(1.0), [full, engine_reply("OFFLINE")] * 20)


def test_an_engine_that_cannot_start_is_reported_with_the_reason() -> None:
    failed = [engine_reply("OFFLINE"), OK, OK, engine_reply("OFFLINE", detail="no such model")]
    with pytest.raises(SwarmServerOfflineError, match="no such model"):
        run_call(engine_control.ensure_running(TrainJob(), False, None), failed)


@pytest.mark.parametrize("detail", ["vLLM is not installed", None])
def test_an_engine_that_goes_off_before_a_poll_saw_it_boot_is_reported_with_the_reason(
    detail: str | None,
) -> None:
    refused = engine_reply("OFFLINE", detail=detail)
    message = detail or "was stopped while this client waited for it"
    with pytest.raises(SwarmServerOfflineError, match=message):
        run_call(engine_control.start(None), [OK, refused])
    with pytest.raises(SwarmServerOfflineError, match=message):
        run_call(
            engine_control.ensure_running(TrainJob(), False, None),
            [engine_reply("OFFLINE"), OK, OK, refused],
        )
    with pytest.raises(SwarmServerOfflineError, match=message):
        run_call(
            engine_control.ensure_running(TrainJob(), False, None),
            [engine_reply("BOOTING"), refused],
        )


def test_a_refused_job_is_reported_with_the_servers_message() -> None:
    with pytest.raises(SwarmError, match="does not take this job: lr must be"):
        run_call(
            engine_control.sync_job(TrainJob()), [reply(success=False, error="lr must be above 0")]
        )


def test_ensure_running_keeps_a_running_engine_and_logs_job_differences(
    caplog: pytest.LogCaptureFixture,
) -> None:
    running = reply(**TrainJob(batch_size=4, lr=0.5).model_dump(mode="json"))
    job = TrainJob(batch_size=8, lr=0.5)
    record = run_call(
        engine_control.ensure_running(job, False, None), [*[engine_reply("ROLLING")] * 2, running]
    )
    assert "/start_engine" not in record.paths
    assert "batch_size is 4, not 8" in caplog.text and "lr" not in caplog.text


def test_a_forced_restart_stops_the_engine_first() -> None:
    answers = [
        *[engine_reply("ROLLING")] * 2,
        OK,
        engine_reply("OFFLINE"),
        OK,
        OK,
        engine_reply("ROLLING"),
        reply(**TrainJob().model_dump(mode="json")),
    ]
    record = run_call(engine_control.ensure_running(TrainJob(), True, None), answers)
    paths = [path for path in record.paths if path != "/get_engine_status"]
    assert paths[:3] == ["/stop_engine", "/sync_train_config", "/start_engine"]


def test_ensure_running_waits_for_a_server_for_a_while_and_then_names_the_fix() -> None:
    with pytest.raises(ServerUnreachable, match="fakevllm-server start"):
        run_call(engine_control.ensure_running(TrainJob(), False, None), [NO_ANSWER] * 100)


@pytest.mark.parametrize("url", ["localhost:10086", "ftp://gpu-box", "http://", "gpu-box"])
def test_a_wrong_server_url_is_refused_by_the_constructor(url: str) -> None:
    for client in (SwarmClient, AsyncSwarmClient):
        with pytest.raises(ValueError, match="http://HOST:PORT"):
            client(url)


def test_the_error_for_a_wrong_url_does_not_show_its_key() -> None:
    with pytest.raises(ValueError) as raised:
        SwarmClient("alice:sk-secret@gpu-box:10086")
    assert "sk-secret" not in str(raised.value)


def test_a_reply_without_json_is_reported_as_no_swarm_server() -> None:
    with pytest.raises(SwarmError, match="not answered by a swarm server"):
        run_call(engine_control.status(), [ServerReply(200, "<html>hello</html>")])


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_a_wrong_output_is_refused_in_one_line_before_anything_is_sent(
    arguments: dict[str, Any], message: str
) -> None:
    sent: list[WorkflowOutput] = []
    episode = Episode(TASK, EpisodeAccess("http://gpu-box/e/u1/v1", "sk-1", "u1"), sent.append)
    with pytest.raises(ValueError) as raised:
        episode.end(**arguments)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)
    assert not sent and not episode.is_ended


# --- steps


NOT_ACTIVE = "Client me is not in the active list"
NOT_ACCEPTED = reply(success=False, failure_reason=NOT_ACTIVE)
ROLLING = engine_reply("ROLLING")


def test_agreeing_waits_until_the_step_begins() -> None:
    answers = [NOT_ACCEPTED, ROLLING, OK, ROLLING, OK, engine_reply("ROLLING_POST")]
    assert run_call(engine_control.agree("me"), answers).result is True


def test_agreeing_ends_when_the_batch_is_dropped_without_a_step() -> None:
    answers = [OK, ROLLING, OK, ROLLING, NOT_ACCEPTED, ROLLING]
    assert run_call(engine_control.agree("me"), answers).result is True


def test_agreeing_ends_after_a_step_that_no_poll_saw() -> None:
    assert (
        run_call(engine_control.agree("me"), [OK, ROLLING, OK, engine_reply("ROLLING", 2)]).result
        is True
    )


@pytest.mark.parametrize(
    "status", [engine_reply("ROLLING", 2), engine_reply("WEIGHT_SYNCING"), engine_reply("OFFLINE")]
)
def test_agreeing_ends_with_false_when_a_step_begins_without_its_agreement(
    status: ServerReply,
) -> None:
    answers = [NOT_ACCEPTED, ROLLING, NOT_ACCEPTED, ROLLING, NOT_ACCEPTED, status]
    assert run_call(engine_control.agree("me"), answers).result is False


def test_an_agreement_is_repeated_after_the_server_restarts() -> None:
    booting, next_one = (engine_reply(name, server_id="next") for name in ("BOOTING", "ROLLING"))
    answers = [OK, ROLLING, NO_ANSWER, NOT_ACCEPTED, NO_ANSWER, booting, NOT_ACCEPTED, next_one]
    begins = engine_reply("ROLLING_POST", server_id="next")
    assert run_call(engine_control.agree("me"), [*answers, OK, next_one, OK, begins]).result is True


def test_agreeing_continues_if_a_restarted_server_is_at_an_earlier_step() -> None:
    before, after = engine_reply("ROLLING", 5), engine_reply("ROLLING", 3, server_id="next")
    answers = [OK, before, OK, after, OK, engine_reply("ROLLING", 4, server_id="next")]
    assert run_call(engine_control.agree("me"), answers).result is True


def test_an_agreement_that_is_refused_for_ten_minutes_raises_the_servers_reason() -> None:
    record: CallRecord[bool] = CallRecord()
    with pytest.raises(SwarmError, match=NOT_ACTIVE):
        run_call(engine_control.agree("me"), [NOT_ACCEPTED, ROLLING] * 400, record)
    assert record.waited_s == pytest.approx(engine_control.MAX_REFUSED_S)


def test_agreeing_waits_for_other_clients_without_a_time_limit() -> None:
    record = run_call(
        engine_control.agree("me"), [OK, ROLLING] * 1000 + [OK, engine_reply("ROLLING_POST")]
    )
    assert record.result is True and record.waited_s > 2 * engine_control.MAX_REFUSED_S


def test_agreeing_returns_false_while_the_engine_boots() -> None:
    answers = [reply(success=False, failure_reason="..."), engine_reply("BOOTING")]
    assert run_call(engine_control.agree("me"), answers).result is False


def test_each_weight_sync_is_detected_once_including_one_that_no_poll_saw() -> None:
    detector = SyncDetector()
    seen = [("ROLLING", 1), ("WEIGHT_SYNCING", 1), ("WEIGHT_SYNCING", 1), ("ROLLING", 2)]
    seen += [("ROLLING", 3), ("WEIGHT_SYNCING", 3), ("WEIGHT_SYNCING", 4), ("ROLLING", 5)]
    begun = [
        detector.has_begun(EngineStatusReply.model_validate(engine_reply(name, step).content))
        for name, step in seen
    ]
    assert begun == [False, True, False, False, True, True, True, False]
