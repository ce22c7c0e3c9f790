"""Ray Train's torchft mode, as in Ray's example: each worker is a replica, the head runs the lighthouse, and survivors continue.

python tests/baselines/elastic_torchft.py DATA OUT FOLDER
"""

import sys
from pathlib import Path

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.torch.torchft_config import TorchftConfig


def train(config: dict[str, str]) -> None:
    from datetime import timedelta

    import ray.train
    import torch
    import torch.nn.functional as F
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
    from torchft.checkpointing.pg_transport import PGTransport

    sys.path.insert(0, config["root"])
    from tests.baselines.elastic_loop import GLOBAL_BATCH, GPT, GPTConfig, write_step
    from tests.baselines.plain_loop import adamw, rows

    torch.manual_seed(0)
    model = GPT(GPTConfig())
    optimizer = adamw(model, 3e-4)

    def load(state):  # type: ignore[no-untyped-def]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    # Timeouts and transport are those of Ray's example.
    group = ProcessGroupGloo(timeout=timedelta(seconds=30))
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        world_size=1,
        rank=0,
        replica_id=f"replica_{ray.train.get_context().get_world_rank()}",
        timeout=timedelta(seconds=60),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=30), device=torch.device("cpu")),
    )
    replicated, managed = DistributedDataParallel(manager, model), Optimizer(manager, optimizer)
    text = rows(config["data"])
    while True:
        managed.zero_grad()  # which begins the quorum of the step
        step, world_size = manager.current_step(), manager.num_participants()
        rank = manager.participating_rank() or 0
        chosen = torch.randint(len(text), (GLOBAL_BATCH,), generator=torch.Generator().manual_seed(step))
        batch = text[chosen[rank::world_size]].long()
        loss = F.cross_entropy(replicated(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        managed.step()
        loss.item()
        if rank == 0 and manager.current_step() > step:
            write_step(Path(config["out"]), step, world_size)


def main() -> None:
    data, out, folder = sys.argv[1:]
    TorchTrainer(
        train,
        train_loop_config={"data": data, "out": out, "root": str(Path(__file__).parents[2])},
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1}),
        torch_config=TorchftConfig(lighthouse_kwargs={"min_replicas": 1}, backend="gloo"),
        run_config=RunConfig(name="torchft", storage_path=folder, failure_config=FailureConfig(max_failures=-1)),
    ).fit()


if __name__ == "__main__":
    main()
