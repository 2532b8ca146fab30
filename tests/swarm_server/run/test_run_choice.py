"""In which folder of the run directory a job's run is."""

from __future__ import annotations

import doctest
from itertools import combinations

import pytest

from fakevllm_server.run import run_choice
from fakevllm_server.run.run_choice import TOP, TopRun, choose_run, is_run_folder, slug

NAMES = [
    *("a", "A", "a b", "a-b", "a/b", "../a", "..", ".", "", " ", "unnamed", "~", "a@b", "\0", "ä"),
    *("x" * 60, "x" * 61, "x" * 5000, "a~559aead0", "\ud800"),
]


def chosen(name: str | None, at_top: TopRun | None, **fingerprints: str) -> str:
    """Return the folder of a job whose model has the fingerprint `mine`. `fingerprints` has the
    fingerprints of the run at the top (`top`) and of the run named `b` (`b`)."""
    known = {TOP: fingerprints.get("top"), "runs/b": fingerprints.get("b")}
    return choose_run(name, "mine", at_top, lambda at: known.get(at) not in (None, "mine")).folder


def test_the_docstring_examples_hold() -> None:
    assert doctest.testmod(run_choice).failed == 0


@pytest.mark.parametrize("name", [None, "", "a"])
def test_the_first_job_of_a_run_directory_is_at_the_top(name: str | None) -> None:
    assert chosen(name, None) == TOP


@pytest.mark.parametrize("top", [TopRun("a"), TopRun(None)])
def test_a_job_without_a_name_belongs_to_the_run_at_the_top(top: TopRun) -> None:
    assert chosen(None, top) == chosen("", top) == chosen(None, top, top="mine") == TOP


def test_a_name_that_is_not_that_of_the_top_has_a_folder_of_its_own() -> None:
    assert chosen("a", TopRun("a"), top="mine") == TOP
    assert chosen("b", TopRun("a"), top="mine") == chosen("b", TopRun(None)) == "runs/b"


def test_another_model_is_another_run_and_its_folder_differs_from_that_of_every_name() -> None:
    folders = [
        chosen("a", TopRun("a"), top="theirs"),
        chosen(None, TopRun("a"), top="theirs"),
        chosen("b", TopRun("a"), b="theirs"),
    ]
    assert len(set(folders)) == 3 and all(is_run_folder(folder) for folder in folders)
    assert not {folder.removeprefix("runs/") for folder in folders} & {slug(one) for one in NAMES}
    assert chosen("b", TopRun("a"), b="mine") == "runs/b"


@pytest.mark.parametrize(
    ("name", "top", "run_name"),
    [
        (None, TopRun("a"), "a"),
        ("a", TopRun("a"), "a"),
        ("b", TopRun("a"), "b"),
        ("a", None, "a"),
        ("", None, None),
        ("", TopRun(None), None),
    ],
)
def test_a_job_without_a_name_has_the_experiment_name_of_its_run(
    name: str | None, top: TopRun | None, run_name: str | None
) -> None:
    assert choose_run(name, None, top, lambda at: False).experiment_name == run_name


def test_different_names_have_different_folders_also_where_upper_case_is_lower_case() -> None:
    for one, other in combinations(NAMES, 2):
        assert slug(one).lower() != slug(other).lower(), (one, other)


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_of_every_name_is_one_short_folder_below_runs(name: str) -> None:
    assert is_run_folder(f"runs/{slug(name)}")
    assert len(slug(name)) < 80 and not slug(name).startswith((".", "-"))


@pytest.mark.parametrize(
    "path",
    ["", "..", "runs", "runs/", "runs/..", "runs/.a", "runs/a/b", "/", "/runs/a", "./runs/a"],
)
def test_no_other_path_is_taken_for_a_run(path: str) -> None:
    assert not is_run_folder(path)
