"""What colour a token has. Pure."""

from __future__ import annotations

from enum import StrEnum

from fakevllm.tokens.page import Token

GOOD, BAD, SURPRISING = (46, 160, 67), (218, 54, 51), (219, 137, 16)
LEAST = 0.12
"""Of a colour's strength, so that a token in the loss can be told from one that is not."""
SURPRISE_AT = 5.0
"""Nats at which a token is as surprising as can be shown."""


class By(StrEnum):
    ADVANTAGE = "advantage"
    LOGPROB = "logprob"


Rgb = tuple[int, int, int]
Colour = tuple[Rgb, float]
"""With its strength, from 0 to 1."""


def colour(token: Token, by: By, largest_advantage: float) -> Colour | None:
    """None where there is nothing to tell.

    >>> colour(Token(1, True, advantage=2.0), By.ADVANTAGE, 2.0) == (GOOD, 1.0)
    True
    >>> colour(Token(1, False, logprob=-9.0), By.LOGPROB, 1.0) == (SURPRISING, 1.0)
    True
    """
    if by is By.LOGPROB:
        if token.logprob is None:
            return None
        return SURPRISING, min(max(-token.logprob / SURPRISE_AT, 0.0), 1.0)
    if not token.advantage:
        return None
    strength = LEAST + (1 - LEAST) * min(abs(token.advantage) / largest_advantage, 1.0)
    return (GOOD if token.advantage > 0 else BAD), strength


def mixed(colour: Colour, with_: Rgb) -> Rgb:
    """On a ground of that colour.

    >>> mixed(((200, 100, 0), 0.5), (0, 0, 0))
    (100, 50, 0)
    """
    rgb, strength = colour
    red, green, blue = (
        round(own * strength + other * (1 - strength))
        for own, other in zip(rgb, with_, strict=True)
    )
    return red, green, blue
