"""Send one row of a dataset to a model. The row is sent either as a request to the OpenAI endpoint,
or by an app that is started for this row."""

from __future__ import annotations

import asyncio
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from fakevllm.admission.row_requests import request_of
from fakevllm.errors import ConfigError
from fakevllm_adapters.protocol.swarm import Task

if TYPE_CHECKING:
    import openai

APP_TIMEOUT_S = 3600.0
QUESTION = "{question}"


class RowFailed(Exception):
    """Raised if a dataset row got no answer and must not be retried. The message gives the
    reason."""


class RowInterrupted(Exception):
    """Raised if a dataset row got no answer. The connection broke, or the server was overloaded or
    unavailable. The row may be retried."""


class Player(Protocol):
    """An object that sends one row of a dataset to a model and returns the answer."""

    async def play(self, task: Task, key: str) -> str:
        """Send the dataset row `task` with the API key `key`, and return the text of the answer.
        Raises RowInterrupted if the row may be retried after the error. Raises RowFailed if the row
        must not be retried."""
        ...


@dataclass(frozen=True, slots=True)
class EndpointPlayer:
    """A Player that sends the dataset row to /v1/chat/completions. If the row has no field
    `messages`, the row's question is the only message of the request."""

    url: str
    model: str
    http: openai.DefaultAioHttpClient | None = None
    max_tokens: int | None = None

    async def play(self, task: Task, key: str) -> str:
        import openai  # here, because a replay through an app does not need it

        client = openai.AsyncOpenAI(
            base_url=self.url, api_key=key, max_retries=0, http_client=self.http
        )
        body = request_of(task)
        messages = body.pop("messages")
        if self.max_tokens is not None:
            body.pop("max_completion_tokens", None)
            body["max_tokens"] = self.max_tokens
        try:
            answer = await client.chat.completions.create(
                model=self.model, messages=messages, extra_body=body
            )
        except openai.APIConnectionError as error:
            raise RowInterrupted(str(error.__cause__ or error)) from error
        except openai.APIStatusError as error:
            if error.status_code in (429, 502, 503, 504):
                raise RowInterrupted(error.message) from error
            raise RowFailed(error.message) from error
        return answer.choices[0].message.content or ""


@dataclass(frozen=True, slots=True)
class AppPlayer:
    """A Player that runs the command of an app for each dataset row.

    The row's question replaces `{question}` in the arguments of the command. If no argument
    contains `{question}`, the question is written to the command's standard input.
    """

    command: Sequence[str]
    url: str

    @staticmethod
    def from_command(command: str, url: str) -> AppPlayer:
        parts = shlex.split(command)
        if not parts:
            raise ConfigError("--app is empty: give the command that runs your app.")
        return AppPlayer(parts, url)

    async def play(self, task: Task, key: str) -> str:
        question = task.main_query
        in_arguments = any(QUESTION in part for part in self.command)
        arguments = [part.replace(QUESTION, question) for part in self.command]
        try:
            process = await asyncio.create_subprocess_exec(
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=os.environ | {"OPENAI_BASE_URL": self.url, "OPENAI_API_KEY": key},
            )
        except OSError as error:
            raise ConfigError(f"--app: {arguments[0]!r} cannot be run: {error.strerror}.") from None
        return await _finish(process, b"" if in_arguments else question.encode())


async def _finish(process: asyncio.subprocess.Process, stdin: bytes) -> str:
    try:
        async with asyncio.timeout(APP_TIMEOUT_S):
            out, err = await process.communicate(stdin)
    except TimeoutError:
        raise RowFailed(f"the app did not end within {APP_TIMEOUT_S:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        last_line = err.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise RowFailed(f"the app exited with {process.returncode}: {last_line[0]}")
    return out.decode(errors="replace")
