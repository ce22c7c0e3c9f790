"""Tests that what is counted of a sharded model in advance is what real ranks hold and send."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from memory_models import SHARDED, Trained
from ranks import on_ranks
from sharded_memory import Sharded, measured
from torch import nn

from undula.data.script.dataset import script_data
from undula.errors import UsageError
from undula.parallel.spec import ActivationsSpec, ShardingSpec
from undula.plan.gpus import ESTIMATE_ERROR
from undula.plan.host_memory import NO_DATA, HostLoad
from undula.plan.memory import Division, PassCount, StateCount, division_of
from undula.plan.precision import PrecisionSpec
from undula.plan.step_memory import moments, sent_bytes
from undula.train.dry_run.count import count
from undula.train.dry_run.counting import Setting
from undula.train.job import Job

GPT, ODD = SHARDED
RANKS = 2
CASES = [
    *(Sharded(name, stage, micro_batch) for name in SHARDED for stage in (1, 2, 3) for micro_batch in (2, 1)),
    *(Sharded(GPT, 3, 1, "bf16", keep) for keep in ("none", "sqrt", "selective")),
    Sharded(ODD, 2, 2, "bf16", "sqrt"),
    *(Sharded(GPT, stage, 1, "bf16", keep, "compute") for stage, keep in ((3, "all"), (1, "all"), (3, "sqrt"))),
    Sharded(ODD, 2, 2, "bf16", "all", "compute"),
    Sharded(ODD, 3, 2, "fp32", "all", "compute"),
]


def job_of(train: Trained, folder: Path, case: Sharded, sharding: ShardingSpec | None = None) -> Job:
    return Job(
        name="memory",
        run_url=str(folder / "run"),
        plan=case.plan,
        precision=PrecisionSpec(compute=case.compute),
        activations=ActivationsSpec(keep=case.keep),
        sharding=sharding or case.sharding,
        script_data=script_data(train.data(), None, None, 0, {}),  # type: ignore[arg-type]
    )


def counted(folder: Path, case: Sharded, ranks: int = RANKS) -> tuple[StateCount, PassCount, Division]:
    train = SHARDED[case.name]
    setting = Setting(case.compute, ActivationsSpec(keep=case.keep), case.micro_batch)
    found = count(train, job_of(train, folder, case), [setting])
    assert found.is_fake
    return found.state, found.passes[setting], division_of(case.plan, case.micro_batch, ranks, stage=case.stage)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_rank_holds_and_sends_is_known_in_advance(tmp_path: Path, case: Sharded) -> None:
    state, passes, division = counted(tmp_path, case)
    ranks = on_ranks(RANKS, measured, case)
    own = state.of_rank(RANKS)
    assert own.parameter_bytes + own.buffer_bytes + own.optimizer_bytes == pytest.approx(ranks[0].held, rel=0.01)
    assert [each.held_after_validation for each in ranks] == [each.held for each in ranks]
    found = {name: parts.total for name, parts in moments(state, passes, division, on_gpu=False).items()}
    first = max(total for name, total in found.items() if name != "update") - own.optimizer_bytes
    later = max(found.values())
    # On a busy machine, a thread of gloo can free a tensor late, so that a step holds more than the others.
    assert later == pytest.approx(max(min(each.peaks[1:]) for each in ranks), rel=ESTIMATE_ERROR)
    assert first == pytest.approx(min(each.peaks[0] for each in ranks), rel=0.12)
    load = HostLoad(state.snapshot_bytes, 0, 0, NO_DATA, case.virtual_workers, split_bytes=state.split_bytes)
    assert load.worker_bytes(RANKS) == pytest.approx(ranks[0].snapshot, rel=0.01)
    for rank, real in enumerate(ranks):
        assert sent_bytes(state, passes, division, rank).total == pytest.approx(real.sent[1], rel=0.01)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_alone_is_counted_as_well(tmp_path: Path, stage: int) -> None:
    case = Sharded(ODD, stage, 2)
    state, passes, division = counted(tmp_path, case, ranks=1)
    (alone,) = on_ranks(1, measured, case)
    most = max(parts.total for parts in moments(state, passes, division, on_gpu=False).values())
    assert most == pytest.approx(min(alone.peaks[1:]), rel=0.1)
    assert sent_bytes(state, passes, division).total == 0


def test_each_stage_holds_less_than_the_one_before(tmp_path: Path) -> None:
    totals = []
    for stage in (1, 2, 3):
        state, passes, division = counted(tmp_path, Sharded(GPT, stage, 1))
        found = moments(state, passes, division, on_gpu=False)
        totals.append(max(parts.total for parts in found.values()))
    assert totals == sorted(totals, reverse=True)


class _Meta(nn.Module):
    """Model without memory."""

    def __init__(self) -> None:
        super().__init__()
        with torch.device("meta"):
            self.words, self.head = nn.Embedding(512, 64), nn.Linear(64, 512)
            self.blocks = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(words)))  # type: ignore[no-any-return]


def test_a_model_that_no_worker_can_hold_is_counted(tmp_path: Path) -> None:
    train, case = replace(SHARDED[GPT], make_model=_Meta), Sharded(GPT, 3, 1)
    setting = Setting("fp32", ActivationsSpec(), 1)
    state = count(train, job_of(train, tmp_path, case), [setting]).state
    assert state.parameter_bytes == 4 * (2 * 512 * 64 + 512 + 2 * (64 * 64 + 64))
    assert state.of_rank(2).parameter_bytes == state.parameter_bytes / 2


class _ByHand(nn.Module):
    """Model that shards itself."""

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.fsdp import fully_shard

        self.words = nn.Embedding(512, 512)
        fully_shard(self)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.words(words)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "sharding", "message"),
    [
        (_ByHand, ShardingSpec(), r"the script shards with fully_shard\(\) is not counted; leave the sharding to sh"),
        (
            lambda: SHARDED[GPT].make_model().to(torch.bfloat16),
            ShardingSpec(3, gather="compute"),
            "compute is counted only for models whose parameters all are float32",
        ),
        (
            SHARDED[GPT].make_model,
            ShardingSpec(3, units=("none.*",)),
            r"sharding\.units has 'none\.\*', which matches no",
        ),
        (lambda: nn.ModuleList([nn.Linear(2, 2)]), ShardingSpec(2), "a ModuleList, which has no forward pass"),
    ],
    ids=["by hand", "in 16 bits", "unknown units", "a list"],
)
def test_what_cannot_be_counted_is_refused(tmp_path: Path, make: object, sharding: ShardingSpec, message: str) -> None:
    train = replace(SHARDED[GPT], make_model=make)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message):
        count(train, job_of(train, tmp_path, Sharded(GPT, 1, 1), sharding), [Setting("fp32", ActivationsSpec(), 1)])


def test_an_optimizer_whose_results_on_shards_are_unknown_is_refused(tmp_path: Path) -> None:
    train = replace(SHARDED[GPT], make_optimizer=lambda model: torch.optim.Rprop(model.parameters()))
    with pytest.raises(UsageError, match="cannot be combined with the optimizer Rprop"):
        count(train, job_of(train, tmp_path, Sharded(GPT, 1, 1)), [Setting("fp32", ActivationsSpec(), 1)])
