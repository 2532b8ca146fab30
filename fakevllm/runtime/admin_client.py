"""HTTP client for the admin routes of a running proxy, such as pause, resume and the reload of
hooks."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from http.client import HTTPException
from typing import Any

from fakevllm.config.http_address import checked_http_url
from fakevllm.config.reload_limit import MAX_TRIAL_S
from fakevllm.errors import ConfigError
from fakevllm.runtime.error_cause import error_cause
from fakevllm_adapters.protocol.keys import bearer_header

Json = dict[str, Any]

TIMEOUT_S = 10.0
RELOAD_TIMEOUT_S = MAX_TRIAL_S + 60.0
"""Timeout of a reload of the hooks, in seconds. The proxy's own limit, `hooks.reload.max_s`, is not
larger than MAX_TRIAL_S."""
_SHOWN_PARAMS = frozenset({"run", "id", "any_key"})
_SHOWN_STATUS = frozenset({400, 409, 503})
"""Errors whose message is shown to the user: those about one of these parameters, and those with
one of these status codes. Other errors may be those of another program than a proxy."""
FAN_OUT_PAUSED = "paused: each request is served once, none is fanned out"
FAN_OUT_ON = "on: requests are fanned out"
FAN_OUT_NO_HOOKS = "off: without hooks each request is served once (fakevllm serve --hooks FOLDER)"


def set_paused(url: str, key: str | None, *, paused: bool) -> str:
    """Pause or resume the fan-out in a running proxy, and return a line for the user. Fan-out means
    that the proxy samples several answers (siblings) for a request. While the fan-out is paused,
    the proxy samples only one answer for each request. Raises ConfigError if the proxy does not
    answer or refuses the request."""
    reply = fetch_json(url, "/fakevllm/pause" if paused else "/fakevllm/resume", key, method="POST")
    state = FAN_OUT_PAUSED if paused else FAN_OUT_ON
    if reply.get("trouble"):
        return f"{state}; the state will not survive a restart of the proxy: {reply['trouble']}"
    return f"{state}; this survives a restart of the proxy" if paused else state


def reload_hooks(url: str, key: str | None) -> Json:
    """Ask a running proxy to load its edited hook files, and to try the new hooks on logged
    requests. The new hooks replace the old ones if the proxy's limits (`[hooks.reload]`) allow it.
    Return the proxy's reply. Raises ConfigError if the proxy does not answer or refuses the
    request."""
    path = "/fakevllm/hooks/reload"
    return fetch_json(url, path, key, method="POST", timeout_s=RELOAD_TIMEOUT_S)


def send_feedback(url: str, key: str | None, body: Json) -> Json:
    """Send feedback about an answer to a running proxy, and return the proxy's reply. Raises
    ConfigError if the proxy does not answer or refuses the feedback."""
    return fetch_json(url, "/v1/feedback", key, method="POST", body=body)


def fetch_json(
    url: str,
    path: str,
    key: str | None,
    *,
    method: str = "GET",
    body: Json | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Json:
    """Send a request for `path` to the proxy at `url`, and return the JSON object of its reply.
    Raises ConfigError if the proxy does not answer or refuses the request."""
    try:
        root = checked_http_url(proxy_root(url))
    except ValueError as error:
        raise ConfigError(f"--url {url}: {error}.") from None
    data = None if body is None else json.dumps(body).encode()
    headers = bearer_header(key) | ({} if data is None else {"Content-Type": "application/json"})
    request = urllib.request.Request(root + path, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            raise ConfigError(_error_text(url, error)) from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "reason", error)
        raise ConfigError(no_proxy(url, cause)) from None
    except (HTTPException, RecursionError) as error:  # no HTTP, a broken-off or a strange reply
        raise ConfigError(no_proxy(url, f"broken reply, {type(error).__name__}")) from None


def proxy_root(url: str) -> str:
    """Return the proxy's URL without `/v1` at the end. The `/v1` is part of the base URL that apps
    use."""
    return url.rstrip("/").removesuffix("/v1")


def no_proxy(url: str, cause: object) -> str:
    """Return the error text for a URL at which no proxy answers. `cause` is the reason, such as a
    refused connection."""
    return (
        f"No fakevllm proxy answers at {url} ({error_cause(cause)}): start it with `fakevllm up` "
        "or `fakevllm serve`, or set --url."
    )


def not_a_proxy(url: str, status: int) -> str:
    """Return the error text for a URL at which a program other than a fakevllm proxy answers."""
    return f"{url} answers with status {status}, as no fakevllm proxy does: set --url."


def _error_text(url: str, error: urllib.error.HTTPError) -> str:
    if error.code == 401:
        return "The proxy needs an API key: pass a key from its key file with --key."
    try:
        reply: Json = json.load(error)
        if error.code == 403 and "detail" in reply:
            return str(reply["detail"])
        details: Json = reply["error"]
        if details["param"] in _SHOWN_PARAMS or error.code in _SHOWN_STATUS:
            return str(details["message"])
    except (OSError, HTTPException, RecursionError, ValueError, LookupError, TypeError):
        pass  # isolates: the status code is known, so the reply's text only helps
    return not_a_proxy(url, error.code)
