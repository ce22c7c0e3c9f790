"""`python -m undula.driver SCRIPT ARGUMENTS...` runs the script of a job as its driver. It imports little before the script does, which may
set variables that libraries read when they are imported. A fork, on a cluster of the job's own, has imported torch and Ray already."""

import sys
from pathlib import Path

from undula.driver.script import run_submitted
from undula.errors import one_sentence
from undula.masking.output import mask_output

if not sys.flags.safe_path:
    sys.path.pop(0)  # the working directory, which Python puts there because of -m
mask_output()
with one_sentence():
    run_submitted(Path(sys.argv[1]).absolute(), sys.argv[2:])
