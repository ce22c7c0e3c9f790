"""Elastic training as torchrun's documentation recommends it: restart from the newest checkpoint, saved every 10 steps.

torchrun --nproc-per-node 2 --max-restarts 100 tests/baselines/elastic_torchrun.py DATA OUT FOLDER
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.baselines.elastic_loop import loop
from tests.baselines.plain_loop import rows


def main() -> None:
    data, out, folder = sys.argv[1:]
    path = Path(folder) / "state.pt"
    dist.init_process_group("gloo")

    def save(state):  # type: ignore[no-untyped-def]
        if dist.get_rank() == 0:
            torch.save(state, path.with_suffix(".partial"))
            path.with_suffix(".partial").replace(path)

    loop(rows(data), Path(out), DistributedDataParallel, lambda: torch.load(path) if path.exists() else None, save)


if __name__ == "__main__":
    main()
