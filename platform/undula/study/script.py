"""Entry point of a study's script: `study_main` conducts a study of a job."""

import sys
from collections.abc import Sequence
from pathlib import Path

from undula.config.environment import with_secrets
from undula.config.job import script_of
from undula.driver.launchers import end_all_but_first
from undula.driver.script import run_script
from undula.errors import SpecError, one_sentence
from undula.masking.output import mask_output
from undula.study.load import load_study


def study_main(argv: Sequence[str] | None = None) -> None:
    """Conduct a study: run the script of its job, whose `main` then trains the study's trials.

    The process exits with status 2 and a message of one sentence if the input is wrong.

    Args:
        argv: Command line, by default that of this process: STUDY.yaml [--fresh] [key=value ...]. The script must lie beside the job's
            YAML and have the same name.
    """
    mask_output()
    launch = end_all_but_first()
    study, *rest = [*(sys.argv[1:] if argv is None else argv), ""]
    with one_sentence():
        if not study or study.startswith("-"):
            raise SpecError("command line: the study is missing; give STUDY.yaml as the first argument")
        if launch:
            launch.require_cluster()
        overrides = [argument for argument in rest if argument and not argument.startswith("-")]
        script = script_of(load_study(Path(study), with_secrets(overrides)).file)
        run_script(script, ["--study", study, *(argument for argument in rest if argument)])
