"""Stores that several processes want: one build a node, or one build by all of them."""

import json
import logging
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.helpers import D
from tests.store_processes import LENS
from tests.test_store_files import file_size_limit
from torchtune_packing import PackedDataset
from torchtune_packing.store import TokenStore
from torchtune_packing.store.cache import build_lock, open_or_build
from torchtune_packing.store.shards import build_in_shards, shard_size_for

REPO = Path(__file__).resolve().parent.parent


def free_port() -> str:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def reads(folder: Path) -> dict[str, list[int]]:
    """Samples that each process read, by process."""
    return {
        path.name: [int(line) for line in path.read_text().split()]
        for path in folder.glob("read-*")
    }


# ---- one build per node --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks on each of two make-believe nodes; packing takes 8 s, a collective at most 5 s."""
    folder = tmp_path_factory.mktemp("nodes")
    common = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
        "WORLD_SIZE": "4",
        "OMP_NUM_THREADS": "1",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.store_processes", "training_start", str(folder)],
            cwd=REPO,
            env=common | {"RANK": str(r), "LOCAL_RANK": str(r % 2), "NODE": str(r // 2)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for r in range(4)
    ]
    try:
        for rank, process in enumerate(processes):
            _, errors = process.communicate(timeout=120)
            assert process.returncode == 0, f"rank {rank}:\n{errors}"
    finally:
        for process in processes:
            process.kill()
    return folder


def test_B26_packing_may_take_longer_than_a_collective(two_nodes: Path) -> None:
    results = [json.loads((two_nodes / f"result-{rank}.json").read_text()) for rank in range(4)]
    assert all(result["ranks"] == 4 for result in results)
    assert all(result["packs"] == results[0]["packs"] for result in results)
    assert len(results[0]["packs"]) == 2


def test_B27_each_node_packs_once(two_nodes: Path) -> None:
    assert list(reads(two_nodes).values()) == [[0, 1, 2, 3]] * 2
    for node in "01":
        assert sorted(p.name for p in (two_nodes / f"node-{node}").iterdir()) == [".locks", "key"]


def build_and_count(folder: Path, counter: Path) -> None:
    """One of the processes of the next test."""

    def load() -> D:
        with open(counter, "a", encoding="utf-8") as file:
            file.write("x")
        time.sleep(0.3)
        return D([3, 2])

    assert open_or_build(folder, "key", load).tokens.tolist() == [100, 101, 102, 200, 201]


def test_processes_that_want_one_key_at_once_build_it_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=build_and_count, args=(tmp_path / "cache", tmp_path / "count"))
        for _ in range(4)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "count").read_text() == "x"


def test_waiting_is_told_and_ends_when_the_builder_gives_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release = threading.Event()
    taken = threading.Event()

    def hold() -> None:
        with build_lock(tmp_path / "key"):
            taken.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert taken.wait(60)
    with caplog.at_level(logging.INFO, logger="torchtune_packing"):
        with build_lock(tmp_path / "key", wait=False) as is_held:
            assert not is_held
        waiter = threading.Thread(target=lambda: open_or_build(tmp_path, "key", lambda: D([3])))
        waiter.start()
        for _ in range(600):
            if "Waiting since" in caplog.text:
                break
            time.sleep(0.1)
        release.set()
        waiter.join(60)
        holder.join(60)
    assert f"for another process that builds {tmp_path / 'key'}" in caplog.text
    assert (tmp_path / "key" / "meta.json").exists()


# ---- keys of Python callers ----------------------------------------------------------------------


def packed(folder: Path, lens: list[int], key: str | None = "key", **kwargs: object):
    """A packed data set with a store in a folder."""
    arguments = {"max_seq_len": 64, "strategy": "sequential"} | kwargs
    return PackedDataset(D(lens), cache_dir=folder, cache_key=key, **arguments)


def test_the_second_start_reads_the_store(tmp_path: Path) -> None:
    first = packed(tmp_path, [3, 0, 2])
    again = packed(tmp_path, [3, 0, 2], num_workers=1)
    assert again.store.path == first.store.path == tmp_path / "key"
    assert again[0]["tokens"].tolist() == [100, 101, 102, 300, 301]


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        ([3, 0, 2, 4], "it holds 3 samples, the data set has 4"),
        ([3, 0], "it holds 3 samples, the data set has 2"),
    ],
)
def test_B55_a_key_that_stayed_when_the_data_changed_is_refused(
    tmp_path: Path, lens: list[int], message: str
) -> None:
    packed(tmp_path, [3, 0, 2])
    with pytest.raises(ValueError, match=f"made from other data .{message}.; change cache_key"):
        packed(tmp_path, lens)


def test_a_store_that_is_found_spares_every_read(tmp_path: Path) -> None:
    class Counted(D):
        reads = 0

        def __getitem__(self, index: int) -> dict[str, list[int]]:
            Counted.reads += 1
            return super().__getitem__(index)

    for _ in range(2):
        ds = PackedDataset(Counted([3, 2]), max_seq_len=8, cache_dir=tmp_path, cache_key="key")
        assert len(ds[0]["tokens"]) == 5
    assert Counted.reads == 2


def test_labels_of_another_kind_are_refused(tmp_path: Path) -> None:
    packed(tmp_path, [3, 2])
    with pytest.raises(ValueError, match="built with labels_are_shifted=False, now it is True"):
        packed(tmp_path, [3, 2], labels_are_shifted=True)


@pytest.mark.parametrize(
    ("folder", "key", "message"),
    [
        ("cache", None, "needs a cache_key: a D does not tell when its tokens change"),
        (None, "key", "cache_key='key' names a store, but there is no cache_dir"),
        ("cache", "../up", "cache_key='../up' cannot name a folder"),
        ("cache", ".hidden", "cannot name a folder"),
        ("cache", "", "cannot name a folder"),
        ("cache", "a~b", "cannot name a folder"),
        ("cache", 7, "cache_key=7 cannot name a folder"),
    ],
)
def test_keys_that_cannot_be_are_refused(
    tmp_path: Path, folder: str | None, key: object, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        packed(folder and tmp_path / folder, [3, 2], key)
    assert not (tmp_path / "cache").exists()


# ---- one build by many processes -----------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def launch(folder: Path) -> int:
    """Three processes under torch's launcher; its exit status."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "3"]
    command += ["--master_port", free_port(), "-m", "tests.store_processes"]
    command += ["shards", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=120
    )
    return done.returncode


def test_a_build_of_three_processes_survives_the_death_of_one(tmp_path: Path) -> None:
    assert launch(tmp_path) != 0
    assert not (tmp_path / "cache" / "key").exists()
    root = tmp_path / "cache" / ".shards-key-20"
    finished = [int(path.name) for path in root.iterdir() if path.name[0] != "."]
    assert 0 < len(finished) < 15
    before = {name: len(samples) for name, samples in reads(tmp_path).items()}

    assert launch(tmp_path) == 0
    again = [i for name, samples in reads(tmp_path).items() if name not in before for i in samples]
    kept = {i for shard in finished for i in range(20 * shard, 20 * shard + 20)}
    assert not kept & set(again), "finished shards were read again"
    assert sorted(again) == [i for i in range(300) if i not in kept]

    alone = tmp_path / "alone"
    open_or_build(alone, "key", lambda: D(LENS))
    assert contents(alone / "key") == contents(tmp_path / "cache" / "key")
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [".locks", "key"]
    assert [(tmp_path / f"done-{rank}").read_text() for rank in range(3)] == ["300"] * 3


@pytest.mark.parametrize("shifted", [False, True])
def test_shards_of_any_size_give_the_bytes_of_one_build(tmp_path: Path, shifted: bool) -> None:
    open_or_build(tmp_path / "one", "key", lambda: D(LENS), labels_are_shifted=shifted)
    for size in (13, 150, 300, 1000):
        build_in_shards(
            tmp_path / str(size),
            "key",
            lambda: D(LENS),
            rank=size % 3,
            world_size=3,
            shard_size=size,
            num_workers=int(size == 150),
            labels_are_shifted=shifted,
        )
        assert contents(tmp_path / str(size) / "key") == contents(tmp_path / "one" / "key")


def test_a_finished_store_is_not_loaded_again(tmp_path: Path) -> None:
    build_in_shards(tmp_path, "key", lambda: D([3, 2]))
    store = build_in_shards(tmp_path, "key", lambda: pytest.fail("loaded again"))
    assert len(store) == 2


def interrupted(folder: Path) -> Path:
    """A build of six shards that broke off in the last; returns the folder of its shards."""

    class Broken(D):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            if index == 55:
                raise OSError("gone")
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match="reading sample 55 .*gone"):
        build_in_shards(folder, "key", lambda: Broken(LENS[:60]), shard_size=10)
    return folder / ".shards-key-10"


@pytest.mark.parametrize("when", ["size", "token"])
def test_a_damaged_shard_is_built_again(
    tmp_path: Path, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    shard = interrupted(tmp_path) / "00002" / "tokens.npy"
    data = bytearray(shard.read_bytes())
    data[140] ^= 1
    shard.write_bytes(data if when == "token" else data[:-4])
    store = build_in_shards(tmp_path, "key", lambda: D(LENS[:60]), shard_size=10)
    assert np.array_equal(store.tokens, TokenStore.from_samples(D(LENS[:60])).tokens)
    assert len([r for r in caplog.records if "A shard is built again" in r.message]) == 1


@pytest.mark.parametrize("change", ["grown", "shrunk", "shifted"])
def test_B55_shards_of_other_data_under_the_same_key_are_not_taken(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A key that a user gave may stay when the data changes; the last shard was a short one."""
    first = {"grown": 45, "shrunk": 70, "shifted": 60}[change]

    class Broken(D):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            if index == 25:
                raise OSError("gone")
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match="reading sample 25"):
        # This process of five begins with the last shard, so that it is one of the finished.
        build_in_shards(
            tmp_path, "key", lambda: Broken(LENS[:first]), shard_size=10, rank=4, world_size=5
        )
    kept = {path.name for path in (tmp_path / ".shards-key-10").iterdir()} - {".locks"}
    assert kept and "00004" in kept
    ds, shifted = D(LENS[:55]), change == "shifted"
    store = build_in_shards(tmp_path, "key", lambda: ds, shard_size=10, labels_are_shifted=shifted)
    expected = TokenStore.from_samples(ds, labels_are_shifted=shifted)
    assert store.checksum == expected.checksum and store.accounting == expected.accounting
    again = [r.message for r in caplog.records if "A shard is built again" in r.message]
    assert len(again) == {"grown": 1, "shrunk": 1, "shifted": len(kept)}[change]


def test_a_disk_that_fills_up_while_shards_are_joined_keeps_them(tmp_path: Path) -> None:
    # 100 samples of 100 tokens: shards of 10 take 4 kB a file, the store 40 kB.
    with file_size_limit(20_000), pytest.raises(OSError, match="could not be written: .*GB free"):
        build_in_shards(tmp_path, "key", lambda: D([100] * 100), shard_size=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".locks", ".shards-key-10"]

    class Unread(D):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            raise AssertionError("read again")

    assert len(build_in_shards(tmp_path, "key", lambda: Unread([100] * 100), shard_size=10)) == 100
    assert sorted(path.name for path in tmp_path.iterdir()) == [".locks", "key"]


def test_shards_of_another_size_are_not_mixed_in(tmp_path: Path) -> None:
    interrupted(tmp_path)
    store = build_in_shards(tmp_path, "key", lambda: D(LENS[:60]), shard_size=20)
    assert np.array_equal(store.tokens, TokenStore.from_samples(D(LENS[:60])).tokens)


def test_a_stream_cannot_be_built_in_shards(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a generator has no length .* use a map-style data set"):
        build_in_shards(tmp_path, "key", lambda: (x for x in []))


def test_a_data_set_without_samples_is_a_store_without_documents(tmp_path: Path) -> None:
    assert len(build_in_shards(tmp_path, "key", lambda: D([]))) == 0


def test_shard_sizes_depend_on_the_data_set_only() -> None:
    sizes = {n: shard_size_for(n) for n in (1, 10_000, 2_280_000, 1_000_000_000)}
    assert sizes == {1: 1000, 10_000: 1000, 2_280_000: 8907, 1_000_000_000: 50_000}
