"""Who may see the console: links, cookies, keys, hosts, origins and form tokens."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from fakevllm.config.key_file import KeyFile
from fakevllm.console.access.browser_sessions import LIFETIME_S, MAX_SESSIONS, BrowserSessions
from fakevllm.console.access.login_link import (
    LINK_LIFETIME_S,
    MAX_LINKS,
    NEW_LINK_INTERVAL_S,
    LoginLink,
)
from fakevllm.console.settings import ConsoleSettings
from fakevllm.errors import ConfigError
from fakevllm.ledger.store import Ledger
from fakevllm_adapters.protocol.keys import Role, fingerprint, named_key
from tests.proxy.console.console_rig import ABSENT_PROXY, ORIGIN, open_console
from tests.proxy.ledger.ledger_cases import group

PATHS = [
    "/",
    "/learning",
    "/learning/curve",
    "/feedback",
    "/feedback/g1",
    "/hooks",
    "/hooks/dry-run",
    "/groups",
    "/groups/g1",
    "/sessions",
    "/sessions/s1",
    "/evaluations",
    "/evaluations/e1",
    "/releases",
    "/releases/decision?version=1",
    "/configuration",
    "/events",
    "/no-such-page",
]


def key_file(folder: Path, **roles: Role) -> Path:
    file = folder / "console_keys"
    for name, role in roles.items():
        KeyFile(file).add(named_key(f"key-of-{name}", name, "2026-01-01", role=role))
    return file


def test_a_code_logs_in_once_and_only_for_ten_minutes() -> None:
    link = LoginLink()
    code = link.issue(now=0.0)
    assert not link.redeem("wrong", now=1.0)
    assert link.redeem(code, now=LINK_LIFETIME_S)
    assert not link.redeem(code, now=LINK_LIFETIME_S)
    late = link.issue(now=1000.0)
    assert not link.redeem(late, now=1001.0 + LINK_LIFETIME_S)


def test_a_visitor_gets_a_new_code_after_some_seconds_or_a_login() -> None:
    link = LoginLink()
    assert link.may_issue(now=0.0)
    code = link.issue(now=1000.0)
    assert not link.may_issue(now=1001.0)
    assert link.may_issue(now=1000.0 + NEW_LINK_INTERVAL_S)
    assert link.redeem(code, now=1002.0) and link.may_issue(now=1002.0)


def test_new_codes_do_not_end_a_code_that_its_owner_has_not_used() -> None:
    link = LoginLink()
    owners_code, now = link.issue(now=0.0), 0.0
    while now + NEW_LINK_INTERVAL_S < LINK_LIFETIME_S:
        now += NEW_LINK_INTERVAL_S
        assert link.may_issue(now)
        link.issue(now)
    assert link.redeem(owners_code, now) and not link.redeem(owners_code, now)


def test_the_lifetime_of_the_first_code_starts_again_while_it_is_prolonged() -> None:
    link = LoginLink()
    first, other = link.issue(now=0.0), link.issue(now=1.0)
    ready = 3 * LINK_LIFETIME_S
    now = 0.0
    while now < ready:
        now += NEW_LINK_INTERVAL_S
        link.prolong_first(now)
    assert not link.redeem(other, now)
    assert link.redeem(first, now + LINK_LIFETIME_S)
    link.prolong_first(now)
    assert not link.redeem(first, now)


def test_a_code_that_has_ended_is_not_prolonged() -> None:
    link = LoginLink()
    code = link.issue(now=0.0)
    link.prolong_first(LINK_LIFETIME_S + 1.0)
    assert not link.redeem(code, now=LINK_LIFETIME_S + 1.0)


def test_visitors_cannot_end_a_prolonged_code_and_get_new_codes_meanwhile() -> None:
    link = LoginLink()
    first, now = link.issue(now=0.0), 0.0
    for _ in range(2 * MAX_LINKS):
        now += NEW_LINK_INTERVAL_S
        link.prolong_first(now)
        assert link.may_issue(now)
        link.issue(now)
    assert link.redeem(first, now)


def test_the_number_of_codes_has_a_limit() -> None:
    link = LoginLink()
    codes = [link.issue(now=0.0) for _ in range(MAX_LINKS + 1)]
    assert [link.redeem(code, now=1.0) for code in codes] == [False] + [True] * MAX_LINKS


def test_without_a_link_no_code_logs_in() -> None:
    assert not LoginLink().redeem("", now=0.0)


def test_a_login_ends_after_its_time() -> None:
    sessions = BrowserSessions()
    cookie = sessions.open(now=0.0)
    assert sessions.find(cookie, now=LIFETIME_S - 1) is not None
    assert sessions.find(cookie, now=LIFETIME_S) is None
    assert sessions.find(None, now=0.0) is None


def test_the_number_of_logins_has_a_limit() -> None:
    sessions = BrowserSessions()
    cookies = [sessions.open(now=0.0) for _ in range(MAX_SESSIONS + 1)]
    assert sessions.find(cookies[0], now=1.0) is None
    assert sessions.find(cookies[1], now=1.0) is not None


def test_a_form_token_belongs_to_one_cookie_of_one_process() -> None:
    sessions, other = BrowserSessions(), BrowserSessions()
    token = sessions.form_token("a")
    assert sessions.accepts_form("a", token)
    assert not sessions.accepts_form("b", token)
    assert not sessions.accepts_form("a", "ä")
    assert not other.accepts_form("a", token)
    assert not sessions.accepts_form(None, sessions.form_token(""))


@pytest.mark.parametrize("url", PATHS)
async def test_without_a_login_every_page_is_the_login_page(
    url: str, path: Path, ledger: Ledger
) -> None:
    ledger.record(group("g1"))
    assert ledger.drain()
    async with open_console(path, is_logged_in=False) as rig:
        reply = await rig.browser.get(url)
        assert reply.status_code == 401
        assert "Log in" in reply.text and "1+1?" not in reply.text
        rig.browser.cookies.set(rig.parts.cookie_name, "guessed")
        assert (await rig.browser.get(url)).status_code == 401


async def test_the_link_works_once_and_sets_a_strict_cookie(path: Path, ledger: Ledger) -> None:
    async with open_console(path, is_logged_in=False) as rig:
        code = rig.new_code()
        reply = await rig.browser.get("/login", params={"code": code})
        cookie = reply.headers["set-cookie"]
        assert "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        assert rig.parts.cookie_name == "fakevllm_console_8001" and rig.parts.cookie_name in cookie
        assert (await rig.browser.get("/")).status_code == 200
        rig.browser.cookies.clear()
        again = await rig.browser.get("/login", params={"code": code})
        assert again.status_code == 401 and "was used before" in again.text
        assert (await rig.browser.get("/")).status_code == 401


async def test_a_visitor_without_a_login_gets_a_new_link_only_in_the_terminal(
    path: Path, ledger: Ledger
) -> None:
    async with open_console(path, is_logged_in=False) as rig:
        token = await rig.form_token("/login")
        reply = await rig.browser.post("/login/new-link", data={"form_token": token})
        assert reply.status_code == 200 and "code=" not in reply.text
        assert len(rig.links) == 1 and "A new link stands in" in reply.text
        again = await rig.browser.post("/login/new-link", data={"form_token": token})
        assert len(rig.links) == 1 and "A new link stands in" not in again.text
        assert "printed less than 10 seconds ago" in again.text


async def test_logging_out_ends_the_login(path: Path, ledger: Ledger) -> None:
    async with open_console(path) as rig:
        cookie = rig.browser.cookies[rig.parts.cookie_name]
        token = await rig.form_token("/")
        reply = await rig.browser.post("/logout", data={"form_token": token})
        assert reply.status_code == 303
        rig.browser.cookies.set(rig.parts.cookie_name, cookie)
        assert (await rig.browser.get("/")).status_code == 401


@pytest.mark.parametrize("url", ["/logout", "/login/new-link", "/login/key"])
@pytest.mark.parametrize("token", [None, "", "0" * 64])
async def test_a_form_without_its_token_is_refused(
    url: str, token: str | None, path: Path, ledger: Ledger
) -> None:
    async with open_console(path) as rig:
        data = {} if token is None else {"form_token": token}
        reply = await rig.browser.post(url, data=data)
        assert reply.status_code == 403 and "form is out of date" in reply.text
        assert len(rig.links) == 1
        assert (await rig.browser.get("/")).status_code == 200


@pytest.mark.parametrize("is_logged_in", [True, False])
async def test_a_refused_form_can_be_sent_again(
    is_logged_in: bool, path: Path, ledger: Ledger
) -> None:
    async with open_console(path, is_logged_in=is_logged_in) as rig:
        rig.clock.now += NEW_LINK_INTERVAL_S
        num_links = len(rig.links)
        reply = await rig.browser.post("/login/new-link", data={"form_token": "0"})
        assert reply.status_code == 403 and 'href="/login/new-link"' not in reply.text
        if not is_logged_in:
            token = re.search(r'name="form_token" value="(\w+)"', reply.text)
            assert token is not None
            await rig.browser.post("/login/new-link", data={"form_token": token[1]})
            assert len(rig.links) == num_links + 1


@pytest.mark.parametrize("url", ["/logout", "/login/new-link", "/login/key"])
async def test_the_address_of_a_form_leads_to_the_first_page(
    url: str, path: Path, ledger: Ledger
) -> None:
    async with open_console(path) as rig:
        reply = await rig.browser.get(url)
        assert (reply.status_code, reply.headers["location"]) == (303, "/")
        assert (await rig.browser.get("/")).status_code == 200


async def test_a_foreign_host_and_a_foreign_origin_are_refused(path: Path, ledger: Ledger) -> None:
    async with open_console(path) as rig:
        reply = await rig.browser.get("/", headers={"host": "evil.example"})
        assert reply.status_code == 403 and "--allow-host" in reply.text
        data = {"form_token": await rig.form_token("/")}
        for origin in ("http://evil.example", "null"):
            reply = await rig.browser.post("/logout", data=data, headers={"origin": origin})
            assert reply.status_code == 403
        own = await rig.browser.post("/logout", data=data, headers={"origin": ORIGIN})
        assert own.status_code == 303


async def test_an_admins_key_logs_in_and_other_keys_do_not(
    path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    keys = key_file(tmp_path, ops=Role.ADMIN, bob=Role.CLIENT)
    async with open_console(path, key_file=keys, is_logged_in=False) as rig:
        token = await rig.form_token("/groups?state=lost")

        async def send(key: str, target: str = "/groups?state=lost") -> httpx.Response:
            data = {"form_token": token, "key": key, "next": target}
            return await rig.browser.post("/login/key", data=data)

        assert (await send("wrong")).status_code == 401
        refused = await send("key-of-bob")
        assert refused.status_code == 403 and "role admin" in refused.text
        assert (await rig.browser.get("/")).status_code == 401
        reply = await send("key-of-ops")
        assert (reply.status_code, reply.headers["location"]) == (303, "/groups?state=lost")
        assert (await rig.browser.get("/")).status_code == 200


@pytest.mark.parametrize("target", ["//evil.example", "/\\evil.example", "http://evil.example", ""])
async def test_a_login_leads_only_to_pages_of_the_console(
    target: str, path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    async with open_console(
        path, key_file=key_file(tmp_path, ops=Role.ADMIN), is_logged_in=False
    ) as rig:
        token = await rig.form_token("/login")
        data = {"form_token": token, "key": "key-of-ops", "next": target}
        reply = await rig.browser.post("/login/key", data=data)
        assert reply.headers["location"] == "/"


async def test_a_login_ends_when_its_key_is_revoked(
    path: Path, ledger: Ledger, tmp_path: Path
) -> None:
    keys = key_file(tmp_path, ops=Role.ADMIN, eve=Role.ADMIN)
    async with open_console(path, key_file=keys, is_logged_in=False) as rig:
        cookie = rig.parts.sessions.open(rig.clock(), fingerprint("key-of-eve"))
        rig.browser.cookies.set(rig.parts.cookie_name, cookie)
        assert (await rig.browser.get("/")).status_code == 200
        KeyFile(keys).revoke("eve", "2026-01-02")
        await asyncio.sleep(1.1)  # a key file is read again within a second
        assert (await rig.browser.get("/")).status_code == 401


async def test_every_response_has_the_headers_that_protect_the_browser(
    path: Path, ledger: Ledger
) -> None:
    async with open_console(path) as rig:
        for url in ("/", "/login", "/static/console.css", "/groups/none", "/no-such-page"):
            headers = (await rig.browser.get(url)).headers
            policy = headers["content-security-policy"]
            assert policy.startswith("default-src 'self';") and "unsafe" not in policy
            assert headers["x-content-type-options"] == "nosniff"
        assert (await rig.browser.get("/")).headers["cache-control"] == "no-store"


def test_another_address_needs_a_key_file(tmp_path: Path) -> None:
    def settings(host: str, keys: Path | None = None) -> ConsoleSettings:
        return ConsoleSettings(tmp_path / "l", ABSENT_PROXY, host=host, key_file=keys)

    assert settings("127.0.0.1").login_keys() is None
    with pytest.raises(ConfigError, match="--key-file"):
        settings("0.0.0.0").login_keys()
    with pytest.raises(ConfigError, match="no valid key"):
        settings("0.0.0.0", tmp_path / "absent").login_keys()
    assert settings("0.0.0.0", key_file(tmp_path, ops=Role.ADMIN)).login_keys() is not None


async def test_a_form_that_is_too_large_is_refused(path: Path, ledger: Ledger) -> None:
    async with open_console(path) as rig:
        reply = await rig.browser.post("/logout", data={"form_token": "x" * 2_000_000})
        assert reply.status_code == 413
