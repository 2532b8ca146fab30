"""The section `cluster`: which GPUs sample and train, and which divisions are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakevllm_runtime.errors import ConfigError
from fakevllm_server.placement.cluster_section import COLOCATIONS, ClusterSection

SMALL = st.integers(1, 6)
SMALLEST: dict[str, Any] = {"gpus_per_node": 8, "training_gpus": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"training_gpus": 0}, "cluster.training_gpus must be 1 or more, got 0"),
        ({"training_gpus": 8}, r"needs 9 GPUs \(1 x 1 x 1 = 1 to sample, 8 to train\), and 1 x 8"),
        ({"tensor_parallel": 4, "replicas": 2}, r"needs 9 GPUs .* = 8 exist: lower training_gpus"),
        ({"tensor_parallel": 16}, "tensor_parallel is 16, and a node has 8 GPUs"),
        ({"colocate": "yes"}, "must be one of none, shared, sleep, got 'yes'"),
        ({"gpu_memory_gib": 0}, "gpu_memory_gib must be above 0"),
        ({"gpu_memory_gib": float("nan")}, "gpu_memory_gib must be above 0"),
        ({"min_training_gpus": 2}, "min_training_gpus is 2, and training_gpus is 1: lower it"),
        ({"min_training_gpus": 0}, "cluster.min_training_gpus must be 1 or more, got 0"),
        ({"nodes": 2, "training_gpus": 9}, "cannot be placed beside .*: 9 workers do not fit"),
    ],
)
def test_a_division_that_the_gpus_do_not_allow_is_refused(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ClusterSection(**(SMALLEST | settings))


@given(
    gpus_per_node=st.integers(1, 8),
    nodes=SMALL,
    tensor_parallel=SMALL,
    data_parallel=SMALL,
    replicas=SMALL,
    training_gpus=st.integers(1, 16),
    colocate=st.sampled_from(COLOCATIONS),
)
def test_every_accepted_division_uses_existing_gpus_and_overlaps_only_if_colocated(
    **settings: Any,
) -> None:
    try:
        section = ClusterSection(**settings)
    except ConfigError as error:
        assert "\n" not in str(error)
        return
    rollout, training = set(section.rollout_range), set(section.training_range)
    product = settings["tensor_parallel"] * settings["data_parallel"] * settings["replicas"]
    assert len(rollout) == product
    assert len(training) == settings["training_gpus"]
    assert rollout | training <= set(range(section.num_gpus))
    ranges = [section.replica_range(number) for number in range(settings["replicas"])]
    assert [gpu for each in ranges for gpu in each] == sorted(rollout)
    assert bool(rollout & training) is section.is_colocated


def test_a_rollout_engine_on_several_nodes_is_planned_and_refused_at_the_start() -> None:
    section = ClusterSection(gpus_per_node=8, training_gpus=1, nodes=2, data_parallel=9)
    with pytest.raises(ConfigError, match=r"^9 GPUs of the rollout engine on 2 nodes .*not start"):
        section.check_startable({})


def test_a_start_needs_the_gpus_that_the_environment_lists_and_no_other_ray_cluster() -> None:
    section = ClusterSection(gpus_per_node=8, training_gpus=2)
    section.check_startable({})
    section.check_startable({"CUDA_VISIBLE_DEVICES": "2,3,5"})
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES lists 2 GPUs, and cluster needs 3"):
        section.check_startable({"CUDA_VISIBLE_DEVICES": "2,3"})
    shared = ClusterSection(gpus_per_node=8, training_gpus=3, colocate="shared")
    shared.check_startable({"CUDA_VISIBLE_DEVICES": "2,3,5"})
    with pytest.raises(ConfigError, match="lists 2 GPUs, and cluster needs 3"):
        shared.check_startable({"CUDA_VISIBLE_DEVICES": "2,3"})
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES lists 0 GPUs"):
        section.check_startable({"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(ConfigError, match="RAY_ADDRESS is set"):
        section.check_startable({"RAY_ADDRESS": "head:6379"})


def test_several_machines_need_the_address_of_their_ray_cluster() -> None:
    section = ClusterSection(gpus_per_node=8, training_gpus=8, nodes=2)
    with pytest.raises(ConfigError, match=r"cluster\.nodes = 2 needs a Ray .*cluster\.ray_address"):
        section.check_startable({})
    joined = replace(section, ray_address="head:6379")
    joined.check_startable({"CUDA_VISIBLE_DEVICES": "3"})
    with pytest.raises(ConfigError, match="lists 0 GPUs, and cluster needs 1"):
        joined.check_startable({"CUDA_VISIBLE_DEVICES": ""})
    with pytest.raises(ConfigError, match="RAY_ADDRESS is set"):
        joined.check_startable({"RAY_ADDRESS": "head:6379"})
    with pytest.raises(ConfigError, match="ray_address is for several machines, and"):
        replace(joined, nodes=1, training_gpus=7).check_startable({})


def test_workers_never_see_the_gpus_of_the_rollout_engine() -> None:
    section = ClusterSection(gpus_per_node=8, training_gpus=4, tensor_parallel=2, data_parallel=2)
    assert section.visible_gpus(section.rollout_range, {}) == "0,1,2,3"
    assert section.visible_gpus(section.training_range, {}) == "4,5,6,7"
    listed = {"CUDA_VISIBLE_DEVICES": "7, 6,5,4,3,2,1,GPU-0a"}
    assert section.visible_gpus(section.rollout_range, listed) == "7,6,5,4"
    assert section.visible_gpus(section.training_range, listed) == "3,2,1,GPU-0a"
