"""The lineage of versions: parents, descendants, and the path to the present weights."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fakevllm_server.journal.rows import VersionChange
from fakevllm_server.run.version_lineage import MODEL, VersionLineage


class Lineage(VersionLineage):
    """A lineage to which tests add numbered versions."""

    def __init__(self) -> None:
        super().__init__()
        self._version = 0

    def train(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self._change(self.step_of(self.newest) + 1, is_step=True)

    def crash(self, step: int) -> None:
        """Go back to the end of a step; the later steps are trained again."""
        self._change(step)

    def go_back(self, step: int, restored: int | None = None) -> None:
        """Go back to the end of a step for good. `restored` is the version that was chosen, if a
        decision did so."""
        self._change(step, is_discarding=True, restored=restored)

    def _change(
        self,
        step: int,
        *,
        is_step: bool = False,
        is_discarding: bool = False,
        restored: int | None = None,
    ) -> None:
        self._version += 1
        number = self._version
        self.add(VersionChange(number, number, step, is_step, is_discarding, restored))


def test_steps_descend_from_all_steps_before_them() -> None:
    lineage = Lineage()
    lineage.train(3)
    assert lineage.path == [0, 1, 2, 3]
    assert lineage.descendants(2) == {2, 3}
    assert [lineage.parent_of(version) for version in lineage.path] == [0, 0, 0, 0]


def test_versions_after_a_return_descend_from_the_restored_version_and_not_from_later_ones() -> (
    None
):
    lineage = Lineage()
    lineage.train(3)
    lineage.go_back(1)  # version 4 has the weights of version 1
    lineage.train(2)
    assert lineage.path == [0, 1, 4, 5, 6]
    assert lineage.descendants(2) == {2, 3}
    assert lineage.descendants(1) == {1, 2, 3, 4, 5, 6}
    assert [lineage.parent_of(version) for version in (3, 4, 6)] == [0, 1, 1]


def test_a_step_that_is_trained_again_after_a_crash_has_the_weights_of_the_first_time() -> None:
    lineage = Lineage()
    lineage.train(3)
    lineage.crash(1)
    lineage.train(3)
    assert lineage.path == [0, 1, 4, 5, 6, 7]
    assert lineage.twins_of(2) == {2, 5} and lineage.twins_of(6) == {3, 6}
    assert lineage.descendants(2) == {2, 3, 5, 6, 7}
    assert lineage.descendants(7) == {7}


def test_a_second_crash_during_the_repetition_changes_no_twins() -> None:
    lineage = Lineage()
    lineage.train(3)
    lineage.crash(1)
    lineage.train()
    lineage.crash(1)
    lineage.train(2)
    assert lineage.twins_of(2) == {2, 5, 7} and lineage.twins_of(3) == {3, 8}


def test_steps_that_were_discarded_have_no_twins() -> None:
    lineage = Lineage()
    lineage.train(3)
    lineage.crash(2)
    lineage.go_back(1)
    lineage.train(2)
    assert lineage.twins_of(3) == {3} and lineage.twins_of(7) == {7}


def test_a_version_that_was_restored_has_the_weights_of_the_one_before_it() -> None:
    lineage = Lineage()
    lineage.train(2)
    lineage.go_back(1)  # version 3 has the weights of version 1
    lineage.go_back(1, restored=1)
    assert lineage.path == [0, 1, 4]
    assert lineage.twins_of(4) == lineage.copies_of(1) == {1, 3, 4}
    assert lineage.descendants(3) == {1, 2, 3, 4}
    assert lineage.on_path(3) == lineage.on_path(4) == 1 and lineage.on_path(2) == 2


def test_all_versions_of_step_0_have_the_weights_of_the_model() -> None:
    lineage = Lineage()
    lineage.train()
    lineage.go_back(0)
    lineage.train()
    assert lineage.twins_of(0) == lineage.twins_of(2) == {0, 2}
    assert lineage.descendants(2) == {2, 3} and lineage.on_path(2) == 0


def test_only_restored_versions_are_copies() -> None:
    lineage = Lineage()
    lineage.train(2)
    lineage.crash(1)
    lineage.train()
    assert lineage.twins_of(2) == {2, 4} and lineage.copies_of(2) == {2}


def test_training_can_return_to_a_version_that_it_has_left() -> None:
    lineage = Lineage()
    lineage.train(3)
    lineage.go_back(1, restored=1)  # version 4
    lineage.train(3)
    assert lineage.common_version(3) == 1 and lineage.common_version(5) == 5
    lineage.go_back(3, restored=3)
    lineage.train()
    assert lineage.path == [0, 1, 2, 3, 8, 9]
    assert lineage.descendants(2) == {2, 3, 8, 9} and lineage.parent_of(9) == 3


@given(st.lists(st.tuples(st.sampled_from(["train", "crash", "go_back"]), st.integers(0, 9))))
def test_the_newest_version_descends_from_exactly_those_on_its_path_and_their_twins(
    events: list[tuple[str, int]],
) -> None:
    lineage = Lineage()
    for kind, number in events:
        last = lineage.step_of(lineage.newest)
        getattr(lineage, kind)(1 if kind == "train" else min(number, last))
        path = lineage.path
        assert [lineage.step_of(one) for one in path] == sorted(map(lineage.step_of, path))
        assert all(lineage.newest in lineage.descendants(one) for one in path)
        assert lineage.parent_of(lineage.newest) in path
        for version in path[1:]:
            assert MODEL not in lineage.descendants(version)


@given(
    st.lists(
        st.tuples(st.sampled_from(["train", "crash", "go_back", "return"]), st.integers(0, 9)),
        max_size=20,
    )
)
def test_copies_are_exactly_the_versions_with_the_same_weights(
    events: list[tuple[str, int]],
) -> None:
    lineage = Lineage()
    weights = {MODEL: "model"}
    for kind, number in events:
        path = lineage.path
        last = lineage.step_of(path[-1])
        if kind == "train":
            lineage.train()
            weights[lineage.newest] = f"trained as {lineage.newest}"
            continue
        if kind == "return":
            source = sorted(weights)[number % len(weights)]
            lineage.go_back(lineage.step_of(source), restored=source)
        else:
            step = min(number, last)
            source = next(one for one in path[::-1] if lineage.step_of(one) == step)
            getattr(lineage, kind)(step)
        weights[lineage.newest] = weights[source]
    for version, own in weights.items():
        same = {one for one, other in weights.items() if other == own}
        assert lineage.copies_of(version) == same
    assert lineage.copies_of(999) == {999}, "a version that does not exist has no copies"
