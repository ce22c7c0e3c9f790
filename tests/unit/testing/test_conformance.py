"""The conformance suite: every model and optimizer resumes exactly or is refused, and a run that does not resume exactly is found."""

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from conformance_cases import ALL, MODELS, OVERFLOWING, REFUSED, UNSOUND, UNSOUND_ON_THE_SECOND_RANK, write_job
from conformance_scripts import HELD, Holding
from example_parts import Average, adding
from night import at_night
from ranks import forks

from undula.errors import ConformanceError, SpecError, UsageError
from undula.testing.conformance import PARTS, Part, check, check_on_ranks
from undula.train.step_part import Update

STEPS = ("plan.max_steps=4",)
HALF = "bf16 parameters"
"""Case that bf16 and fp16 runs refuse."""
ROUNDED = ("plain", "BatchNorm", "double parameters", "parametrizations", "layers that merge in eval mode")
"""Cases whose state depends on how a run in 16 bits converts parameters and activations, each in a way of its own."""
LIKE_OTHERS = (
    *("a buffer that is replaced", "extra state", "channels-last parameters", "a group added during training"),
    *("a branch that some steps use", "a sparse embedding"),
)
"""Cases that show nothing about several ranks that another case does not show as well."""
OPTIMIZERS = [name for name in ALL if name not in MODELS]
"""Cases of the plain model, whose optimizers see fp32 gradients in any precision."""
WHOLE = ("plain", "BatchNorm", "tied weights", "a sparse embedding", "a validation that swaps weights")
"""Models for which each part of the suite is checked whenever tests run."""
RESUMED = (
    *("a branch that some steps use", "an LSTM with dropout", "repeated blocks", "buffers of all kinds", "extra state"),
    *("experts, heads and a layer that is skipped", "complex parameters", "bf16 parameters", "parametrizations"),
    *("a compiled model", "a layer that is frozen and unfrozen", "an average in after_step, and state"),
    "a model that stays in evaluation mode",
    *("parameters with other memory", "random numbers in after_step", "a buffer that moves before the batches"),
)
"""Models whose state is of a kind of its own."""
STATES = (
    *("Adafactor", "ASGD", "Muon", "SparseAdam", "SGD with momentum from step 2 on", "Adam, fused", "several groups"),
    *("a learning rate that is a tensor", "a group added during training", "lamb", "prodigy", "soap", "kron"),
    "schedule-free AdamW",
)
"""Optimizers whose state is of a kind of its own."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    forks("conformance_cases", "conformance_scripts")  # otherwise, each rank would import its libraries of optimizers
    return write_job(tmp_path_factory.mktemp("conformance"))


@pytest.mark.parametrize("name", [*WHOLE, *at_night(name for name in MODELS if name not in WHOLE)])
def test_a_run_resumes_exactly_and_trains_as_a_plain_loop(name: str, job: str) -> None:
    check(MODELS[name], job, *STEPS)


class Forgetful(Average):
    """Part whose count begins anew in each group."""

    def updated(self, update: Update) -> dict[str, float]:
        super().updated(update)
        return {}

    def restore(self, values: Mapping[str, Any]) -> None:
        """Forget what the state has."""


def test_a_part_of_the_step_that_forgets_its_state_is_found(job: str) -> None:
    for part, error in (
        (Average, None),
        (Forgetful, r"average\.num_steps has other bits after \d steps of a run that was"),
    ):
        expected = pytest.raises(ConformanceError, match=error) if error else nullcontext()
        with adding("average", part), expected:
            check(MODELS["plain"], job, "plan.max_steps=3", parts=("resume",))


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumes_exactly(name: str, job: str) -> None:
    check(MODELS[name], job, "plan.max_steps=3", parts=("resume",))


@pytest.mark.parametrize("name", [*STATES, *at_night(name for name in OPTIMIZERS if name not in STATES)])
def test_a_run_resumes_exactly_with_an_optimizer(name: str, job: str) -> None:
    check(ALL[name], job, *STEPS, "data.validation=null", parts=("resume",))


@pytest.mark.parametrize("name", ["plain", *at_night(["tied weights", "repeated blocks"])])
def test_a_sharded_run_resumes_exactly_and_trains_as_a_plain_loop_over_the_whole_model(name: str, job: str) -> None:
    check(ALL[name], job, *STEPS, "sharding.stage=3")


@pytest.mark.parametrize("keep", ["selective", *at_night(["sqrt"])])
def test_a_run_whose_activations_are_recomputed_resumes_exactly(keep: str, job: str) -> None:
    check(ALL["repeated blocks"], job, *STEPS, f"activations.keep={keep}")


@pytest.mark.parametrize(
    "name",
    [*ROUNDED, *at_night(name for name in ALL if name not in (*ROUNDED, HALF))],
)
def test_a_run_in_bf16_resumes_exactly_after_every_step(name: str, job: str) -> None:
    if name == "an LSTM with dropout" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("oneDNN has no LSTM in bf16 for this CPU")
    # What the other parts compare does not depend on the format.
    parts = PARTS if name == "plain" else ("resume",)
    check(ALL[name], job, *STEPS, "precision.compute=bf16", parts=parts)


def test_bf16_parameters_in_a_bf16_run_are_refused(job: str) -> None:
    with pytest.raises(SpecError, match=r"float16 parameters cannot be combined with precision.compute=bf16, because"):
        check(ALL[HALF], job, *STEPS, "precision.compute=bf16")


@pytest.mark.parametrize("name", REFUSED)
def test_a_run_that_could_not_resume_is_refused(name: str, job: str) -> None:
    train, sentence = REFUSED[name]
    with pytest.raises(UsageError, match=f"^{sentence}"):
        check(train, job, *STEPS)


@pytest.mark.parametrize("name", UNSOUND)
def test_state_that_no_checkpoint_has_is_found(name: str, job: str) -> None:
    train, sentence = UNSOUND[name]
    with pytest.raises(ConformanceError, match=f"^{sentence}"):
        check(train, job, *STEPS)


@pytest.mark.parametrize(
    "name",
    ["plain", "BatchNorm", "soap", *at_night(LIKE_OTHERS)],
)
def test_lost_ranks_and_another_world_size_do_not_change_a_run(name: str, job: str) -> None:
    check_on_ranks(ALL[name], job)


@pytest.mark.nightly
def test_lost_ranks_do_not_change_a_run_whose_activations_are_recomputed(job: str) -> None:
    check_on_ranks(ALL["repeated blocks"], job, "activations.keep=sqrt")


def test_lost_ranks_and_another_world_size_do_not_change_a_run_in_fp16_with_overflows(job: str) -> None:
    check_on_ranks(OVERFLOWING, job, "precision.compute=fp16", "gradient.compression=fp16")


def test_state_that_only_one_rank_loses_is_found(job: str) -> None:
    sentence = "^buffer.*steps, which is not persistent, has other bits on rank 1 at the end"
    with pytest.raises(ConformanceError, match=sentence):
        check_on_ranks(UNSOUND_ON_THE_SECOND_RANK, job)


@pytest.mark.parametrize("name", HELD)
def test_what_a_script_keeps_itself_is_found_if_no_state_has_it(name: str, job: str) -> None:
    after_update, sentence = HELD[name]
    with pytest.raises(ConformanceError, match=f"^{sentence}"):
        check(Holding(after_update, is_kept=False), job, *STEPS, parts=("resume",))


@pytest.mark.parametrize("part", [*at_night(["resume"]), "hand over"])
@pytest.mark.parametrize("name", HELD)
def test_what_a_script_keeps_in_the_state_of_the_run_is_right(name: str, part: Part, job: str) -> None:
    training = Holding(HELD[name][0], is_kept=True)
    check(training, job, *STEPS, parts=(part,))


@pytest.mark.parametrize("is_kept", [*at_night([True]), False])
def test_faults_show_what_a_script_keeps_itself(is_kept: bool, job: str) -> None:
    training = Holding(HELD["an average of the weights in a list"][0], is_kept)
    with nullcontext() if is_kept else pytest.raises(ConformanceError, match=r"^the loss of the validation is"):
        check_on_ranks(training, job)
