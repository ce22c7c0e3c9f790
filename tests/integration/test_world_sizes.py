"""Tests that the same plan gives the same trajectory at any world size."""

import json

import pytest
from jobs_kit import STREAMED, Finished, Jobs
from night import at_night


@pytest.mark.parametrize("world_size", [*at_night([2, 3]), 4])
def test_any_world_size_gives_the_same_losses(session_jobs: Jobs, on_one_rank: Finished, world_size: int) -> None:
    """Six virtual workers run on 1 to 4 ranks, with dropout. The data has several files, and an epoch ends during the run."""
    together = session_jobs.alone(f"world-{world_size}", *session_jobs.past_an_epoch(), world_size=world_size)
    assert set(on_one_rank.column("world_size")) == {1}
    assert set(together.column("world_size")) == {world_size}
    assert together.column("step") == list(range(60))
    assert together.column("sample_digest") == on_one_rank.column("sample_digest")
    for name in ("loss", "grad_norm", "weights_digest"):
        assert together.column(name) == on_one_rank.column(name)


@pytest.mark.nightly
def test_a_mix_of_data_sets_is_the_same_at_any_world_size(session_jobs: Jobs) -> None:
    parts = (
        {"url": f"{session_jobs.text}/{name}", "weight": weight} for name, weight in (("train", 3), ("validation", 1))
    )
    mix = (*STREAMED, "data.train=null", f"data.mix={json.dumps(list(parts))}", "plan.max_steps=20")
    alone, two = (session_jobs.run(f"mix-{size}", *session_jobs.workers(size), *mix) for size in (1, 2))
    assert alone.status == 0, alone.err
    assert two.status == 0, two.err
    assert two.column("sample_digest") == alone.column("sample_digest")
    assert two.column("loss") == alone.column("loss")
