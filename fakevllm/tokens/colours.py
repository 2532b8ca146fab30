"""The background colour of a token, which shows its advantage or its log-probability. This module
does no I/O."""

from __future__ import annotations

import math
from enum import StrEnum

from fakevllm.tokens.page import Token

GOOD, BAD, SURPRISING = (46, 160, 67), (218, 54, 51), (219, 137, 16)
MIN_STRENGTH = 0.12
"""Strength of the colour for the smallest advantage. The strength is above 0, so that a trained
token can be distinguished from a token that is not in the loss."""
MAX_SURPRISE = 5.0
"""Minimum surprise (negative log-probability, in nats) that is shown with the full strength of the
colour."""

NUM_SHADES = 8
"""Number of shades of each colour on a page that cannot give each token a colour of its own."""


class ColourBy(StrEnum):
    """The number that the colour of a token shows: its advantage or its log-probability."""

    ADVANTAGE = "advantage"
    LOGPROB = "logprob"


Rgb = tuple[int, int, int]
Colour = tuple[Rgb, float]
"""A colour and its strength, from 0 to 1."""


def colour(token: Token, by: ColourBy, largest_advantage: float) -> Colour | None:
    """Return the colour for the token's advantage or log-probability, and the strength of the
    colour. Return None if there is no number to show, or if the number is an advantage of 0.

    `largest_advantage` is the absolute advantage that is shown at full strength.

    >>> colour(Token(1, True, advantage=2.0), ColourBy.ADVANTAGE, 2.0) == (GOOD, 1.0)
    True
    >>> colour(Token(1, False, logprob=-9.0), ColourBy.LOGPROB, 1.0) == (SURPRISING, 1.0)
    True
    """
    if by is ColourBy.LOGPROB:
        if token.logprob is None:
            return None
        return SURPRISING, min(max(-token.logprob / MAX_SURPRISE, 0.0), 1.0)
    if not token.advantage:
        return None
    share = min(abs(token.advantage) / largest_advantage, 1.0)
    strength = MIN_STRENGTH + (1 - MIN_STRENGTH) * share
    return (GOOD if token.advantage > 0 else BAD), strength


def shade(strength: float) -> int:
    """Return the shade for a colour's strength, from 0 (no colour) to NUM_SHADES (full strength). A
    strength above 0 gets at least the shade 1.

    >>> shade(0.0), shade(0.001), shade(0.5), shade(1.0)
    (0, 1, 4, 8)
    """
    return math.ceil(strength * NUM_SHADES)


def blend(colour: Colour, background: Rgb) -> Rgb:
    """Return the result of drawing a colour over a background, with the colour's strength as its
    opacity.

    >>> blend(((200, 100, 0), 0.5), (0, 0, 0))
    (100, 50, 0)
    """
    rgb, strength = colour
    red, green, blue = (
        round(channel * strength + other * (1 - strength))
        for channel, other in zip(rgb, background, strict=True)
    )
    return red, green, blue
