"""Tests that the same plan gives the same trajectory at any world size."""

import json

import pytest
from jobs_kit import STREAMED, Finished, Jobs, relative_difference

TOLERANCE = 1e-5


def test_any_world_size_gives_the_same_losses(session_jobs: Jobs, on_one_rank: Finished) -> None:
    """Six virtual workers run on 1 and on 4 ranks, with dropout. The data has several files, and an epoch ends during the run."""
    four = session_jobs.run("world-4", *session_jobs.workers(4), *STREAMED, *session_jobs.past_an_epoch())
    assert four.status == 0, four.err
    assert set(on_one_rank.column("world_size")) == {1}
    assert set(four.column("world_size")) == {4}
    assert four.column("step") == list(range(60))
    assert four.column("sample_digest") == on_one_rank.column("sample_digest")
    assert relative_difference(four.column("loss"), on_one_rank.column("loss")) < TOLERANCE


@pytest.mark.soak
def test_a_mix_of_data_sets_is_the_same_at_any_world_size(session_jobs: Jobs) -> None:
    parts = (
        {"url": f"{session_jobs.text}/{name}", "weight": weight} for name, weight in (("train", 3), ("validation", 1))
    )
    mix = (*STREAMED, "data.train=null", f"data.mix={json.dumps(list(parts))}", "plan.max_steps=20")
    alone, two = (session_jobs.run(f"mix-{size}", *session_jobs.workers(size), *mix) for size in (1, 2))
    assert alone.status == 0, alone.err
    assert two.status == 0, two.err
    assert two.column("sample_digest") == alone.column("sample_digest")
    assert relative_difference(two.column("loss"), alone.column("loss")) < TOLERANCE
