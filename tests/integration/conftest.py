"""Fixture for comparisons: a run on one rank."""

import pytest
from jobs_kit import STREAMED, Finished, Jobs


@pytest.fixture(scope="session")
def on_one_rank(session_jobs: Jobs) -> Finished:
    """Run with dropout on one rank. Its data has several files, and an epoch ends during the run."""
    settings = (*STREAMED, *session_jobs.past_an_epoch())
    done = session_jobs.run("on-one-rank", *session_jobs.workers(1), *settings)
    assert done.status == 0, done.err
    assert done.column("step") == list(range(60))
    assert done.column("epoch") == [0] * 46 + [1] * 14
    assert done.column("step_samples")[45] < 120
    return done
