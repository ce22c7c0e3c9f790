"""What a change of group costs before a byte of the state moves, and what the head does with replicas, on many ranks.

    python -m tests.baselines.bench_restore
    python -m tests.baselines.bench_restore --ranks 64 --parameters 4000

One process does what each rank does by itself after a rank of a sharded model was replaced: it reads what all ranks have sent, decides
which state is restored and from which ranks, and plans its moves. Then it finds out which pieces it writes into a checkpoint, and does what
the head does when the replicas of all ranks arrive.
Times are those of the processor.
"""

import argparse
import gc
import json
import pickle
import time

from tests import many_ranks
from tests.baselines.result import print_and_write
from undula.recovery.offers import described
from undula.recovery.replica_store import Replica, ReplicaStore
from undula.recovery.snapshot import FORMAT
from undula.state.checkpoint_files import share_of, wanted_chunks
from undula.state.extents import Extent


def restored(ranks: int, parameters: int) -> dict[str, float]:
    """Return the seconds and bytes of one rank in a restore."""
    whole = many_ranks.holding(0, ranks, parameters)
    sent = many_ranks.descriptions(ranks, parameters)
    gc.collect()
    began = time.process_time()
    pairs, names = described(many_ranks.answers(whole))
    needed, _ = many_ranks.needs(ranks // 2, ranks - 1, sent, whole)
    moves = many_ranks.moves(ranks // 2, needed, whole)
    seconds = time.process_time() - began
    size = len(pickle.dumps(pairs)) + len(pickle.dumps(needed))
    return {
        "seconds of a rank": seconds,
        "KiB that a rank sends": size / 2**10,
        "KiB of names, sent once": len(pickle.dumps(names)) / 2**10,
        "KiB that a rank gets": (ranks * size + len(pickle.dumps(names))) / 2**10,
        "moves of a rank": len(moves),
    }


def checkpoint(ranks: int, parameters: int) -> dict[str, float]:
    """Return the seconds of one rank, and the bytes that it gets, to find out which pieces it writes into a checkpoint."""
    held = [many_ranks.holding(rank, ranks, parameters) for rank in range(ranks)]
    sent = [pickle.dumps(Extent.of(each)[0]) for each in held]
    gc.collect()
    began = time.process_time()
    own, names = Extent.of(held[1])
    share_of(1, [pickle.loads(each) for each in sent], {own.names: names})
    found = {
        "seconds of a rank for a checkpoint": time.process_time() - began,
        "KiB that a rank gets for it": sum(map(len, sent)) / 2**10,
    }
    commit, pieces = many_ranks.committed(ranks, parameters), many_ranks.wanted_pieces(1, ranks - 1, parameters)
    began = time.process_time()
    wanted_chunks(commit, pieces)
    return found | {
        "KiB of a checkpoint's commit.json": len(json.dumps([commit.tensors, commit.chunks])) / 2**10,
        "seconds until a rank knows what it reads": time.process_time() - began,
    }


def replicas(ranks: int, parameters: int) -> dict[str, float]:
    """Return the seconds that the head needs for replicas: their descriptions in a thread, and the rest in its event loop."""
    metas = [_meta(rank, ranks, parameters) for rank in range(ranks)]
    store, read, kept = ReplicaStore(), [0.0], [0.0]
    gc.collect()
    gc.freeze()
    for rank, meta in enumerate(metas):
        times = [time.process_time()]
        replica = Replica.of(meta, bytearray())
        times.append(time.process_time())
        store.keep(f"rank {rank}", replica, ranks)
        times.append(time.process_time())
        read.append(times[1] - times[0])
        kept.append(times[2] - times[1])
    assert store.newest_whole == (1, 8)
    return {"ms to read a replica, at most": 1e3 * max(read), "ms of the head's loop, at most": 1e3 * max(kept)}


def _meta(rank: int, ranks: int, parameters: int) -> bytes:
    """Return the description of a rank's replica."""
    held = many_ranks.holding(rank, ranks, parameters)
    tensors = {
        name: {
            "dtype": spec.dtype,
            "shape": list(spec.shape),
            "offsets": list(held.boxes[name][0]),
            "sizes": list(held.boxes[name][1]),
            "strides": [1] * len(spec.shape),
            "replicated": not spec.shape,
            "at": 0,
        }
        for name, spec in held.expected.items()
    }
    fixed = {"attempt": 1, "step": 8, "format": FORMAT, "plan_digest": "", "values": {}, "rows": []}
    return json.dumps({**fixed, "tensors": tensors}).encode()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--parameters", type=int, default=1000, help="each has four tensors in the state")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size = options.ranks, options.parameters
    print_and_write("restore", [restored(*size) | checkpoint(*size) | replicas(*size) for _ in range(options.rounds)])


if __name__ == "__main__":
    main()
