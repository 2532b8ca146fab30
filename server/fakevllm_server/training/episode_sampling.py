"""Add the job's sampling settings to the model calls of an episode. The module does no I/O."""

from __future__ import annotations

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.vllm_compat.token_limits import cap_new_tokens

_DEFAULT_TEMPERATURE = TrainJob().temperature


def with_job_sampling(body: Json, job: TrainJob) -> Json:
    """Return the request body with the job's temperature and token limit.

    A temperature in the body takes precedence. If the body has a higher token limit than the job's
    `max_response_length_in_one_turn`, the limit is lowered to this value. If the job has the
    default temperature of 1, no temperature is added, and the engine's own default applies. If
    nothing has to be added, `body` itself is returned.

    >>> with_job_sampling({"prompt": "Hi"}, TrainJob(temperature=0.9))
    {'prompt': 'Hi', 'temperature': 0.9}
    """
    limit = job.max_response_length_in_one_turn
    body = body if limit is None else cap_new_tokens(body, limit)
    if job.temperature == _DEFAULT_TEMPERATURE or body.get("temperature") is not None:
        return body
    return {**body, "temperature": job.temperature}
