"""The same plan gives the same trajectory at any world size."""

import pytest
from integration_kit import Jobs, relative_difference

STEPS = 100
TOLERANCE = 1e-5


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_any_world_size_gives_the_same_losses(session_jobs: Jobs, dropout: float) -> None:
    """V = 6 on 1, 2, 3 and 4 ranks; 4 does not divide 6. The row groups are of several files, and an epoch ends on the way."""
    runs = {}
    for world_size in (1, 2, 3, 4):
        name = f"world-{world_size}-dropout-{dropout}"
        done = session_jobs.run(
            name, *session_jobs.workers(world_size), f"plan.max_steps={STEPS}", f"config.model.dropout={dropout}"
        )
        assert done.status == 0, done.err
        assert set(done.column("world_size")) == {world_size}
        runs[world_size] = done
    alone = runs[1]
    assert alone.column("step") == list(range(STEPS))
    for world_size in (2, 3, 4):
        assert runs[world_size].column("sample_digest") == alone.column("sample_digest")
        assert relative_difference(runs[world_size].column("loss"), alone.column("loss")) < TOLERANCE
