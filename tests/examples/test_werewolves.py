"""The werewolves example: the rules under random moves, the prompts, and the scripts."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from examples.werewolves import scripted
from examples.werewolves.game import FIVE, NINE, NOBODY, Act, Game, Role, Side, Turn
from examples.werewolves.move_tasks import game_at_hinted_turn, move_tasks
from examples.werewolves.players import (
    Scripted,
    aim,
    assign_players,
    hits_target,
    play_to_the_end,
    take_turn,
    trained_role,
    trained_side,
)
from examples.werewolves.prompts import build_prompt, parse_choice
from fakevllm import RandomReader
from tests.e2e.preloaded_python import PRELOADED_PYTHON
from tests.e2e.processes import Processes, wait_until

ROOT = Path(__file__).parents[2]
FORMS = st.sampled_from([NINE, FIVE])
SEEDS = st.integers(0, 2**32 - 1)


class Stubborn:
    """A player that always gives the same answer."""

    def __init__(self, reply: str) -> None:
        self._reply = reply

    def answer(self, prompt: str, turn: Turn) -> str:
        return self._reply


@settings(derandomize=True, deadline=None)
@given(FORMS, SEEDS, SEEDS)
def test_a_game_ends_with_any_moves_and_only_living_players_act(
    form: tuple[Role, ...], seed: int, moves: int
) -> None:
    game, rng = Game(seed, form), random.Random(moves)
    while (turn := game.turn) is not None:
        assert game.winner is None
        assert turn.player in game.living and turn.player not in turn.choices
        assert set(turn.choices) <= game.living | {NOBODY} and turn.choices
        if turn.act is Act.KILL:
            assert game.roles[turn.player] is Role.WOLF and not game.wolves & set(turn.choices)
        if turn.act is Act.CHECK:
            assert game.roles[turn.player] is Role.SEER
            assert not game.checked().keys() & set(turn.choices)
        game.play(rng.choice(turn.choices))
    assert game.day <= len(form)
    assert (game.winner is Side.VILLAGE) == (not game.wolves)
    assert len(game.living) + len(game.gone) == len(form)


@settings(derandomize=True, deadline=None)
@given(FORMS, SEEDS, SEEDS)
def test_only_seer_and_wolves_learn_roles_and_these_are_true(
    form: tuple[Role, ...], seed: int, moves: int
) -> None:
    game, rng = Game(seed, form), random.Random(moves)
    while (turn := game.turn) is not None:
        prompt, role = build_prompt(game, turn), game.roles[turn.player]
        assert ("A wolf:" in prompt) == (role is Role.SEER)
        assert ("Wolves:" in prompt) == (role is Role.WOLF)
        if role is Role.SEER:
            assert all(game.roles[one] is Role.WOLF for one in _numbers_after("A wolf", prompt))
            assert all(game.roles[one] is not Role.WOLF for one in _numbers_after("No w", prompt))
        if role is Role.WOLF:
            assert set(_numbers_after("Wolves", prompt)) == game.wolves
        game.play(rng.choice(turn.choices))


def _numbers_after(label: str, prompt: str) -> list[int]:
    match = re.search(rf"(?:{label})\w*: ([\d ]+)\.", prompt)
    return [int(number) for number in match.group(1).split()] if match else []


@settings(derandomize=True, deadline=None, max_examples=30)
@given(FORMS, SEEDS)
def test_scripted_players_make_legal_moves_and_repeat_them_for_one_seed(
    form: tuple[Role, ...], seed: int
) -> None:
    games = [Game(seed, form) for _ in range(2)]
    for game in games:
        assert play_to_the_end(game, dict.fromkeys(game.roles, Scripted(seed)), seed) == 0
    assert games[0].moves == games[1].moves


def test_the_scripted_seer_accuses_a_known_wolf_and_wolves_kill_its_accuser() -> None:
    seer = "You are 6, the seer. No wolf: 1. Accused today: nobody. Accuse: 0 1 4 5. A wolf: 4."
    wolf = "You are 2, a wolf. Wolves: 2 4. Accused today: nobody. Kill: 1 6. Accused a wolf: 6."
    for seed in range(20):
        assert scripted.answer(seer, seed) == "4"
        assert scripted.answer(wolf, seed) == "6"


def test_nobody_is_killed_in_the_first_night() -> None:
    game = Game(0)
    acts = {move.act for move in _play_until_a_death(game).moves}
    assert acts == {Act.CHECK, Act.ACCUSE, Act.VOTE}


def _play_until_a_death(game: Game) -> Game:
    while not game.gone and (turn := game.turn) is not None:
        game.play(turn.choices[-1])
    return game


def test_an_illegal_choice_is_refused() -> None:
    game = Game(0)
    turn = game.turn
    assert turn is not None
    with pytest.raises(ValueError, match="cannot be named"):
        game.play(turn.player)


@pytest.mark.parametrize(("reply", "named"), [("I say 5, or 4.", 5), ("14", None), ("", None)])
def test_the_first_legal_number_is_the_choice(reply: str, named: int | None) -> None:
    assert parse_choice(reply, (4, 5)) == named


def test_an_answer_without_a_legal_choice_becomes_a_random_move() -> None:
    game = Game(0)
    legal = take_turn(game, dict.fromkeys(game.roles, Stubborn("hm")), random.Random(0))
    assert not legal and len(game.moves) == 1


def test_only_the_roles_of_the_trained_side_are_the_trained_model() -> None:
    game, trained, static = Game(0), Stubborn("1"), Stubborn("2")
    for side, role in ((Side.WOLVES, Role.WOLF), (Side.VILLAGE, Role.SEER)):
        players = assign_players(game, side, trained, static)
        assert {one for one, player in players.items() if player is trained} == {
            one for one, own in game.roles.items() if own is role
        }


def test_the_aim_is_the_share_of_moves_that_named_the_sides_target() -> None:
    game = Game(0)
    seer = next(one for one, role in game.roles.items() if role is Role.SEER)
    while game.day == 1 and (turn := game.turn) is not None:
        wolf = min(game.wolves) if turn.player == seer else turn.choices[-1]
        game.play(wolf if turn.act is not Act.ACCUSE else NOBODY)
    assert aim(game, Side.VILLAGE) == 0.5  # one accusation of nobody, one vote for a wolf


class Hinted:
    """A player that names the last number of the prompt if it is legal, as a model could learn to.

    Otherwise, or with `follows_hint` False, its move is random.
    """

    def __init__(self, seed: int, follows_hint: bool) -> None:
        self._rng, self._follows_hint = random.Random(f"hinted {seed}"), follows_hint

    def answer(self, prompt: str, turn: Turn) -> str:
        hint = re.search(r"(?:A wolf|Accused a wolf): (?:\d+ )*(\d+)\.$", prompt)
        if self._follows_hint and hint and int(hint[1]) in turn.choices:
            return hint[1]
        return str(self._rng.choice(turn.choices))


def test_following_the_hint_wins_more_games_than_random_moves() -> None:
    won: dict[bool, float] = {}
    for follows_hint in (False, True):
        results: list[tuple[float, float]] = []
        for task in RandomReader(600, seed=1):
            seed: int = task.metadata["seed"]
            game, side = Game(seed, FIVE), trained_side(seed)
            players = assign_players(game, side, Hinted(seed, follows_hint), Scripted(seed))
            play_to_the_end(game, players, seed)
            results.append((float(game.winner is side), aim(game, side)))
        won[follows_hint], mean_aim = map(fmean, zip(*results, strict=True))
        label = "hint" if follows_hint else "random"
        print(f"{label}: won {won[follows_hint]:.2f}, aim {mean_aim:.2f}")
    assert won[True] - won[False] > 0.08


@settings(derandomize=True, deadline=None)
@given(FORMS, SEEDS)
def test_a_move_task_is_a_turn_of_the_trained_side_whose_prompt_hints_at_a_legal_choice(
    form: tuple[Role, ...], seed: int
) -> None:
    game = game_at_hinted_turn(seed, form)
    if game is None:
        return
    turn = game.turn
    assert turn is not None and turn.act is not Act.CHECK
    assert game.roles[turn.player] is trained_role(trained_side(seed))
    hinted = _numbers_after("A wolf|Accused a wolf", build_prompt(game, turn))
    assert set(hinted) & set(turn.choices)


def test_the_repeats_of_a_move_task_have_the_same_prompt_and_every_task_has_one() -> None:
    for task in move_tasks(20, seed=1, roles=FIVE):
        games = [game_at_hinted_turn(task.metadata["seed"], FIVE) for _ in range(2)]
        prompts = {build_prompt(game, game.turn) for game in games if game and game.turn}
        assert len(prompts) == 1


def test_steps_have_different_move_tasks() -> None:
    ids = [task.task_id for step in (1, 2) for task in move_tasks(8, seed=step, roles=FIVE)]
    assert len(set(ids)) == 16


def test_the_hint_names_the_target_more_often_than_a_random_move() -> None:
    hits: list[bool] = []
    for task in move_tasks(300, seed=1, roles=FIVE):
        game = game_at_hinted_turn(task.metadata["seed"], FIVE)
        assert game is not None and game.turn is not None
        take_turn(game, dict.fromkeys(game.roles, Hinted(0, True)), random.Random(0))
        hits.append(hits_target(game, game.moves[-1]))
    print(f"the hint names the target in {fmean(hits):.2f} of {len(hits)} moves")
    assert fmean(hits) > 0.65


def test_the_endpoint_of_the_scripted_players_gives_their_answers() -> None:
    prompt = "You are 3, a villager. Accused today: 4 by 6. Vote: 1 2 4."
    body = {"model": "any", "seed": 1, "messages": [{"role": "user", "content": prompt}]}
    with TestClient(scripted.app) as http:
        answer = http.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == scripted.answer(prompt, 1) == "4"


def test_the_training_script_is_short() -> None:
    assert len((ROOT / "examples/werewolves/train.py").read_text().splitlines()) < 130


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    with Processes(tmp_path) as started:
        yield started


@pytest.mark.parametrize("reward", ["move", "aim", "won"])
def test_the_training_script_plays_games_and_each_batch_is_a_step(
    processes: Processes, reward: str
) -> None:
    server = processes.server("--backend", "fake")
    command = ["-m", "examples.werewolves.train", "--swarm-url", server.url]
    command += ["--small", "--free", "--steps", "2", "--batch-size", "2", "--num-repeat", "2"]
    command += ["--reward", reward, "--games", "2"]
    done = PRELOADED_PYTHON.run(command, ROOT)
    assert done.returncode == 0, done.stderr
    labels = [line.split(":")[0] for line in done.stdout.splitlines()]
    assert labels == ["before", "step 1", "step 2", "after"]

    def steps() -> list[dict[str, Any]]:
        entries = httpx.get(f"{server.url}/get_run_log").json()["entries"]
        return [entry for entry in entries if entry["kind"] == "step"]

    wait_until(lambda: len(steps()) == 2, 20)
    for step in steps():
        assert step["metrics"]["train_illegal"] > 0, "the fake engine names no player"
        assert 0 <= step["metrics"]["reward_mean"] <= 1
    if reward == "move":
        means = [step["metrics"]["reward_mean"] for step in steps()]
        assert means == [0, 0], "an answer that names no player was rewarded"


def test_a_game_can_be_watched_and_the_readme_names_existing_commands() -> None:
    watch = [sys.executable, "-m", "examples.werewolves.play", "--seed", "3"]
    done = subprocess.run(watch, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert re.search(r"The (wolves|village) won", done.stdout)
    readme = (ROOT / "examples/werewolves/README.md").read_text()
    modules = set(re.findall(r"python -m (examples\.\S+)", readme))
    assert modules == {f"examples.werewolves.{name}" for name in ("play", "scripted", "train")}
    for name in re.findall(r"`(\w+\.py)`", readme):
        assert (ROOT / "examples/werewolves" / name).is_file()
