"""Tests of the conformance suite: every model and optimizer resumes exactly or is refused, and inexact resumes are detected."""

import pytest
from conformance_cases import ALL, REFUSED, batches

from undula.data.rows import Batch
from undula.errors import UsageError
from undula.testing.conformance import Training, check


def checked(training: Training, given: list[Batch] | None = None) -> None:
    check(training.make_model, training.make_optimizer, training.loss, given or batches(), training.before_step)


@pytest.mark.parametrize("name", ALL)
def test_training_resumes_exactly_from_every_step(name: str) -> None:
    checked(ALL[name])


@pytest.mark.parametrize("name", REFUSED)
def test_training_that_cannot_resume_is_refused(name: str) -> None:
    training, sentence = REFUSED[name]
    with pytest.raises(UsageError, match=f"^{sentence}"):
        checked(training)
