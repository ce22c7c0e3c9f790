"""Tests of 16-bit runs whose workers grow in number and are lost: nothing of the loss scale and no bit of the weights changes."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from alone import train_alone
from chaos_kit import SCRIPT, SLOW_S, STEPS_ALONE, Running, assert_certified, command, running
from torch import nn

from undula.state.events import SkipEvent
from undula.state.ledger import read_ledger
from undula.testing.nodes import Nodes

INTERVAL, PERIOD, FIRST = 7, 11, 3
"""Steps without an overflow after which the scale grows, and the steps that overflow: FIRST and every PERIOD-th after it."""
HOOK = f"""
from undula.train import step_part

current = []

def before(step):
    current[:] = [step.index]

def prepared(module):
    step_part.GROWTH_INTERVAL = {INTERVAL}
    def overflow(gradient):
        return gradient * (float("inf") if current[0] % {PERIOD} == {FIRST} else 1.0)
    next(module.parameters()).register_hook(overflow)
    return module
"""

pytestmark = pytest.mark.timeout(900)


@contextmanager
def through_growth_and_a_loss(
    spot: Nodes, text: str, folder: Path, *settings: str, hook: str = ""
) -> Iterator[Running]:
    """Train on one worker, on two, and on one again after a SIGKILL of the other's node, for some steps each."""
    with running(spot, text, folder, 1, "workers.max=2", *settings, pace_s=SLOW_S, hook=hook) as job:
        job.wait_for(lambda: len(job.rows()) > PERIOD)
        second = spot.add()
        job.wait_for(lambda: job.sizes().count(2) > PERIOD)
        spot.kill(second)
        job.wait_for(lambda: job.sizes()[-1] == 1)
        reached = len(job.rows())
        job.wait_for(lambda: len(job.rows()) > reached + PERIOD)
        yield job


def torch_scales(steps: int) -> list[tuple[float, bool]]:
    """Return the scale of each step of torch's scaler, and whether it applies the step."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    scaler = torch.amp.GradScaler("cpu", growth_interval=INTERVAL)
    found = []
    for index in range(steps):
        overflows = index % PERIOD == FIRST
        scaler.scale(weight.sum() * (float("inf") if overflows else 1.0)).backward()  # type: ignore[no-untyped-call]
        found.append((scaler.get_scale(), not overflows))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return found


@pytest.mark.nightly
def test_the_loss_scale_goes_through_growth_and_the_loss_of_a_node(spot: Nodes, text: str, tmp_path: Path) -> None:
    with through_growth_and_a_loss(spot, text, tmp_path, "precision.compute=fp16", hook=HOOK) as job:
        pass
    ledger = read_ledger(job.store)
    rows = ledger.steps.to_pylist()
    assert [row["step"] for row in rows] == list(range(len(rows)))
    found = [(json.loads(row["logged"])["loss_scale"], row["applied"]) for row in rows]
    assert found == torch_scales(len(rows))
    skipped = {row["step"] + 1 for row in rows if not row["applied"]}
    marked = {event.step for event in job.of(SkipEvent) if event.step <= len(rows)}
    assert marked <= skipped
    assert len(marked) >= len(skipped) - 1  # the worker that reports events can be killed just after a commit


@pytest.mark.nightly
def test_bf16_has_the_same_bits_through_growth_and_the_loss_of_a_node(spot: Nodes, text: str, tmp_path: Path) -> None:
    with through_growth_and_a_loss(spot, text, tmp_path, "precision.compute=bf16") as job:
        pass
    steps = len(job.rows())
    shorter = (*STEPS_ALONE, "precision.compute=bf16", f"plan.max_steps={steps + 1}")
    alone = train_alone(command(text, str(tmp_path), "alone", *shorter, script=SCRIPT))
    assert_certified(job.store.url, alone.url, steps)
