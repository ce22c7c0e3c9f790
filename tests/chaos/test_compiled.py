"""Tests of compiled models under changes of the group: no worker is lost to compilation, and no bit changes."""

from pathlib import Path
from shutil import which

import pytest
from alone import train_alone
from chaos_kit import SCRIPT, SLOW_S, STEPS_ALONE, assert_certified, command, events_in, running, wrapped

from undula.state.events import CrashEvent
from undula.state.ledger import read_ledger
from undula.testing.nodes import Nodes

TINY = """
import torch

class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(256, 256)
        self.layer = torch.nn.Linear(256, 256)

    def forward(self, text):
        return torch.nn.functional.dropout(torch.tanh(self.layer(self.table(text))), 0.1, self.training)

def prepared(module):
    return Tiny()
"""
LIMIT_S = 500
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(which("g++") is None, reason="g++ is not installed"),
]


@pytest.mark.parametrize("hook", [TINY, ""], ids=["tiny", "main job"])
def test_growth_and_short_steps_of_a_compiled_model_lose_no_worker_and_change_no_bit(
    spot: Nodes, text: str, tmp_path: Path, hook: str
) -> None:
    """The samples of an epoch make 45 full steps and a short one, which has its own graph."""
    settings = (f"data.train={text}/validation", "plan.global_batch=120", "plan.epochs=1000", "compile=true")
    with running(spot, text, tmp_path, 1, "workers.max=2", *settings, pace_s=SLOW_S, hook=hook, limit_s=LIMIT_S) as job:
        job.wait_for(lambda: len(job.rows()) > 1, LIMIT_S)
        spot.add()
        job.wait_for(lambda: any(row["world_size"] == 2 and row["step_samples"] < 120 for row in job.rows()), LIMIT_S)
        rows = job.rows()
        reached = rows[-1]["step"]
        job.wait_for(lambda: job.rows()[-1]["step"] > reached + 3)
    ledger = read_ledger(job.store)
    assert ledger.steps["step"].to_pylist() == list(range(ledger.steps.num_rows))
    assert ledger.replaced.num_rows == 0
    assert events_in(job.store.url, CrashEvent) == []
    script = wrapped(tmp_path / "alone", hook, pace_s=0.0) if hook else SCRIPT
    shorter = (*STEPS_ALONE, *settings, f"plan.max_steps={ledger.steps.num_rows + 1}")
    alone = train_alone(command(text, str(tmp_path), "alone", *shorter, script=script))
    assert_certified(job.store.url, alone.url, ledger.steps.num_rows)
