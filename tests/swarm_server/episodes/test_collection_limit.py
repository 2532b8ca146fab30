"""The number of episodes that clients may begin ahead of the running training step."""

from hypothesis import given
from hypothesis import strategies as st

from fakevllm_adapters.job.model import MAX_ASYNC_STEPS, TrainJob
from fakevllm_server.episodes.collection_limit import UntrainedWork, may_begin_episode

jobs = st.builds(
    TrainJob,
    batch_size=st.integers(1, 5),
    num_repeat=st.integers(1, 4),
    async_steps=st.integers(0, 3),
)
works = st.builds(UntrainedWork, st.integers(0, 40), st.integers(0, 160))


@given(jobs, works)
def test_without_async_steps_an_episode_may_always_begin(
    job: TrainJob, work: UntrainedWork
) -> None:
    assert may_begin_episode(work, job.model_copy(update={"async_steps": 0}))


@given(jobs, works, works)
def test_more_work_never_permits_what_less_work_forbids(
    job: TrainJob, work: UntrainedWork, more: UntrainedWork
) -> None:
    total = UntrainedWork(work.num_groups + more.num_groups, work.num_episodes + more.num_episodes)
    assert may_begin_episode(work, job) or not may_begin_episode(total, job)


@given(jobs.filter(lambda job: job.async_steps > 0), works, st.integers(0, MAX_ASYNC_STEPS - 3))
def test_more_async_steps_never_forbid_what_fewer_permit(
    job: TrainJob, work: UntrainedWork, num_more: int
) -> None:
    wider = job.model_copy(update={"async_steps": job.async_steps + num_more})
    assert may_begin_episode(work, wider) or not may_begin_episode(work, job)


@given(jobs.filter(lambda job: job.async_steps > 0), st.lists(st.booleans(), max_size=200))
def test_a_group_is_trained_at_most_async_steps_later_than_it_began(
    job: TrainJob, begins: list[bool]
) -> None:
    """Episodes of the tasks begin and end one after the other. Each False trains a batch, if one is
    complete."""
    version, waiting, versions_of_task = 0, list[int](), list[int]()
    for is_begin in begins:
        work = UntrainedWork(len(waiting), len(versions_of_task))
        if is_begin and may_begin_episode(work, job):
            versions_of_task.append(version)
            if len(versions_of_task) == job.num_repeat:
                waiting.append(min(versions_of_task))
                versions_of_task = []
        elif not is_begin and len(waiting) >= job.batch_size:
            batch, waiting = waiting[: job.batch_size], waiting[job.batch_size :]
            assert version - min(batch) <= job.async_steps
            version += 1
        assert len(waiting) <= (1 + job.async_steps) * job.batch_size
