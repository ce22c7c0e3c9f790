"""Reference runs: a job trained in forks of this process, without Ray. They have the record and the ledger that every run has.

`python tests/alone.py jobs/JOB.py runs=FOLDER name=NAME ...` trains one on the command line.
"""

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from ranks import forks

from undula.storage import Store, open_store

LIMIT_S = 300.0


def train_alone(
    command: Sequence[str], world_size: int = 1, until: int | None = None, limit_s: float | None = LIMIT_S
) -> Store:
    """Train the job of `python script overrides...` and return its run directory.

    Args:
        command: Command that would start the job's driver.
        world_size: Number of ranks.
        until: Number of steps after which the ranks save a checkpoint and end; by default, they train to the end of the plan.
        limit_s: Maximum time in seconds; None for none.
    """
    _, script, *overrides = command
    with TemporaryDirectory() as folder:
        ranks = [
            forks().Process(target=_train, args=(script, overrides, rank, world_size, f"{folder}/store", until))
            for rank in range(world_size)
        ]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(limit_s)
            rank.kill()
            assert rank.exitcode == 0, "a rank of the reference run failed; its traceback is above"
    values = dict(each.split("=", 1) for each in overrides if "=" in each)
    return open_store(f"{values['runs']}/{values['name']}")


def _train(script: str, overrides: list[str], rank: int, world_size: int, rendezvous: str, until: int | None) -> None:
    import torch

    from undula.adapters.script import Script, ScriptConfig
    from undula.config.job import load_spec
    from undula.driver.preflight import check_job, examine
    from undula.driver.record import job_of, record_job
    from undula.testing.watched import Watched
    from undula.train.single_process import SingleProcess

    torch.set_num_threads(1)  # as in a worker with one CPU
    sys.path.insert(0, str(Path(script).parent))
    defined = runpy.run_path(script)
    launched = Script(defined["main"]) if "launch" in defined else None
    settings = {"settings": launched.settings} if launched else {}
    config_type = ScriptConfig if launched else defined.get("Config")
    loaded = load_spec(Path(script).with_suffix(".yaml"), overrides, config_type, **settings)
    examined = examine(launched or defined["train"], loaded, check_job(loaded))
    function = Script(defined["main"]) if launched else defined["train"]
    if rank == 0:
        job = record_job(loaded, examined.plan, open_store(loaded.spec.run_url), examined.script_data).job
    else:
        job = job_of(loaded, "", script_data=examined.script_data)

    def visit(done: int, run: object) -> None:
        if done + 1 == until:
            process.leave(saves=True)

    train = function if until is None else Watched(function, visit)
    process = SingleProcess(train, job, lambda message: None, rank, world_size, rendezvous if world_size > 1 else None)
    process()


if __name__ == "__main__":
    train_alone(sys.argv, limit_s=None)
