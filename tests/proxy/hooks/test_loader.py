"""The loader finds the user's functions by path, and reports a wrong file in one line."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from fakevllm.errors import HookError
from fakevllm.hooks.loader import is_async, load_hooks

REWARD = "def on_compute_relative_reward(valid_results, all_answers, question):\n    return []\n"
SUBMIT = "def on_user_submit_new_requests(request_id, task):\n    return 3\n"


def write(folder: Path, **files: str) -> Path:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def failure(path: Path) -> str:
    with pytest.raises(HookError) as caught:
        load_hooks(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_single_file_is_a_hook(tmp_path: Path) -> None:
    hooks = load_hooks(write(tmp_path, one=REWARD) / "one.py")
    assert hooks.reward_arity == 3
    assert hooks.submit is None
    assert hooks.folder == tmp_path.resolve()


def test_a_folder_is_searched_by_file_name_first(tmp_path: Path) -> None:
    other = REWARD.replace("[]", "['wrong']")
    write(tmp_path, on_compute_relative_reward=REWARD, aaa=other, extra=SUBMIT)
    hooks = load_hooks(tmp_path)
    assert hooks.reward([], [], "") == []
    assert hooks.submit is not None and hooks.submit("r", None) == 3


def test_a_name_may_be_imported_from_a_neighbour(tmp_path: Path) -> None:
    scoring = "def score(valid_results, all_answers):\n    return ['from the neighbour']\n"
    hook = "from neighbour_a import score as on_compute_relative_reward\n"
    hooks = load_hooks(write(tmp_path, neighbour_a=scoring, hook_a=hook))
    assert hooks.reward([], []) == ["from the neighbour"]
    assert hooks.reward_arity == 2


def test_files_without_a_hook_are_not_run(tmp_path: Path) -> None:
    write(tmp_path, hook_b=REWARD, script_b="raise SystemExit('I was run')\n")
    assert load_hooks(tmp_path).reward([], [], "") == []


def test_a_name_in_two_files_is_refused_with_both_named(tmp_path: Path) -> None:
    message = failure(write(tmp_path, hook_c=REWARD, hook_d=REWARD))
    assert "hook_c.py and hook_d.py" in message and "keep one" in message


def test_a_name_inside_a_class_does_not_count(tmp_path: Path) -> None:
    nested = "class Mine:\n    def on_compute_relative_reward(self):\n        ...\n"
    assert "no function `on_compute_relative_reward`" in failure(write(tmp_path, nested_e=nested))


def test_a_name_bound_under_an_if_counts(tmp_path: Path) -> None:
    text = "if True:\n    on_compute_relative_reward = lambda valid, answers, question: [7]\n"
    assert load_hooks(write(tmp_path, bound_f=text, other_f="")).reward([], [], "") == [7]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(:\n", "broken.py:1: invalid syntax; fix"),
        ("\nraise ValueError('bad')\n", "broken.py:2: importing the hook raised ValueError: bad"),
        ("import sys\nsys.exit(1)\n", "broken.py:2: importing the hook raised SystemExit: 1"),
        ("import no_such_module_x\n", "install it beside fakevllm"),
        ("x = 1\n", "no function `on_compute_relative_reward`"),
        ("on_compute_relative_reward = 3\n", "is not a function"),
        ("def on_compute_relative_reward(a):\n    ...\n", "(valid_results, all_answers, question)"),
        (REWARD + "def on_user_submit_new_requests(a):\n    ...\n", "(request_id, task)"),
    ],
)
def test_a_wrong_file_is_reported_in_one_line(tmp_path: Path, text: str, expected: str) -> None:
    message = failure(write(tmp_path, broken=text) / "broken.py")
    assert expected in message
    assert "broken.py" in message


def test_the_link_that_an_editor_leaves_beside_a_hook_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, hook=REWARD)
    (tmp_path / ".#hook.py").symlink_to("ann@machine.4711")
    assert load_hooks(tmp_path).reward_arity == 3


def test_a_broken_file_in_a_folder_names_its_line(tmp_path: Path) -> None:
    assert "zzz.py:2:" in failure(write(tmp_path, hook_g=REWARD, zzz="x = 1\ndef (\n"))


def test_a_missing_path_an_empty_folder_and_a_text_file_are_refused(tmp_path: Path) -> None:
    assert "no such file or folder" in failure(tmp_path / "nowhere")
    assert "no .py file" in failure(tmp_path)
    (tmp_path / "hook.txt").write_text(REWARD)
    assert "not a .py file" in failure(tmp_path / "hook.txt")


@pytest.mark.parametrize(
    ("parameters", "arity"),
    [("v, a, q", 3), ("v, a", 2), ("*args", 3), ("v, a, question=None", 3), ("v, a, *, k=1", 2)],
)
def test_the_number_of_parameters_is_detected(tmp_path: Path, parameters: str, arity: int) -> None:
    text = f"def on_compute_relative_reward({parameters}):\n    return []\n"
    assert load_hooks(write(tmp_path, hook=text) / "hook.py").reward_arity == arity


def test_the_hash_depends_only_on_the_content_of_the_files(tmp_path: Path) -> None:
    expected_hash = hashlib.sha256(REWARD.encode()).hexdigest()[:16]
    assert load_hooks(write(tmp_path, place_a=REWARD) / "place_a.py").content_hash == expected_hash
    assert load_hooks(tmp_path).content_hash == expected_hash
    write(tmp_path, place_b="x = 1\n")
    both = hashlib.sha256((REWARD + "x = 1\n").encode()).hexdigest()[:16]
    assert load_hooks(tmp_path).content_hash == both


def test_a_hook_file_does_not_replace_a_library_of_its_name(tmp_path: Path) -> None:
    import json

    load_hooks(write(tmp_path, json=REWARD) / "json.py")
    import json as after

    assert after is json


def test_async_hooks_and_async_callables_are_recognised() -> None:
    async def coroutine() -> None: ...

    class Callable:
        async def __call__(self) -> None: ...

    assert is_async(coroutine)
    assert is_async(Callable())
    assert not is_async(len)
