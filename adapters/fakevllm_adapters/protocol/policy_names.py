"""The model names of policies. A policy consists of the weights of one version. The engine holds
these weights beside the served weights.

An evaluation samples a policy by its model name. An app must not use such a name. Otherwise the
answers of an old version would be trained as if the served weights had sampled them.
"""

from __future__ import annotations

import re

_POLICY = re.compile(r"policy-(0|[1-9][0-9]*)", re.ASCII)


def policy_name(version: int) -> str:
    """Return the model name of the policy with the weights of this version.

    >>> policy_name(15)
    'policy-15'
    """
    return f"policy-{version}"


def is_policy_name(name: str) -> bool:
    """Return True if the name has the form of a policy's name. The served model may have such a
    name too.

    >>> [is_policy_name(name) for name in ("policy-15", "policy-015", "my-policy-1")]
    [True, False, False]
    """
    return _POLICY.fullmatch(name) is not None


def version_of_policy(name: str) -> int:
    """Return the version of the policy with this name.

    >>> version_of_policy("policy-15")
    15
    """
    match = _POLICY.fullmatch(name)
    assert match is not None, "the name is a policy's"
    return int(match[1])
