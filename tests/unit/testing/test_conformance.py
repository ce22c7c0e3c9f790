"""The conformance suite: every model and optimizer resumes exactly or is refused, and a run that does not resume exactly is found."""

import pytest
from conformance_cases import ALL, REFUSED, UNSOUND, write_job

from undula.errors import ConformanceError, UsageError
from undula.testing.conformance import check

STEPS = ("plan.max_steps=4",)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_job(tmp_path_factory.mktemp("conformance"))


@pytest.mark.parametrize("name", ALL)
def test_a_run_resumes_exactly_after_every_step(name: str, job: str) -> None:
    check(ALL[name], job, *STEPS)


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
