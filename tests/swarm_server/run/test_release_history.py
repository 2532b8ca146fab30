"""The state that follows from a history of releases."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.protocol.releases import Decision, ReleaseRecord
from fakevllm_server.journal.rows import ReleaseRow
from fakevllm_server.run.release_history import ReleaseState, rejected_by
from fakevllm_server.run.version_lineage import MODEL
from tests.swarm_server.run.test_version_lineage import Lineage

CANDIDATE, RELEASED, REJECTED, UNDECIDED, HOLD, RESUME = Decision


class History:
    """A run of which each version has a checkpoint, and the decisions about it."""

    def __init__(self) -> None:
        self.lineage = Lineage()
        self.rows: list[ReleaseRow] = []
        self.state = ReleaseState()

    def decide(
        self,
        decision: Decision,
        version: int | None = None,
        restored: int | None = None,
        *,
        is_rollback: bool = False,
        pinned: tuple[int, ...] | None = None,
    ) -> None:
        number = len(self.rows) + 1
        record = ReleaseRecord(
            number=number,
            id=str(number),
            decision=decision,
            version=version,
            parent=None,
            time_s=0.0,
            decided_by="gate",
        )
        newest = max(self.lineage.path)
        row = ReleaseRow(record, b"", newest, restored, is_rollback, pinned)
        if decision is REJECTED and not is_rollback:
            rejected = rejected_by(row, self.lineage)
            if self.lineage.newest in rejected:
                target = self.state.released_without(rejected)
                row = ReleaseRow(record, b"", newest, target, is_rollback, pinned)
        self.rows.append(row)
        if row.restored is not None:
            self.lineage.go_back(self.lineage.step_of(row.restored), row.restored)
        self.state.apply(row, self.lineage)

    def read_again(self) -> ReleaseState:
        """Return the state that the next server process derives."""
        state = ReleaseState()
        for row in self.rows:
            state.apply(row, self.lineage)
        return state


def test_a_rejection_rejects_all_versions_that_descend_from_it_and_training_goes_back() -> None:
    history = History()
    history.lineage.train(2)
    history.decide(CANDIDATE, 2)
    history.decide(RELEASED, 2)
    history.lineage.train(3)
    history.decide(CANDIDATE, 4)
    assert history.state.pinned == {0, 2, 4}
    history.decide(REJECTED, 4)
    assert (history.state.released, history.state.candidate) == (2, None)
    assert history.state.rejected == {4, 5}
    assert history.rows[-1].restored == 2
    history.lineage.train(2)
    assert history.read_again() == history.state


def test_if_the_released_version_is_rejected_the_one_before_it_answers_apps() -> None:
    history = History()
    history.lineage.train(4)
    history.decide(RELEASED, 1)
    history.decide(RELEASED, 3)
    assert history.state.pinned == {1, 3}
    history.decide(REJECTED, 3)
    assert (history.state.released, history.state.rejected) == (1, {3, 4})
    history.decide(REJECTED, 1)
    assert (history.state.released, history.rows[-1].restored) == (MODEL, MODEL)


def test_a_rollback_rejects_all_that_descends_from_the_restored_version() -> None:
    history = History()
    history.lineage.train(4)
    history.decide(RELEASED, 3)
    history.decide(REJECTED, 3, restored=2, is_rollback=True)
    assert (history.state.released, history.state.rejected) == (MODEL, {3, 4})
    history.lineage.train()
    assert history.read_again().rejected == {3, 4}


def test_a_rejected_version_that_is_released_by_force_is_not_rejected_any_more() -> None:
    history = History()
    history.lineage.train(3)
    history.decide(REJECTED, 2)
    history.decide(RELEASED, 2)
    assert (history.state.released, history.state.rejected) == (2, {3})


def test_a_rejection_and_a_release_hold_for_all_versions_with_the_same_weights() -> None:
    history = History()
    history.lineage.train(3)
    history.lineage.crash(3)  # version 4 has the weights of version 3
    history.decide(REJECTED, 4)
    assert history.state.rejected == {3, 4}
    history.decide(RELEASED, 3)
    assert (history.state.released, history.state.rejected) == (3, set())


def test_a_rollback_rejects_no_version_with_the_weights_of_the_restored_one() -> None:
    history = History()
    history.lineage.train(2)
    history.lineage.crash(2)  # version 3 has the weights of version 2
    history.lineage.train()
    history.decide(REJECTED, 4, restored=2, is_rollback=True)
    assert history.state.rejected == {4}


def test_an_undecided_candidate_is_none_any_more_and_a_hold_lasts_until_resume() -> None:
    history = History()
    history.lineage.train(2)
    history.decide(CANDIDATE, 1)
    history.decide(HOLD)
    assert history.state.is_held and history.state.candidate == 1
    history.decide(UNDECIDED, 1)
    assert history.state.candidate is None
    history.decide(RESUME)
    assert not history.state.is_held


def test_versions_that_a_decision_pins_are_kept_until_another_decision_has_a_list() -> None:
    history = History()
    history.lineage.train(5)
    history.decide(CANDIDATE, 5, pinned=(2,))
    history.decide(UNDECIDED, 5)
    assert history.state.pinned == {0, 2}
    history.decide(CANDIDATE, 5, pinned=(3,))
    assert history.state.pinned == {0, 3, 5}
    history.decide(UNDECIDED, 5, pinned=())
    assert history.state.pinned == {0} and history.read_again() == history.state


EVENTS = st.one_of(
    st.tuples(st.sampled_from(["train", "crash"]), st.integers(0, 8)),
    st.tuples(st.sampled_from([CANDIDATE, RELEASED, REJECTED, UNDECIDED]), st.integers(1, 8)),
    st.tuples(st.just("rollback"), st.integers(0, 8)),
)


@given(st.lists(EVENTS))
def test_no_rejected_version_answers_apps_is_evaluated_or_is_trained_further(
    events: list[tuple[str, int]],
) -> None:
    history = History()
    for kind, number in events:
        lineage, path = history.lineage, history.lineage.path
        version = path[min(number, len(path) - 1)]
        if kind == "train":
            lineage.train()
        elif kind == "crash":
            lineage.crash(lineage.step_of(version))
        elif kind == "rollback":
            history.decide(REJECTED, None, restored=version, is_rollback=True)
        elif version != MODEL:
            history.decide(Decision(kind), version)
        state = history.state
        assert state.rejected.isdisjoint({state.released, state.candidate, MODEL})
        assert lineage.newest not in state.rejected
        assert state.released in state.pinned
        assert history.read_again() == state
