"""Puts the page together: what is found, with its texts, drawn or written."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fakevllm.errors import UserError
from fakevllm.tokens import found, html, terminal, texts
from fakevllm.tokens.colours import By
from fakevllm.tokens.page import Page
from fakevllm.tokens.texts import NoTexts, Texts


@dataclass(frozen=True, slots=True)
class TokensSettings:
    episode: str | None
    """None: the newest group that was trained, or else has tokens."""
    ledger: Path
    swarm: str
    swarm_key: str | None
    model: Path | None
    """Whose tokenizer.json is read; else the engine is asked."""
    html_file: Path | None
    by: By


def run_tokens(settings: TokensSettings, console: Console) -> None:
    """Raises UserError."""
    page = _found(settings)
    known = _texts(settings, page)
    if settings.html_file is None:
        has_shades = console.color_system not in (None, "standard", "windows")
        console.print(terminal.drawn(page, known, settings.by, has_shades=has_shades))
    else:
        _write(settings.html_file, html.written(page, known, settings.by))
        console.print(f"{settings.html_file} written", highlight=False, soft_wrap=True)


def _found(settings: TokensSettings) -> Page:
    episode = settings.episode
    page = found.in_ledger(settings.ledger, episode)
    if page is None and episode is not None:
        page = found.at_server(settings.swarm, settings.swarm_key, episode)
    if page is None:
        raise UserError(_nothing(settings))
    if not page.answers:
        raise UserError(f"{page.title} has no such sibling.")
    return page


def _nothing(settings: TokensSettings) -> str:
    """What was looked into, and what to name."""
    mend = "name a proxy's run with --run-dir, or its ledger with --ledger"
    if settings.episode is None:
        has = "has no group with tokens" if settings.ledger.exists() else "does not exist"
        return f"The ledger {settings.ledger} {has}: {mend}; or an active client's episode."
    lacks = f"has nothing of {settings.episode}" if settings.ledger.exists() else "does not exist"
    return (
        f"The ledger {settings.ledger} {lacks}, and the server {settings.swarm} knows no "
        f"{settings.episode} either: {mend}, or another server with --swarm."
    )


def _texts(settings: TokensSettings, page: Page) -> Texts:
    ids = {token.id for token in page.tokens}
    try:
        if settings.model is not None:
            return texts.of_folder(settings.model, ids)
        return texts.of_engine(settings.swarm, settings.swarm_key, ids) if ids else {}
    except NoTexts as error:
        page.notes.append(str(error))
        return {}


def _write(file: Path, text: str) -> None:
    """Readable by its owner alone: it holds what users wrote."""
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as page:
            page.write(text)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}.") from None
