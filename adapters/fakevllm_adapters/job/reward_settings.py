"""Checks of the settings that turn rewards into advantages."""

from __future__ import annotations

from fakevllm_adapters.job.model import TrainJob

DISCOUNTS = frozenset({"reinforce_plus_plus"})
"""Algorithms that use the discount factor gamma."""


def reward_setting_uses(job: TrainJob) -> dict[str, tuple[bool, str]]:
    """Return, for each setting about rewards, whether the setting has an effect in this job.

    The result is a dict from the setting's name to a pair. The first item is True if the setting
    has an effect. The second item is a text for an error message. The text names the other setting
    that is needed.

    Raises ValueError with a one-line message for settings that contradict each other.
    """
    _check_overlong(job)
    is_shaped = (job.overlong_buffer_len is not None, "it is for overlong_buffer_len")
    return {
        "gamma": (
            job.algorithm in DISCOUNTS,
            f"it is for algorithm = {' or '.join(sorted(DISCOUNTS))}",
        ),
        "kl_coef": (job.use_kl_in_reward, "it is for use_kl_in_reward"),
        "max_response_length": (is_shaped[0] or job.max_model_len is not None, is_shaped[1]),
        "overlong_penalty_factor": is_shaped,
        "max_num_gen_batches": (
            job.filter_groups == "collect",
            "it is for filter_groups = collect",
        ),
    }


def _check_overlong(job: TrainJob) -> None:
    if job.overlong_buffer_len is None:
        return
    longest = job.max_answer_length
    if longest is None:
        raise ValueError(
            "overlong_buffer_len is counted back from the longest answer: set "
            "max_response_length too, in tokens"
        )
    if job.overlong_buffer_len > longest:
        of_turn = "" if job.max_response_length_in_one_turn is None else "_in_one_turn"
        raise ValueError(f"overlong_buffer_len must not be above max_response_length{of_turn}")
