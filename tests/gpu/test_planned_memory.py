"""Tests that a step on a GPU takes the memory and the time that were predicted for it."""

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch
from memory_kit import predicted
from memory_models import GPT, GPTConfig, Trained, next_byte
from torch import Tensor
from torch.utils.data import Dataset

from undula.data.script.dataset import script_data
from undula.parallel.spec import ActivationsSpec
from undula.plan.memory import Division
from undula.plan.plan import PlanSpec
from undula.plan.precision import PrecisionSpec
from undula.plan.scaling import Link
from undula.plan.step_time import step_seconds
from undula.state.ledger import read_ledger
from undula.state.records import PARTS
from undula.storage import open_store
from undula.train.dry_run.reference import measure
from undula.train.job import Job
from undula.train.single_process import SingleProcess

CONTEXT = 1024
STEPS, WARMUP = 12, 4


class Sentences(Dataset[Tensor]):
    """Random bytes; shape [CONTEXT + 1]."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(256, (CONTEXT + 1,), generator=torch.Generator().manual_seed(index))


TRAIN = Trained(lambda: GPT(GPTConfig(layers=12, heads=12, width=768, context=CONTEXT)), next_byte, Sentences)  # type: ignore[arg-type]


def job_of(folder: Path, samples: int, keep: str) -> Job:
    return Job(
        name="memory",
        run_url=str(folder / "run"),
        plan=PlanSpec(global_batch=4 * samples, virtual_workers=1, micro_batch=samples, max_steps=STEPS),
        precision=PrecisionSpec(compute="bf16"),
        activations=ActivationsSpec(keep=keep),  # type: ignore[arg-type]
        script_data=script_data(Sentences(), None, None, 0, {}),
    )


@pytest.mark.parametrize("samples", [4, 16])
@pytest.mark.parametrize("keep", ["all", "selective", "sqrt", "none"])
def test_the_peak_of_a_step_on_a_gpu_is_known_in_advance(
    device: torch.device, figures: dict[str, float], tmp_path: Path, samples: int, keep: str
) -> None:
    job = job_of(tmp_path, samples, keep)
    _, expected = predicted(TRAIN, job, on_gpu=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    SingleProcess(TRAIN, replace(job, run_url=str(tmp_path / "measured")), lambda message: None, device=device)()
    peak = torch.cuda.max_memory_allocated(device)
    figures[f"expected memory / peak, micro-batch {samples}, activations.keep={keep}"] = expected / peak
    assert peak == pytest.approx(expected, rel=0.07)


def test_the_duration_of_a_step_on_a_gpu_is_known_in_advance(
    device: torch.device, figures: dict[str, float], tmp_path: Path
) -> None:
    job = job_of(tmp_path, 16, "all")
    counted, _ = predicted(TRAIN, job, on_gpu=True)
    (passes,) = counted.passes.values()
    rates = measure(device, "bf16")
    expected = step_seconds(counted.state, passes, Division(1, 4, 1), rates, Link(0.0, 1.0)).total
    SingleProcess(TRAIN, job, lambda message: None, device=device)()
    steps = read_ledger(open_store(job.run_url)).steps.slice(WARMUP).to_pylist()
    measured = median(sum(step[name] for name in PARTS) for step in steps)
    figures["expected duration of a step / measured"] = expected / measured
    assert measured == pytest.approx(expected, rel=0.2)
