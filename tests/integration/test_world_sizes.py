"""The same plan gives the same trajectory at any world size."""

import json

import pytest
from jobs_kit import STREAMED, Jobs, relative_difference

STEPS = 100
TOLERANCE = 1e-5


def test_any_world_size_gives_the_same_losses(session_jobs: Jobs) -> None:
    """V = 6 on 1, 2 and 4 ranks, with dropout; 4 does not divide 6. The rows are of several files, and an epoch ends on the way."""
    runs = {}
    more = (*STREAMED, f"plan.max_steps={STEPS}", "config.model.dropout=0.1")
    for world_size in (1, 2, 4):
        done = session_jobs.run(f"world-{world_size}", *session_jobs.workers(world_size), *more)
        assert done.status == 0, done.err
        assert set(done.column("world_size")) == {world_size}
        runs[world_size] = done
    alone = runs[1]
    assert alone.column("step") == list(range(STEPS))
    for world_size in (2, 4):
        assert runs[world_size].column("sample_digest") == alone.column("sample_digest")
        assert relative_difference(runs[world_size].column("loss"), alone.column("loss")) < TOLERANCE


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
