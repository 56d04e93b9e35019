"""What the processes do that the tests of shared stores start."""

import datetime
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.helpers import D
from torchtune_packing import PackedDataset
from torchtune_packing.store.shards import build_in_shards


class Slow(D):
    """Sleeps for every sample and leaves a line for each one that it gives."""

    def __init__(self, lens: list[int], seconds: float, log: Path) -> None:
        super().__init__(lens)
        self.seconds = seconds
        self.log = log / f"read-{os.getpid()}"

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        time.sleep(self.seconds)
        with open(self.log, "a", encoding="utf-8") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


def training_start(folder: Path) -> None:
    """A rank that packs in a cache of its node, then trains: a collective right behind it.

    Args come as the launcher sets them; ``NODE`` is which machine this rank plays to be on.
    """
    rank, node = int(os.environ["RANK"]), os.environ["NODE"]
    minute = datetime.timedelta(seconds=60)
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, 4, is_master=rank == 0, timeout=minute)
    # All there before the short limit counts, however long their imports took.
    store.set(f"here-{rank}", "")
    store.wait([f"here-{other}" for other in range(4)], minute)
    limit = datetime.timedelta(seconds=5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4, timeout=limit)
    ds = PackedDataset(
        Slow([3, 2, 4, 5], 2.0, folder),
        max_seq_len=8,
        cache_dir=folder / f"node-{node}",
        cache_key="key",
    )
    ones = torch.ones(1)
    dist.all_reduce(ones)
    result: dict[str, Any] = {"ranks": ones.item(), "packs": [p["tokens"].tolist() for p in ds]}
    (folder / f"result-{rank}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


class Deadly(Slow):
    """Kills the process that reads sample 150 for the first time."""

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        mark = self.log.parent / "killed"
        if index == 150 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


LENS = [(7 * i) % 13 for i in range(300)]


def shards(folder: Path) -> None:
    """A process of a build in shards."""
    store = build_in_shards(
        folder / "cache", "key", lambda: Deadly(LENS, 0.005, folder), shard_size=20
    )
    (folder / f"done-{os.environ['RANK']}").write_text(str(store.accounting.num_samples))


if __name__ == "__main__":
    {"training_start": training_start, "shards": shards}[sys.argv[1]](Path(sys.argv[2]))
