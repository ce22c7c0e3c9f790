"""Scripts of other libraries as jobs: their main function runs in the driver up to its training, and as a whole in every worker.

Such a script gives its settings to a trainer of its library. The driver takes them from there, so that the YAML of the job has only what
the script does not say.
"""

import atexit
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from undula.adapters.refusals import explained
from undula.config.yaml_file import Setting, flatten
from undula.driver.script import has_begun
from undula.entry import main as job_main
from undula.errors import SpecError, UsageError, one_sentence
from undula.plan.plan import PlanSpec
from undula.train.run import Run


def launch(main: Callable[[], object]) -> None:
    """Train a script of another library as a job: check it, train on the available Ray cluster, and print where the result is.

    Call it at the end of the script instead of `main()`. The YAML of the job lies beside the script. Its `config.arguments` is the command
    line of the script, which the main function finds in `sys.argv`.

    Args:
        main: Main function of the script. It runs in the driver until it starts to train, and in every worker from the beginning.
    """
    script = Script(main)
    job_main(script, ScriptConfig, settings=script.settings)


@dataclass(frozen=True)
class ScriptConfig:
    """The section `config` of such a job."""

    arguments: str | None = None
    """Command line of the script."""


def expect_launch() -> None:
    """Explain at the end of this process how a script is launched, if `undula run` has started one that does not do so.

    Such a script runs its main function by itself, which reads the command line of the job as its own and fails in the library that does
    so, before anything of a run is used.
    """
    if sys.argv[1:2] == ["--config"]:
        atexit.register(_explain_launch)


def _explain_launch() -> None:
    if not has_begun():
        text = "the script ended before it called launch(main); if it calls main() at its end, call launch(main) in its place"
        print(f"undula: {text}", file=sys.stderr, flush=True)


class Script:
    """Main function of a script, as the train function of a job."""

    def __init__(self, main: Callable[[], object]):
        self._main = main
        self._offer: Offer | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_offer": None}  # it has the model and the data, which workers make themselves

    def settings(self, tree: Mapping[str, Any]) -> Mapping[str, Setting]:
        """Run the script in the driver until it starts to train, and return its settings by dotted key of the job's YAML.

        Args:
            tree: YAML of the job, with its overrides.

        Raises:
            SpecError: The script ends without training.
            UndulaError: The script asks for something that a run does not support.
        """
        given = dict(flatten(tree))
        workers = given.get("plan.virtual_workers")
        here = Place(None, workers if isinstance(workers, int) else PlanSpec().virtual_workers, given)
        try:
            self._run_main(here, given.get("config.arguments"))
        except Offer as offer:
            self._offer = offer
            return offer.settings
        except SystemExit as end:
            if end.code:
                raise
        raise SpecError(
            "the script ended without training as a run; import Trainer or Accelerator from undula.adapters, and let the function that "
            "launch() gets train with it"
        )

    def __call__(self, run: Run) -> None:
        """Give the dataset and the model to the driver's checks, or train on a rank, which may be the same process afterwards."""
        offer, self._offer = self._offer, None
        if offer is not None:
            offer.give(run)
        else:
            self._run_main(Place(run, run.virtual_workers), run.config.arguments)

    def _run_main(self, here: "Place", arguments: object) -> None:
        global _place
        former, _place = _place, here
        try:
            with _command_line(arguments), explained():
                self._main()
                for end in here.at_end:
                    end()
        finally:
            _place = former


class Offer(BaseException):
    """Ends the script in the driver when it starts to train. A script's `except Exception` does not catch it.

    Args:
        settings: Settings of the script by dotted key of the job's YAML.
        give: Function that gives the dataset and the model to a run.
    """

    def __init__(self, settings: Mapping[str, Setting], give: Callable[[Run], None]):
        super().__init__()
        self.settings = settings
        self.give = give


@dataclass(frozen=True)
class Place:
    """Process in which the main function of a script runs."""

    run: Run | None
    """The run of which this process is a rank; None in the driver."""
    virtual_workers: int
    """Number of virtual workers of the plan, which the script sees as the number of processes."""
    given: Mapping[str, Any] = field(default_factory=dict)
    """Values of the job's YAML by dotted key, in the driver."""
    at_end: list[Callable[[], None]] = field(default_factory=list)
    """Functions of adapters to call when the main function has returned."""

    @property
    def rank(self) -> int:
        return self.run.rank if self.run else 0

    @property
    def device(self) -> torch.device:
        return self.run.device if self.run else torch.device("cpu")


_place: Place | None = None


def place() -> Place:
    """Return the process in which the script runs.

    Raises:
        UsageError: The script was not launched. If it is not in a run of `undula.main` either, this is printed, and the process exits.
    """
    if _place is not None:
        return _place
    error = UsageError(
        "the script trains without a run; end it with launch(main) in place of main(), and start it with `undula run JOB.yaml`"
    )
    if not dist.is_initialized():
        with one_sentence():
            raise error
    raise error


@contextmanager
def _command_line(arguments: object) -> Iterator[None]:
    """Give the script the command line of `config.arguments`, if there is one.

    Raises:
        SpecError: It is not text.
    """
    if not isinstance(arguments, str | None):
        raise SpecError(f"config.arguments is {arguments!r}; write the script's command line as text, as in a shell")
    former, sys.argv = sys.argv, [sys.argv[0], *shlex.split(arguments or "")]
    try:
        yield
    finally:
        sys.argv = former
