"""One game in the terminal: `python -m examples.werewolves.play --seed 3`.

`--me 4` plays player 4 yourself: you are told what it is told, and no more. `--model URL` lets a
model play the wolves and the seer, as it is trained.
"""

from __future__ import annotations

import argparse
import random
from contextlib import ExitStack

from openai import OpenAI
from rich.console import Console
from rich.table import Table

from examples.werewolves.game import FIVE, NINE, NOBODY, Act, Game, Move, Role, Turn
from examples.werewolves.players import Endpoint, Player, Scripted, take_turn
from examples.werewolves.prompts import named_in

COLOURS = {Role.WOLF: "red", Role.SEER: "cyan", Role.VILLAGER: "green"}
SECRET = (Act.KILL, Act.CHECK)
DOES = {
    Act.KILL: "wants to kill",
    Act.CHECK: "checks",
    Act.ACCUSE: "accuses",
    Act.VOTE: "votes for",
}


class Person:
    """You, at the keyboard."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def answer(self, prompt: str, turn: Turn) -> str:
        self._console.print(f"\n[bold]{prompt}[/]" + (" (0: nobody)" if 0 in turn.choices else ""))
        while named_in(said := self._console.input("> "), turn.choices) is None:
            self._console.print(f"One of {' '.join(map(str, turn.choices))}.")
        return said


class Shown:
    """Draws what happens; with `me` only what that player may see."""

    def __init__(self, console: Console, game: Game, me: int | None) -> None:
        self._console, self._game, self._me = console, game, me
        self._num_gone = 0
        self._heading = ""

    def heading(self, day: int, act: Act) -> None:
        """Before the first move of each night and day."""
        now = f"{'Night' if act in SECRET else 'Day'} {day}"
        if now != self._heading:
            self._heading = now
            self._console.rule(now, style="dim")

    def move(self, move: Move) -> None:
        if self._me is None or move.player == self._me or move.act not in SECRET:
            named = "nobody" if move.named == NOBODY else self._name(move.named)
            self._console.print(f"{self._name(move.player)} {DOES[move.act]} {named}")
        for player, act in self._game.gone[self._num_gone :]:
            how = "was killed in the night" if act is Act.KILL else "is voted off"
            self._console.print(f"[bold]{self._name(player)} {how}[/]")
        self._num_gone = len(self._game.gone)

    def end(self) -> None:
        gone = dict(self._game.gone)
        table = Table("player", "role", "end", title=f"The {self._game.winner} won")
        for player, role in self._game.roles.items():
            end = {None: "lives", Act.KILL: "killed", Act.VOTE: "voted off"}[gone.get(player)]
            table.add_row(str(player), f"[{COLOURS[role]}]{role}[/]", end)
        self._console.print(table)

    def _name(self, player: int) -> str:
        if self._me not in (None, player):
            return str(player)
        role = self._game.roles[player]
        return f"[{COLOURS[role]}]{player} ({role})[/]"


def main() -> None:
    parser = argparse.ArgumentParser(description="One game of werewolves in the terminal.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="five players instead of nine")
    parser.add_argument("--me", type=int, help="the player that you are")
    parser.add_argument("--model", help="OpenAI base URL that plays the wolves and the seer")
    parser.add_argument("--key", default="any", help="of --model")
    options = parser.parse_args()
    game = Game(options.seed, FIVE if options.small else NINE)
    if options.me not in (None, *game.roles):
        parser.error(f"--me is one of 1 to {len(game.roles)}")
    console = Console(highlight=False)
    with ExitStack() as opened:
        players: dict[int, Player] = dict.fromkeys(game.roles, Scripted(options.seed))
        if options.model:
            client = opened.enter_context(OpenAI(base_url=options.model, api_key=options.key))
            model = Endpoint(client, held=True)
            special = [one for one, role in game.roles.items() if role is not Role.VILLAGER]
            players |= dict.fromkeys(special, model)
        if options.me:
            players[options.me] = Person(console)
            console.print(f"You are player {options.me}, a {game.roles[options.me]}.")
        try:
            _play(game, players, Shown(console, game, options.me), random.Random(options.seed))
        except (EOFError, KeyboardInterrupt):
            console.print("\nYou have left the game.")


def _play(game: Game, players: dict[int, Player], shown: Shown, lots: random.Random) -> None:
    while (turn := game.turn) is not None:
        shown.heading(game.day, turn.act)
        take_turn(game, players, lots)
        shown.move(game.moves[-1])
    shown.end()


if __name__ == "__main__":
    main()
