"""Add the job's sampling settings to a call of an active client's episode. Pure."""

from __future__ import annotations

from fakevllm_adapters.formats.base import Json
from fakevllm_adapters.job.model import TrainJob
from fakevllm_adapters.vllm_compat.token_limits import cap_new_tokens

_DEFAULT_TEMPERATURE = TrainJob().temperature


def with_job_sampling(body: Json, job: TrainJob) -> Json:
    """Return the body with the job's temperature and limit of the answer's length.

    The client's own temperature wins; its length is capped by the job's. A job with the default
    temperature of 1 leaves the temperature to the engine's own default. If the job adds nothing,
    the same object is returned.

    >>> with_job_sampling({"prompt": "Hi"}, TrainJob(temperature=0.9))
    {'prompt': 'Hi', 'temperature': 0.9}
    """
    most = job.max_response_length_in_one_turn
    body = body if most is None else cap_new_tokens(body, most)
    if job.temperature == _DEFAULT_TEMPERATURE or body.get("temperature") is not None:
        return body
    return {**body, "temperature": job.temperature}
