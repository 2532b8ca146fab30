"""The login page, and the check of the login on every other page.

The routes of this module are coroutines, so logins change in one thread only. The routes do not
read the ledger.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import RedirectResponse

from fakevllm.console.access.browser_sessions import LIFETIME_S, BrowserSession, new_cookie
from fakevllm.console.access.login_link import NEW_LINK_INTERVAL_S
from fakevllm.console.access.own_path import own_path, path_of
from fakevllm.console.console_parts import ConsoleParts
from fakevllm_adapters.protocol.keys import Role, fingerprint

MAX_FIELDS = 100
"""Maximum number of fields of a form."""


class LoginRequired(Exception):
    """Raised for a request without a valid login."""


class FormRefused(Exception):
    """Raised for a form without a valid form token."""


class Login:
    """Checks logins. Routes use the methods `require` and `form` as dependencies of FastAPI."""

    def __init__(self, parts: ConsoleParts) -> None:
        self._parts = parts

    def session_of(self, cookie: str | None) -> BrowserSession | None:
        """Return the login to which a cookie belongs, or None if there is no valid login. A login
        with an API key ends when the key is revoked or is no longer an admin's."""
        session = self._parts.sessions.find(cookie, self._parts.clock())
        if session is None or session.key_fingerprint is None:
            return session
        keys = self._parts.login_keys
        entry = None if keys is None else keys.with_fingerprint(session.key_fingerprint)
        return session if entry is not None and entry.role is Role.ADMIN else None

    async def require(self, request: Request) -> None:
        """Raise LoginRequired if the request has no valid login."""
        if self.session_of(self.cookie(request)) is None:
            raise LoginRequired

    async def form(self, request: Request) -> dict[str, str]:
        """Return the fields of a form. Raises FormRefused if the form token does not belong to the
        browser's cookie."""
        body = (await request.body()).decode("utf-8", "replace")
        try:
            values = parse_qs(body, max_num_fields=MAX_FIELDS)
        except ValueError:  # translates: too many fields
            raise FormRefused from None
        fields = {name: of_name[-1] for name, of_name in values.items()}
        if not self._parts.sessions.accepts_form(
            self.cookie(request), fields.get("form_token", "")
        ):
            raise FormRefused
        return fields

    def cookie(self, request: Request) -> str | None:
        return request.cookies.get(self._parts.cookie_name)


def router(parts: ConsoleParts, login: Login) -> APIRouter:
    """Return the routes that log in and out."""
    routes = APIRouter()

    @routes.get("/login")
    async def page(request: Request, code: str = "") -> Response:
        if not code:
            return login_page(parts, login, request, next_path="/", status=200)
        if not parts.link.redeem(code, parts.clock()):
            message = "This link was used before, or is older than ten minutes."
            return login_page(parts, login, request, "/", message, status=401)
        # A page and not a redirect: browsers do not send a strict cookie after a redirect if
        # another site has the link.
        response = parts.page(request, "logged_in.html", next_path="/")
        _set_cookie(parts, response, parts.sessions.open(parts.clock()))
        return response

    @routes.post("/login/key")
    async def log_in_with_key(
        request: Request, form: dict[str, str] = Depends(login.form)
    ) -> Response:
        keys, key = parts.login_keys, form.get("key", "").strip()
        next_path = own_path(form.get("next", "/"))
        if keys is None or not keys.accepts(key):
            message = "This is not a valid key of the console's key file."
            return login_page(parts, login, request, next_path, message, status=401)
        if not keys.is_admin(key):
            message = "Only a key with the role admin may log in, because the pages show all texts."
            return login_page(parts, login, request, next_path, message, status=403)
        response = RedirectResponse(next_path, 303)
        _set_cookie(parts, response, parts.sessions.open(parts.clock(), fingerprint(key)))
        return response

    @routes.post("/login/new-link")
    async def show_new_link(
        request: Request, form: dict[str, str] = Depends(login.form)
    ) -> Response:
        next_path = own_path(form.get("next", "/"))
        if parts.link.may_issue(parts.clock()):
            parts.show_new_link()
            message = "A new link stands in the terminal or log of `fakevllm console`."
        else:
            message = (
                f"A link was printed less than {NEW_LINK_INTERVAL_S:.0f} seconds ago: open it, or "
                "request another one in some seconds."
            )
        return login_page(parts, login, request, next_path, message, status=200)

    @routes.post("/logout")
    async def log_out(request: Request, _: dict[str, str] = Depends(login.form)) -> Response:
        parts.sessions.close(login.cookie(request))
        response = RedirectResponse("/login", 303)
        response.delete_cookie(parts.cookie_name)
        return response

    return routes


def login_page(
    parts: ConsoleParts,
    login: Login,
    request: Request,
    next_path: str,
    message: str = "",
    *,
    status: int,
) -> Response:
    """Return the login page. If the browser has no cookie, the response sets one. The page's form
    token belongs to the browser's cookie."""
    cookie = login.cookie(request) or new_cookie()
    response = parts.page(
        request,
        "login.html",
        status=status,
        message=message,
        next_path=next_path,
        has_keys=parts.login_keys is not None,
        form_token=parts.sessions.form_token(cookie),
    )
    if login.cookie(request) is None:
        _set_cookie(parts, response, cookie)
    return response


def login_instead(parts: ConsoleParts, login: Login, request: Request) -> Response:
    """Return the login page in place of a page that needs a login. The login leads back to that
    page."""
    next_path = path_of(request) if request.method == "GET" else "/"
    return login_page(parts, login, request, next_path, status=401)


def handlers(
    parts: ConsoleParts, login: Login
) -> dict[type[Exception], Callable[[Request, Exception], Awaitable[Response]]]:
    """Return the exception handlers for a missing login and for a form without a valid token."""

    async def ask_for_login(request: Request, _: Exception) -> Response:
        return login_instead(parts, login, request)

    async def refuse_form(request: Request, _: Exception) -> Response:
        message = "This form is out of date: send it once more."
        if login.session_of(login.cookie(request)) is None:
            return login_page(parts, login, request, "/", message, status=403)
        # The address of a form has no page of its own, so the link leads to the first page.
        return parts.page(request, "message.html", status=403, message=message, own_path="/")

    return {LoginRequired: ask_for_login, FormRefused: refuse_form}


def _set_cookie(parts: ConsoleParts, response: Response, cookie: str) -> None:
    response.set_cookie(
        parts.cookie_name, cookie, max_age=int(LIFETIME_S), httponly=True, samesite="strict"
    )
