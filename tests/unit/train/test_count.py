"""Tests that what is counted of a step in advance is what the step takes in a run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conformance_cases import ALL as CASES
from conformance_cases import leave, write_job
from memory_kit import measured, predicted
from memory_models import MODELS, PIXELS, HuggingFaces, Trained
from night import at_night

from undula.config.job import load_spec
from undula.data.script.dataset import script_data
from undula.data.script.items import Items
from undula.errors import UsageError
from undula.parallel.spec import ActivationsSpec
from undula.plan.host_memory import SLOTS, DataCount
from undula.plan.plan import PlanSpec
from undula.plan.precision import PrecisionSpec
from undula.recovery.snapshot import DATA, folder_of, slots_below
from undula.train.dry_run.count import count
from undula.train.dry_run.counting import Setting
from undula.train.dry_run.fakes import length_of
from undula.train.dry_run.storages import storage_bytes
from undula.train.job import Job
from undula.train.run import Run
from undula.train.single_process import SingleProcess

KEEPS = ("all", "none", "selective", "sqrt", "every_2")
REPEATED = ("a U-Net", "a decoder with tied weights", "a mixture of experts", "Hugging Face's decoder")
"""Models that have blocks whose activations can be recomputed."""
OFFLOADED = REPEATED[1:]
"""Those of which no activation is used beside its unit. On a CPU, what the levels of a U-Net keep has its copy in the same memory."""
ALL = [
    (name, compute, keep, offload)
    for name in MODELS
    for compute in ("fp32", "bf16")
    for keep in (KEEPS if name in REPEATED else ("all",))
    for offload in ((False, True) if name in OFFLOADED and keep != "selective" else (False,))
]
BRIEF = [
    case
    for case in ALL
    if case[1:] == ("fp32", "all", False) or case in [(OFFLOADED[0], "bf16", keep, True) for keep in ("all", "sqrt")]
]
GROWING = (
    *("SGD with momentum from step 2 on", "a group added during training", "a branch that some steps use"),
    "experts, heads and a layer that is skipped",
    *("a layer that is frozen and unfrozen", "a layer that is unfrozen once"),
)
"""Cases in which the state of the optimizer grows after the first step."""
KNOWN = (
    *GROWING,
    "plain",
    "Adafactor",
    "Muon",
    "SparseAdam",
    "Adam, fused",
    "several groups",
    "soap",
    "buffers of all kinds",
)
"""Those, and cases whose state is of a kind of its own."""
LAST = 4
"""Step before which both slots have a snapshot of the state after it has grown."""


def job_of(train: Trained, folder: Path, compute: str = "fp32", keep: str = "all", offload: bool = False) -> Job:
    return Job(
        name="memory",
        run_url=str(folder / "run"),
        plan=PlanSpec(global_batch=32, virtual_workers=2, max_steps=3),
        precision=PrecisionSpec(compute=compute),  # type: ignore[arg-type]
        activations=ActivationsSpec(keep=keep, offload=offload),
        script_data=script_data(train.data(), None, None, 0, {}),  # type: ignore[arg-type]
    )


def check(folder: Path, name: str, compute: str, keep: str, offload: bool) -> None:
    train = MODELS[name]
    job = job_of(train, folder, compute, keep, offload)
    counted, peak = predicted(train, job)
    assert counted.is_fake != train.is_real
    assert peak == pytest.approx(measured(train, job), rel=0.07)


@pytest.mark.parametrize(("name", "compute", "keep", "offload"), BRIEF)
def test_the_peak_of_a_step_is_known_in_advance(
    tmp_path: Path, name: str, compute: str, keep: str, offload: bool
) -> None:
    check(tmp_path, name, compute, keep, offload)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "compute", "keep", "offload"), [case for case in ALL if case not in BRIEF])
def test_the_peak_of_a_step_is_known_in_advance_with_every_setting(
    tmp_path: Path, name: str, compute: str, keep: str, offload: bool
) -> None:
    check(tmp_path, name, compute, keep, offload)


@pytest.mark.parametrize("name", MODELS)
def test_activations_are_those_that_autograd_saves(tmp_path: Path, name: str) -> None:
    train = MODELS[name]
    setting = Setting("fp32", ActivationsSpec(), 16)
    counted = count(train, job_of(train, tmp_path), [setting]).passes[setting]
    model = train.make_model()
    batch = torch.utils.data.default_collate([train.data()[index] for index in range(16)])
    others = [*model.parameters(), *model.buffers(), *(batch if isinstance(batch, list) else [batch])]
    known = {tensor.untyped_storage().data_ptr() for tensor in others}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = train.loss(model, batch)
    assert loss.requires_grad
    tolerance = 0.1 if name == "masked pixels" else 0.05  # as many pixels are kept as the values of the samples say
    assert counted.saved_bytes == pytest.approx(sum(saved.values()), rel=tolerance)


@pytest.mark.parametrize("name", [*KNOWN, *at_night(name for name in CASES if name not in KNOWN)])
def test_the_state_of_an_optimizer_and_a_snapshot_are_known_in_advance(tmp_path: Path, name: str) -> None:
    training = CASES[name]
    loaded = load_spec(Path(write_job(tmp_path)), [f"plan.max_steps={LAST + 1}", "checkpoint.snapshot_every_steps=1"])
    job = Job.of(loaded.spec, run_url=str(tmp_path / "run"), config={})
    job = replace(job, data=replace(job.data, validation=None))
    counted = count(training, job, [Setting("fp32", job.activations, 6)]).state
    held: list[int] = []
    sizes: list[int] = []

    def measure(step: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        training.before_step(step, model, optimizer)
        if step == LAST:
            held.append(storage_bytes([*optimizer.state.values()]))
            sizes.extend((slot / DATA).stat().st_size for slot in slots_below(folder_of(job.run_url, job.run_id)))

    # A snapshot is complete before the script's work after the step.
    waiting = replace(training, before_step=measure, after_step=training.after_step or leave)
    SingleProcess(waiting, job, lambda message: None)()
    if name in GROWING:
        assert held[0] > 1.01 * counted.optimizer_bytes
        assert max(sizes) > 1.01 * counted.snapshot_bytes
        return
    assert counted.optimizer_bytes == pytest.approx(held[0], rel=0.01, abs=16)
    assert len(sizes) == SLOTS
    assert sizes == pytest.approx([counted.snapshot_bytes] * SLOTS, rel=0.01)


def test_a_model_that_the_script_made_before_is_as_it_was(tmp_path: Path) -> None:
    train = MODELS["a perceptron"]
    model = train.make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    count(replace(train, make_model=lambda: model), job_of(train, tmp_path), [Setting("fp32", ActivationsSpec(), 16)])
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(type(parameter) is torch.nn.Parameter for parameter in model.parameters())


def test_loader_processes_have_copies_of_the_dataset(tmp_path: Path) -> None:
    train = MODELS["a perceptron"]
    data = train.data()

    def with_loaders(run: Run) -> None:
        run.dataset(data, num_workers=2)  # type: ignore[arg-type]
        model = run.model(train.make_model())
        run.optimizer(train.make_optimizer(model))
        for step in run.steps():
            for batch in step.batches():
                step.backward(train.loss(model, batch))
            step.update()

    job = replace(job_of(train, tmp_path), script_data=script_data(data, None, None, 2, {}))  # type: ignore[arg-type]
    counted = count(with_loaders, job, [Setting("fp32", ActivationsSpec(), 16)])
    size = Items(data).pickled_bytes()  # type: ignore[arg-type]
    assert counted.data == DataCount(loaders=2, dataset_bytes=4 * size)


def test_a_mistake_of_the_script_is_its_own_error(tmp_path: Path) -> None:
    train = MODELS["a perceptron"]
    broken = replace(train, loss=lambda model, batch: model(batch[0]).no_such_method())
    setting = Setting("fp32", ActivationsSpec(), 16)
    with pytest.raises(AttributeError, match="no_such_method"):
        count(broken, job_of(train, tmp_path), [setting])


class Huge(torch.nn.Module):
    """Model of 4 TB that reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2**20, 2**20)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(images.flatten(1), (0, 2**20 - images[0].numel()))
        return self.layer(padded)[:, : int(images.argmax()) % 10 + 10]


def test_a_model_that_needs_values_and_more_memory_than_there_is_is_refused(tmp_path: Path) -> None:
    train = replace(MODELS["a perceptron"], make_model=Huge)
    with pytest.raises(UsageError, match=r"DataDependent.* real model of 4096.* GiB cannot take steps in the"):
        count(train, job_of(train, tmp_path), [Setting("fp32", ActivationsSpec(), 16)])


class WithoutBf16(torch.nn.Module):
    """Model that computes in fp32 only.

    Args:
        is_real: Whether it reads a value.
    """

    def __init__(self, is_real: bool) -> None:
        super().__init__()
        self.layer, self.is_real = torch.nn.Linear(3 * PIXELS * PIXELS, 10), is_real

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu"):
            raise TypeError("it has no kernel for bf16")
        return self.layer(images.flatten(1)) * (int(images.argmax()) if self.is_real else 1)


@pytest.mark.parametrize("is_real", [False, True])
def test_a_format_that_nobody_asked_for_and_the_model_cannot_have_is_left_out(tmp_path: Path, is_real: bool) -> None:
    train = replace(MODELS["a perceptron"], make_model=lambda: WithoutBf16(is_real))
    job, own = job_of(train, tmp_path), Setting("fp32", ActivationsSpec(), 16)
    other = replace(own, compute="bf16")
    counted = count(train, job, [own, other])
    assert (set(counted.passes), counted.is_fake) == ({own}, not is_real)
    assert counted.left_out == {"precision.compute=bf16": "TypeError: it has no kernel for bf16"}
    with pytest.raises(TypeError, match="no kernel"):
        count(train, job, [other, own])


def test_units_that_the_model_does_not_have_are_refused(tmp_path: Path) -> None:
    train = MODELS["a perceptron"]
    with pytest.raises(UsageError, match="no repeated blocks"):
        count(train, job_of(train, tmp_path), [Setting("fp32", ActivationsSpec(keep="none"), 16)])


@pytest.mark.parametrize(
    ("tensors", "length"),
    [
        ([torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 7, dtype=torch.bool), torch.zeros(3)], 7),
        ([torch.zeros(3, 7, dtype=torch.uint8), torch.zeros(3, 7, dtype=torch.long)], 7),
        ([torch.zeros(3, 7, dtype=torch.long), torch.zeros(3, 5, dtype=torch.long)], None),
        ([torch.zeros(3, 7), torch.zeros(3, dtype=torch.long)], None),
        ([torch.zeros(21, 7, dtype=torch.long)], None),
    ],
    ids=["and a mask", "two of one length", "two lengths", "no integers", "other samples"],
)
def test_tokens_are_the_length_of_integer_tensors(tensors: list[torch.Tensor], length: int | None) -> None:
    assert length_of(tensors, 3) == length


def test_dropout_of_attention_takes_no_memory_as_on_a_gpu(tmp_path: Path) -> None:
    peaks = []
    for dropout in (0.0, 0.1):
        train = replace(MODELS["Hugging Face's decoder"], make_model=lambda p=dropout: HuggingFaces(False, p))
        peaks.append(predicted(train, job_of(train, tmp_path))[1])
    assert peaks[0] == peaks[1]
