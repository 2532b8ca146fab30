"""Requests count as one request only if there is evidence of a retry."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from fakevllm.groups.resend_detection import AttemptIndex, RequestAttempts, RequestIdentity

SENT = RequestIdentity(b"k")
MARKED = RequestIdentity(b"k", is_marked=True)


def attempts(**bounds: int) -> AttemptIndex[str]:
    return AttemptIndex(600, **bounds)


def test_equal_requests_without_a_sign_of_a_retry_are_two() -> None:
    known = attempts()
    first = known.begin(SENT, "a", now=0)
    assert known.find(SENT, now=1) is None
    known.delivered(first, now=2)
    assert known.find(SENT, now=3) is None


def test_a_marked_retry_finds_the_earlier_request() -> None:
    known = attempts()
    first = known.begin(SENT, "a", now=0)
    assert known.find(MARKED, now=1) is first
    known.delivered(first, now=2)
    known.delivered(first, now=2)
    assert known.find(MARKED, now=3) is first


def test_a_marked_retry_without_an_earlier_request_is_new() -> None:
    assert attempts().find(MARKED, now=0) is None


def test_each_lost_connection_accounts_for_one_resend() -> None:
    known = attempts()
    first, second = known.begin(SENT, "a", now=0), known.begin(SENT, "b", now=0)
    known.connection_lost(first, now=1)
    known.connection_lost(second, now=1)
    assert known.find(SENT, now=2) is first
    assert known.find(SENT, now=2) is second
    assert known.find(SENT, now=2) is None


def test_a_resend_after_each_lost_connection_finds_the_same_request() -> None:
    known = attempts()
    first = known.begin(SENT, "a", now=0)
    for now in range(1, 5):
        known.connection_lost(first, now)
        assert known.find(SENT, now) is first


def test_an_answer_that_was_sent_but_not_read_completely_is_resent() -> None:
    known = attempts()
    first = known.begin(SENT, "a", now=0)
    known.delivered(first, now=1)
    known.delivery_failed(first, now=2)
    assert known.find(SENT, now=3) is first


def test_a_disconnect_after_the_complete_answer_is_no_lost_connection() -> None:
    known = attempts()
    first = known.begin(SENT, "a", now=0)
    known.connection_lost(first, now=1)
    known.delivery_confirmed(first, now=2)
    assert known.find(SENT, now=3) is None and first.num_delivered == 1


def test_an_idempotency_key_identifies_one_request() -> None:
    known = attempts()
    named = RequestIdentity(b"k", idempotency_key="x")
    first = known.begin(named, "a", now=0)
    assert known.find(named, now=1) is first
    known.connection_lost(first, now=2)
    assert known.find(RequestIdentity(b"k", is_marked=True, idempotency_key="y"), now=3) is None
    assert known.find(SENT, now=3) is first


def test_an_idempotency_key_with_another_body_is_reused_unless_its_request_failed() -> None:
    known = attempts()
    first = RequestIdentity(b"k", idempotency_key="x", body=b"1")
    other = RequestIdentity(b"l", idempotency_key="x", body=b"2")
    assert not known.reuses_idempotency_key(first, now=0)
    request = known.begin(first, "a", now=0)
    assert known.reuses_idempotency_key(other, now=1)
    elsewhere = RequestIdentity(b"m", idempotency_key="x", body=b"1")
    assert not known.reuses_idempotency_key(elsewhere, now=1), "the session alone differs"
    for unrelated in (RequestIdentity(b"l", idempotency_key="y", body=b"2"), SENT, MARKED):
        assert not known.reuses_idempotency_key(unrelated, now=1)
    known.failed(request, now=2)
    assert not known.reuses_idempotency_key(other, now=3)


def test_a_retry_of_a_failed_request_is_a_new_request_once() -> None:
    known = attempts()
    refused, waiting = known.begin(SENT, "a", now=0), known.begin(SENT, "b", now=0)
    known.failed(refused, now=1)
    known.stopped_waiting(refused, now=1)
    assert known.find(SENT, now=2) is None
    assert known.find(MARKED, now=2) is None, "it is the one that was refused"
    assert known.find(MARKED, now=2) is waiting


def test_another_body_is_another_request() -> None:
    known = attempts()
    known.connection_lost(known.begin(SENT, "a", now=0), now=1)
    assert known.find(RequestIdentity(b"other", is_marked=True), now=2) is None


def test_a_lost_connection_is_forgotten_with_time() -> None:
    known = attempts()
    known.connection_lost(known.begin(SENT, "a", now=0), now=100)
    assert known.find(SENT, now=701) is None and len(known) == 0


def test_a_request_with_a_waiting_connection_is_never_evicted() -> None:
    known = attempts(max_requests=1)
    first = known.begin(SENT, "a", now=0)
    known.begin(RequestIdentity(b"other"), "b", now=5000)
    assert known.find(MARKED, now=5000) is first


def test_the_newest_answers_are_kept_up_to_a_size_limit() -> None:
    known = attempts(max_bytes=100)
    for number in range(4):
        one = known.begin(RequestIdentity(b"%d" % number), "a", now=number)
        known.set_size(one, 40)
        known.connection_lost(one, now=number)
    found = [known.find(RequestIdentity(b"%d" % number), now=9) is not None for number in range(4)]
    assert found == [False, False, True, True] and known.num_bytes == 80


class AnyOrder(RuleBasedStateMachine):
    """Equal requests of several users with lost connections, in any order.

    At most one request per lost connection is treated as a resend.
    """

    def __init__(self) -> None:
        super().__init__()
        self.known = attempts(max_bytes=200, max_requests=6)
        self.now = 0.0
        self.waiting: list[RequestAttempts[str]] = []
        self.num_evidence = self.num_found = 0
        """Number of lost connections, and number of requests treated as resends."""

    @rule(key=st.sampled_from([b"a", b"b"]))
    def sends(self, key: bytes) -> None:
        found = self.known.find(RequestIdentity(key), self.now)
        self.num_found += found is not None
        self.waiting.append(found or self.known.begin(RequestIdentity(key), "x", self.now))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), size=st.integers(0, 90))
    def gets_it(self, data: st.DataObject, size: int) -> None:
        attempt = self._one(data)
        self.known.set_size(attempt, size)
        self.known.delivered(attempt, self.now)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def is_lost(self, data: st.DataObject) -> None:
        self.num_evidence += 1
        self.known.connection_lost(self._one(data), self.now)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def is_refused(self, data: st.DataObject) -> None:
        attempt = self._one(data)
        self.known.failed(attempt, self.now)
        self.known.stopped_waiting(attempt, self.now)

    @rule(seconds=st.sampled_from([1, 300, 700]))
    def time_passes(self, seconds: int) -> None:
        self.now += seconds

    def _one(self, data: st.DataObject) -> RequestAttempts[str]:
        return self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))

    @invariant()
    def holds(self) -> None:
        assert self.num_found <= self.num_evidence
        assert all(attempt.num_waiting > 0 for attempt in self.waiting)
        assert self.known.num_bytes >= 0

    def teardown(self) -> None:
        """After the resend window, only requests with waiting connections are left."""
        self.now += 601
        self.known.find(RequestIdentity(b"none"), self.now)
        assert len(self.known) == len(set(self.waiting))
        assert self.known.num_bytes == sum(one.size for one in set(self.waiting))


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=30)
