"""Fixture for comparisons: a run on one rank."""

import pytest
from jobs_kit import Finished, Jobs


@pytest.fixture(scope="session")
def on_one_rank(session_jobs: Jobs) -> Finished:
    """Run with dropout on one rank. Its data has several files, and an epoch ends during the run."""
    done = session_jobs.alone("on-one-rank", *session_jobs.past_an_epoch())
    assert done.column("step") == list(range(60))
    assert done.column("epoch") == [0] * 46 + [1] * 14
    assert done.column("step_samples")[45] < 120
    return done
