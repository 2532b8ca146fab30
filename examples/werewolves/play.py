"""Show one game in the terminal: `python -m examples.werewolves.play --seed 3`.

With `--me 4` you are player 4, and see only the information that player 4 has. With `--model URL`
a model plays the wolves and the seer.
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
from examples.werewolves.prompts import parse_choice

COLOURS = {Role.WOLF: "red", Role.SEER: "cyan", Role.VILLAGER: "green"}
SECRET = (Act.KILL, Act.CHECK)
VERBS = {
    Act.KILL: "wants to kill",
    Act.CHECK: "checks",
    Act.ACCUSE: "accuses",
    Act.VOTE: "votes for",
}


class Person:
    """A player who types at the keyboard."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def answer(self, prompt: str, turn: Turn) -> str:
        self._console.print(f"\n[bold]{prompt}[/]" + (" (0: nobody)" if 0 in turn.choices else ""))
        while parse_choice(line := self._console.input("> "), turn.choices) is None:
            self._console.print(f"Enter one of {' '.join(map(str, turn.choices))}.")
        return line


class GameView:
    """A view of the game in the terminal. With `me`, the view shows only the information that
    player `me` may see."""

    def __init__(self, console: Console, game: Game, me: int | None) -> None:
        self._console, self._game, self._me = console, game, me
        self._num_gone = 0
        self._heading = ""

    def heading(self, day: int, act: Act) -> None:
        """Print a heading before the first move of each night and day."""
        heading = f"{'Night' if act in SECRET else 'Day'} {day}"
        if heading != self._heading:
            self._heading = heading
            self._console.rule(heading, style="dim")

    def move(self, move: Move) -> None:
        """Print a move, and the players that it removed from the game."""
        if self._me is None or move.player == self._me or move.act not in SECRET:
            named = "nobody" if move.named == NOBODY else self._name(move.named)
            self._console.print(f"{self._name(move.player)} {VERBS[move.act]} {named}")
        for player, act in self._game.gone[self._num_gone :]:
            fate = "was killed in the night" if act is Act.KILL else "is voted off"
            self._console.print(f"[bold]{self._name(player)} {fate}[/]")
        self._num_gone = len(self._game.gone)

    def end(self) -> None:
        """Print the winner, and all players with their roles."""
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
    parser = argparse.ArgumentParser(
        description="Show or play one game of werewolves in the terminal."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="five players instead of nine")
    parser.add_argument("--me", type=int, help="number of the player that you play")
    parser.add_argument(
        "--model", help="OpenAI base URL of a model that plays the wolves and the seer"
    )
    parser.add_argument("--key", default="any", help="API key for --model")
    options = parser.parse_args()
    game = Game(options.seed, FIVE if options.small else NINE)
    if options.me not in (None, *game.roles):
        parser.error(f"--me must be between 1 and {len(game.roles)}")
    console = Console(highlight=False)
    with ExitStack() as stack:
        players: dict[int, Player] = dict.fromkeys(game.roles, Scripted(options.seed))
        if options.model:
            client = stack.enter_context(OpenAI(base_url=options.model, api_key=options.key))
            model = Endpoint(client, constrained=True)
            trained = [number for number, role in game.roles.items() if role is not Role.VILLAGER]
            players |= dict.fromkeys(trained, model)
        if options.me:
            players[options.me] = Person(console)
            console.print(f"You are player {options.me}, a {game.roles[options.me]}.")
        try:
            view = GameView(console, game, options.me)
            _play(game, players, view, random.Random(options.seed))
        except (EOFError, KeyboardInterrupt):
            console.print("\nYou have left the game.")


def _play(game: Game, players: dict[int, Player], view: GameView, rng: random.Random) -> None:
    while (turn := game.turn) is not None:
        view.heading(game.day, turn.act)
        take_turn(game, players, rng)
        view.move(game.moves[-1])
    view.end()


if __name__ == "__main__":
    main()
