"""Tests that the planned samples are the samples of the stream."""

from pathlib import Path

import numpy as np
import pytest
from data_sets import write_table

from undula.data import stream
from undula.data.planned import PlannedSamples
from undula.data.stored.mixture import Mixture
from undula.plan.plan import PlanSpec


@pytest.mark.parametrize("last_step", ["short", "drop", "wrap"])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_planned_samples_equal_the_samples_of_the_stream(tmp_path: Path, last_step: str, is_mixed: bool) -> None:
    one, other = (
        write_table(tmp_path / name, {"x": np.arange(rows)}, num_shards=2, row_group_bytes=56)
        for name, rows in (("one", 131), ("other", 40))
    )
    plan = PlanSpec(global_batch=18, virtual_workers=6, epochs=3, window=2, last_step=last_step)
    source = stream({one.url: 2.0, other.url: 1.0} if is_mixed else one, plan)
    planned = PlannedSamples(Mixture((one, other), (2.0, 1.0)) if is_mixed else one, source.plan)
    taken = [source.ids.tolist() for _ in source]
    assert taken == [planned.step_ids(step).tolist() for step in range(source.plan.total_steps)]
