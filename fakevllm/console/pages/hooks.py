"""The page Hooks: the hook files on disk, whether the proxy uses them, a dry run, and the reload.

No route accepts code or the name of a file. The files are those that the console was started with.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import RedirectResponse

from fakevllm.console.access.login import Login
from fakevllm.console.console_parts import ConsoleParts
from fakevllm.console.hook_dry_run import HookDryRuns
from fakevllm.console.page_renderer import time_text
from fakevllm.console.sources.proxy_status import ProxyView
from fakevllm.errors import ConfigError, HookError
from fakevllm.hooks.loader import HookFiles
from fakevllm.runtime.admin_client import reload_hooks

MAX_FILES = 40
MAX_CODE_CHARS = 100_000
"""Maximum number of characters of a file on the page."""
_CLEAN_STATES = ("taken_over", "unchanged")


@dataclass(frozen=True, slots=True)
class HookCode:
    """The hook files on disk."""

    path: str = ""
    digest: str = ""
    """Digest of the files. Empty if they cannot be read."""
    files: Sequence[tuple[str, str]] = ()
    """Name and text of each file."""
    num_hidden: int = 0
    """Number of files that are not shown."""
    problem: str = ""
    """Why the files cannot be read, or an empty text."""


@dataclass(frozen=True, slots=True)
class ReloadResult:
    """The result of a request to reload the hooks."""

    message: str
    changes: Sequence[str] = ()
    is_clean: bool = False
    """Whether the files on disk are now the hooks of the proxy."""


def router(parts: ConsoleParts) -> APIRouter:
    """Return the routes of the page Hooks."""
    routes = APIRouter()
    login = Login(parts)
    dry_runs = HookDryRuns(parts.settings.hooks, parts.ledger)
    reload_lock = threading.Lock()

    def page(
        request: Request, result: ReloadResult | None = None, shown: str = "", status: int = 200
    ) -> Response:
        code = read_code(parts)
        view = parts.proxy.view()
        return parts.page(
            request,
            "hooks.html",
            status=status,
            code=code,
            proxy=view,
            in_use=in_use_sentence(view, code),
            is_same=bool(code.digest) and view.hooks.get("digest") == code.digest,
            is_outdated=bool(shown) and shown != code.digest,
            result=result,
            last_reload=view.hooks.get("last_reload"),
            has_dry_run=dry_runs.last is not None,
        )

    @routes.get("/hooks")
    def hooks(request: Request, shown: str = "") -> Response:
        return page(request, shown=shown)

    @routes.post("/hooks/reload")
    def reload(request: Request, form: dict[str, str] = Depends(login.form)) -> Response:
        if form.get("confirmed") != "yes":
            message = "Nothing was reloaded: tick the box that confirms it."
            return page(request, ReloadResult(message), status=400)
        if form.get("digest", "") != read_code(parts).digest:
            message = (
                "Nothing was reloaded, because the files on disk have changed since the page was "
                "loaded: look at the files below, and reload them then."
            )
            return page(request, ReloadResult(message), status=409)
        if not reload_lock.acquire(blocking=False):
            message = "A reload is running already: load this page again in a moment."
            return page(request, ReloadResult(message), status=409)
        try:
            result = _reload(parts)
        finally:
            reload_lock.release()
        parts.proxy.forget()
        return page(request, result, status=200 if result.is_clean else 409)

    @routes.get("/hooks/dry-run")
    def dry_run(request: Request) -> Response:
        return parts.page(
            request, "hook_dry_run.html", run=dry_runs.last, has_hooks=parts.settings.hooks
        )

    @routes.post("/hooks/dry-run")
    async def start_dry_run(_: dict[str, str] = Depends(login.form)) -> Response:
        dry_runs.start()
        return RedirectResponse("/hooks/dry-run", 303)

    return routes


def read_code(parts: ConsoleParts) -> HookCode:
    """Return the hook files on disk. The files are read, and not run."""
    settings = parts.settings.hooks
    if settings is None:
        return HookCode(
            problem="The console does not know where the hooks are: start it with --hooks FOLDER, "
            "or set hooks.path in fakevllm.toml."
        )
    try:
        files = HookFiles.read(settings.hooks)
    except HookError as error:  # translates: the page shows the sentence
        return HookCode(str(settings.hooks), problem=f"The hook files cannot be read: {error}.")
    texts = [(file.name, _shown_text(text)) for file, text in files.texts.items()]
    num_hidden = max(0, len(texts) - MAX_FILES)
    return HookCode(str(files.path), files.content_hash, texts[:MAX_FILES], num_hidden)


def _shown_text(code: bytes) -> str:
    text = code.decode("utf-8", "replace")
    if len(text) <= MAX_CODE_CHARS:
        return text
    return f"{text[:MAX_CODE_CHARS]}\n… ({len(text) - MAX_CODE_CHARS:,} more characters)"


def in_use_sentence(view: ProxyView, code: HookCode) -> str:
    """Return a sentence that says whether the proxy uses the hook files on disk.

    >>> in_use_sentence(ProxyView("http://127.0.0.1:8000"), HookCode())
    'The proxy does not answer, so it is not known which hooks it uses.'
    """
    if not view.is_reached:
        return "The proxy does not answer, so it is not known which hooks it uses."
    digest = view.hooks.get("digest")
    if digest is None:
        return "The proxy runs without hooks: start it with `fakevllm serve --hooks FOLDER`."
    since = time_text(view.hooks.get("since"))
    if digest == code.digest:
        return f"The proxy uses these files: their digest is {digest}, in use since {since}."
    if not code.digest:
        return f"The proxy uses hooks with the digest {digest} since {since}."
    return (
        f"The files on disk differ from the hooks that the proxy uses: their digest is "
        f"{code.digest}, and the proxy uses {digest} since {since}. The proxy keeps the code that "
        "it uses in memory, so only the files on disk are shown."
    )


def _reload(parts: ConsoleParts) -> ReloadResult:
    try:
        reply = reload_hooks(parts.settings.proxy_url, parts.settings.proxy_key)
    except ConfigError as error:  # translates: the page shows the sentence
        return ReloadResult(str(error))
    changes = [str(line) for line in reply.get("changes") or ()]
    return ReloadResult(str(reply.get("message")), changes, reply.get("state") in _CLEAN_STATES)
