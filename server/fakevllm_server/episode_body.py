"""What the job adds to a call of an active client's episode. Pure."""

from __future__ import annotations

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.vllm_compat.context import bounded

_UNTOLD = TrainJob().temperature


def with_job(body: Json, job: TrainJob) -> Json:
    """The same object where the job adds nothing. What a client asks for counts, but for the
    length; a job of temperature 1 leaves it to the engine's own default.

    >>> with_job({"prompt": "Hi"}, TrainJob(temperature=0.9))
    {'prompt': 'Hi', 'temperature': 0.9}
    """
    most = job.max_response_length_in_one_turn
    body = body if most is None else bounded(body, most)
    if job.temperature == _UNTOLD or body.get("temperature") is not None:
        return body
    return {**body, "temperature": job.temperature}
