"""Run `fakevllm tokens`. The command loads the tokens and their texts. Then it prints the tokens
with their texts, or writes them to an HTML file."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fakevllm.errors import UserError
from fakevllm.tokens.colours import ColourBy
from fakevllm.tokens.detokenizer import (
    TextsUnavailable,
    TokenTexts,
    texts_from_engine,
    texts_from_folder,
)
from fakevllm.tokens.html import render_html
from fakevllm.tokens.page import Page
from fakevllm.tokens.page_sources import load_from_ledger, load_from_server
from fakevllm.tokens.terminal import render_page


@dataclass(frozen=True, slots=True)
class TokensSettings:
    episode: str | None
    """Id of a group, a sibling or an episode. None selects the group that was trained last. If no
    group was trained, None selects the last group with tokens."""
    ledger: Path
    swarm: str
    """URL of the swarm server."""
    swarm_key: str | None
    model: Path | None
    """Folder with a tokenizer.json, from which the tokens' texts are read. Without a folder, the
    running engine is queried for the texts."""
    html_file: Path | None
    by: ColourBy


def run_tokens(settings: TokensSettings, console: Console) -> None:
    """Load the tokens of a group or an episode, and print them or write them to the HTML file.
    Raises UserError if the tokens cannot be loaded or the file cannot be written."""
    page = _load_page(settings)
    texts = _load_texts(settings, page)
    if settings.html_file is None:
        has_shades = console.color_system not in (None, "standard", "windows")
        console.print(render_page(page, texts, settings.by, has_shades=has_shades))
    else:
        _write_private(settings.html_file, render_html(page, texts, settings.by))
        console.print(
            f"{settings.html_file} written", highlight=False, markup=False, soft_wrap=True
        )


def _load_page(settings: TokensSettings) -> Page:
    episode = settings.episode
    page = load_from_ledger(settings.ledger, episode)
    if page is None and episode is not None:
        page = load_from_server(settings.swarm, settings.swarm_key, episode)
    if page is None:
        raise UserError(_not_found(settings))
    if not page.samples:
        raise UserError(f"{page.title} has no such sibling.")
    return page


def _not_found(settings: TokensSettings) -> str:
    """Return the error message for an unknown group or episode. The message names the places that
    were searched, and the options that help."""
    fix = "name a proxy's run directory with --run-dir, or its ledger with --ledger"
    has_ledger = settings.ledger.exists()
    if settings.episode is None:
        problem = "has no group with tokens" if has_ledger else "does not exist"
        return (
            f"The ledger {settings.ledger} {problem}: {fix}, or give the id of an active client's "
            "episode."
        )
    problem = f"has no group {settings.episode}" if has_ledger else "does not exist"
    return (
        f"The ledger {settings.ledger} {problem}, and the server {settings.swarm} does not know "
        f"{settings.episode} either: {fix}, or name another server with --swarm."
    )


def _load_texts(settings: TokensSettings, page: Page) -> TokenTexts:
    """Return a dict from the id of each token on the page to the token's text. If the texts cannot
    be loaded, return {} and add a note to the page."""
    ids = {token.id for token in page.tokens}
    try:
        if settings.model is not None:
            return texts_from_folder(settings.model, ids)
        return texts_from_engine(settings.swarm, settings.swarm_key, ids) if ids else {}
    except TextsUnavailable as error:
        page.notes.append(str(error))
        return {}


def _write_private(file: Path, text: str) -> None:
    """Write `text` to a file that only its owner can read, because `text` has users' messages."""
    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as page:
            page.write(text)
    except OSError as error:
        raise UserError(f"{file} cannot be written: {error.strerror}.") from None
