"""Stores on disk: the same bytes from any number of workers, whole or not there at all."""

import json
import os
import pickle
import resource
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers import D
from torchtune_packing.store import SampleReadError, StoreError, TokenStore
from torchtune_packing.store.__main__ import main
from torchtune_packing.store.cache import open_or_build
from torchtune_packing.store.files import FORMAT, partial_folders
from torchtune_packing.store.shards import build_in_shards

LENS = np.random.default_rng(0).integers(0, 40, 700).tolist()
ARRAYS = ("tokens", "labels", "seq_lens", "trained", "empty")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_store_on_disk_equals_the_one_in_memory(tmp_path: Path) -> None:
    stored = TokenStore.build(tmp_path / "s", D(LENS))
    in_memory = TokenStore.from_samples(D(LENS))
    for name in ARRAYS:
        mine, theirs = getattr(stored, name), getattr(in_memory, name)
        assert np.array_equal(mine, theirs) and mine.dtype == theirs.dtype
        # Anybody's numpy reads the files.
        assert np.array_equal(np.load(tmp_path / "s" / f"{name}.npy"), theirs)
    assert stored.accounting == in_memory.accounting
    assert stored.checksum == in_memory.checksum
    assert stored.checksum != TokenStore.from_samples(D(LENS[:-1])).checksum
    assert stored.checksum != TokenStore.from_samples(D(LENS), labels_are_shifted=True).checksum
    assert not stored.tokens.flags.writeable
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    stored.verify()


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
def test_the_bytes_do_not_depend_on_workers(tmp_path: Path) -> None:
    for workers in (0, 1, 3):
        TokenStore.build(
            tmp_path / str(workers), D(LENS), num_workers=workers, labels_are_shifted=True
        )
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == contents(tmp_path / "3")
    in_memory = TokenStore.from_samples(D(LENS), num_workers=2, labels_are_shifted=True)
    assert np.array_equal(in_memory.labels, np.load(tmp_path / "0" / "labels.npy"))


def test_workers_leave_the_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    TokenStore.build(tmp_path / "s", D(LENS), num_workers=2)
    assert torch.equal(torch.rand(1), expected)


def test_forked_workers_read_what_cannot_be_pickled() -> None:
    class Unpicklable(D):
        function = staticmethod(lambda: None)

        def __init__(self) -> None:
            super().__init__(LENS)
            self.generator = (x for x in [])

    ds = Unpicklable()
    with pytest.raises(Exception, match="pickle"):
        pickle.dumps(ds)
    assert len(TokenStore.from_samples(ds, num_workers=2)) == sum(n > 0 for n in LENS)


def test_a_stored_store_is_pickled_by_name(tmp_path: Path) -> None:
    store = TokenStore.build(tmp_path / "s", D(LENS))
    pickled = pickle.dumps(store)
    assert len(pickled) < 1000
    copy = pickle.loads(pickled)
    assert np.array_equal(copy.tokens, store.tokens) and copy.path == store.path


def test_memory_does_not_grow_with_the_tokens(tmp_path: Path) -> None:
    class Long(D):
        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            values = np.zeros(self.lens[index], dtype=np.int32)
            return {"tokens": values, "labels": values}

    peaks = []
    for count in (60, 240):
        tracemalloc.start()
        TokenStore.build(tmp_path / str(count), Long([50_000] * count))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
    # Chunks of a quarter million tokens, a few copies of one at a time: far from 96 MB.
    assert peaks[1] < 20e6


# ---- what goes wrong while it is built -----------------------------------------------------------


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Lets writes behind ``size`` bytes of a file fail, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("size", [100, 3_000_000])
def test_a_full_disk_leaves_nothing(tmp_path: Path, workers: int, size: int) -> None:
    ds = D([10_000] * 200)
    with file_size_limit(size), pytest.raises(OSError, match="could not be written: .*GB free"):
        TokenStore.build(tmp_path / "s", ds, num_workers=workers)
    assert list(tmp_path.iterdir()) == []
    assert len(TokenStore.build(tmp_path / "s", ds)) == 200


def test_a_cache_dir_that_is_a_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="there is no token store .*file/k yet, and none can be"):
        open_or_build(tmp_path / "file", "k", lambda: D([3]))


def as_nobody(function: object) -> str:
    """Runs a function in a child that may write nowhere; returns what it returned or raised."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            result = str(function())
            status = 0
        except BaseException as error:
            result = f"{type(error).__name__}: {error}"
            status = 0
        finally:
            os.write(write, result.encode())
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        result = pipe.read().decode()
    os.waitpid(child, 0)
    return result


def test_a_read_only_folder_gives_its_stores_but_takes_none(tmp_path_factory: object) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        open_or_build(folder, "there", lambda: D([3, 2]))
        for path in [Path(folder), *Path(folder).rglob("*")]:
            os.chmod(path, 0o555 if path.is_dir() else 0o444)
        found = as_nobody(lambda: open_or_build(folder, "there", lambda: D([3, 2])).tokens.tolist())
        assert found == "[100, 101, 102, 200, 201]"
        error = as_nobody(lambda: open_or_build(folder, "other", lambda: D([3, 2])))
        assert error.startswith("PermissionError") and "none can be built there" in error
        assert "Let cache_dir name a folder that can be written" in error
        os.chmod(f"{folder}/there", 0o755)
        os.truncate(f"{folder}/there/labels.npy", 130)
        error = as_nobody(lambda: open_or_build(folder, "there", lambda: D([3, 2])))
        assert "a damaged token store cannot be built again" in error
        assert "labels.npy has 130 bytes" in error and "Permission denied" in error
        os.chmod(folder, 0o000)
        if os.getuid() == 0:
            error = as_nobody(lambda: open_or_build(folder, "there", lambda: D([3, 2])))
            assert "cannot be looked at: Permission denied" in error
        os.chmod(folder, 0o755)
        for path in Path(folder).rglob("*"):
            os.chmod(path, 0o755)


@pytest.mark.skipif(os.getuid() != 0, reason="needs files of another user")
@pytest.mark.parametrize("name", ["meta.json", "tokens.npy", "empty.npy"])
def test_a_store_that_may_not_be_read_is_not_taken_for_a_damaged_one(name: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        before = open_or_build(folder, "key", lambda: D([3, 2])).path
        assert before is not None
        inode = (before / "tokens.npy").stat().st_ino
        for path in [Path(folder), *Path(folder).rglob("*")]:
            os.chmod(path, 0o777 if path.is_dir() else 0o666)
        os.chmod(before / name, 0o600)
        error = as_nobody(lambda: open_or_build(folder, "key", lambda: D([3, 2])))
        assert error.startswith("PermissionError") and f"may not be read ({name}" in error
        assert "have its owner allow that, or let cache_dir name another folder" in error
        assert (before / "tokens.npy").stat().st_ino == inode
        assert as_nobody(lambda: main(["ls", folder])) == "1"


@pytest.mark.parametrize("workers", [-1, 1.5, True, "2", None])
def test_a_number_of_workers_is_checked_before_the_data_is_loaded(
    tmp_path: Path, workers: object
) -> None:
    for build in (open_or_build, build_in_shards):
        with pytest.raises(ValueError, match=f"num_workers is {workers!r}; set it to a number of"):
            build(tmp_path, "key", lambda: pytest.fail("loaded"), num_workers=workers)


def test_a_folder_may_be_named_from_the_home_of_its_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_or_build("~/stores", "a", lambda: D([3])).path == tmp_path / "stores" / "a"
    assert build_in_shards("~/stores", "b", lambda: D([3])).path == tmp_path / "stores" / "b"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_named_and_leaves_nothing(tmp_path: Path, workers: int) -> None:
    class Bad(D):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            sample = super().__getitem__(index)
            return sample | {"labels": []} if index == 433 else sample

    with pytest.raises(ValueError, match=r"^sample 433 has \d+ tokens but 0 labels"):
        TokenStore.build(tmp_path / "s", Bad([5] * 700), num_workers=workers)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_source_that_raises_is_named_and_leaves_nothing(tmp_path: Path, workers: int) -> None:
    class Broken(D):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            if index == 433:
                raise OSError("the network is down")
            return super().__getitem__(index)

    with pytest.raises(SampleReadError, match=r"^reading sample 433 .*OSError: the network is"):
        TokenStore.build(tmp_path / "s", Broken([5] * 700), num_workers=workers)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_is_told(tmp_path: Path) -> None:
    class Deadly(D):
        def __getitem__(self, index: int) -> dict[str, list[int]]:
            if index == 433 and torch.utils.data.get_worker_info() is not None:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match="a worker process .* died .*fewer than num_workers=2"):
        TokenStore.build(tmp_path / "s", Deadly([5] * 700), num_workers=2)
    assert list(tmp_path.iterdir()) == []


KILLED_BUILD = """
import os, signal, sys
from tests.helpers import D
from torchtune_packing.store.cache import open_or_build

class Deadly(D):
    def __getitem__(self, index):
        if index == 650:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)

open_or_build(sys.argv[1], "key", lambda: Deadly([5000] * 700))
"""


def test_a_killed_build_leaves_no_store_and_the_next_one_tidies_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_BUILD, str(tmp_path)], cwd=Path.cwd())
    assert done.returncode == -signal.SIGKILL
    (leftover,) = partial_folders(tmp_path)
    assert (leftover / "tokens.npy").stat().st_size > 1_000_000
    assert not (tmp_path / "key").exists()
    other = tmp_path / ".tmp-key-2~host-1"
    other.mkdir()
    assert main(["ls", str(tmp_path)]) == 0
    assert "unfinished" in capsys.readouterr().out
    store = open_or_build(tmp_path, "key", lambda: D([3, 2]))
    assert len(store) == 2
    # What another key left, perhaps a build that still runs, is not touched.
    assert list(partial_folders(tmp_path)) == [other]
    assert main(["rm", "--partial", str(tmp_path)]) == 0
    assert list(partial_folders(tmp_path)) == []


ORPHANS = """
import sys, time
from tests.helpers import D
from torchtune_packing.store import TokenStore

class Slow(D):
    def __getitem__(self, index):
        print("working", flush=True)
        if index > 1000:
            time.sleep(600)
        return super().__getitem__(index)

TokenStore.build(sys.argv[1], Slow([5000] * 20_000), num_workers=2)
"""


def test_workers_end_with_a_build_that_is_killed(tmp_path: Path) -> None:
    """Both that sleep in a sample and that wait for a full pipe which nobody empties any more."""
    process = subprocess.Popen(
        [sys.executable, "-c", ORPHANS, str(tmp_path / "s")], stdout=subprocess.PIPE, cwd=Path.cwd()
    )
    assert process.stdout is not None and process.stdout.readline().startswith(b"working")
    process.kill()
    # Workers hold the other end of the pipe: it ends with the last of them.
    process.communicate(timeout=60)


# ---- damage --------------------------------------------------------------------------------------


def rewrite(path: Path, change: object) -> None:
    """Changes the bytes of a file."""
    path.write_bytes(change(bytearray(path.read_bytes())))


def flip(position: int) -> object:
    """A change of one byte."""

    def change(data: bytearray) -> bytearray:
        data[position] ^= 1
        return data

    return change


def edit_meta(**changes: object) -> object:
    """A change of entries of meta.json; None removes one."""

    def change(data: bytearray) -> bytes:
        meta = json.loads(data) | changes
        return json.dumps({k: v for k, v in meta.items() if v is not None}).encode()

    return change


def drop_checksum_of_tokens(data: bytearray) -> bytes:
    """A change of meta.json that only a comparison of the tokens would notice."""
    meta = json.loads(data)
    del meta["files"]["tokens.npy"]["sha256"]
    return json.dumps(meta).encode()


DAMAGE = {
    "tokens cut": ("tokens.npy", lambda data: data[:-4], "has .* bytes instead of"),
    "labels longer": ("labels.npy", lambda data: data + b"0000", "bytes instead of"),
    "tokens empty": ("tokens.npy", lambda data: b"", "has 0 bytes instead of"),
    "tokens gone": ("tokens.npy", None, "is missing"),
    "lengths gone": ("seq_lens.npy", None, "is missing"),
    "header of another type": (
        "tokens.npy",
        lambda data: data.replace(b"<i4", b"<f4", 1),
        "holds float32",
    ),
    "no header": ("labels.npy", lambda data: bytes(len(data)), "is not a readable array"),
    "pickled header": (
        "labels.npy",
        lambda data: data.replace(b"'<i4'", b"'|O' ", 1),
        "is not a readable array",
    ),
    "a length flipped": ("seq_lens.npy", flip(130), "does not match its checksum"),
    "trained flipped": ("trained.npy", flip(130), "does not match its checksum"),
    "meta gone": ("meta.json", None, "meta.json is missing"),
    "meta cut": ("meta.json", lambda data: data[:100], "is damaged"),
    "meta of something else": ("meta.json", lambda data: b"[]", "does not describe"),
    "meta without files": ("meta.json", edit_meta(files=None), "is incomplete"),
    "meta without a checksum": ("meta.json", drop_checksum_of_tokens, "is incomplete"),
    "meta without counts": ("meta.json", edit_meta(accounting={}), "is incomplete"),
    "another version": (
        "meta.json",
        edit_meta(format=FORMAT + 1),
        f"format {FORMAT + 1}, and this",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_B55_a_damaged_store_is_found_and_built_again(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, change, message = DAMAGE[kind]
    open_or_build(tmp_path, "key", lambda: D([3, 2]))
    if change is None:
        (tmp_path / "key" / name).unlink()
    else:
        rewrite(tmp_path / "key" / name, change)
    with pytest.raises(StoreError, match=message):
        TokenStore.open(tmp_path / "key")
    again = open_or_build(tmp_path, "key", lambda: D([3, 2]))
    assert again.tokens.tolist() == [100, 101, 102, 200, 201]
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1 and "damaged token store is built again" in warnings[0]
    again.verify()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".locks", "key"]


def test_a_folder_without_anything_in_it_is_built(tmp_path: Path) -> None:
    (tmp_path / "key").mkdir()
    assert len(open_or_build(tmp_path, "key", lambda: D([3, 2]))) == 2


def test_lengths_of_another_store_are_found(tmp_path: Path) -> None:
    TokenStore.build(tmp_path / "a", D([3, 2]))
    TokenStore.build(tmp_path / "b", D([2, 2]))
    metas = [json.loads((tmp_path / name / "meta.json").read_text()) for name in "ab"]
    metas[0]["files"]["seq_lens.npy"] = metas[1]["files"]["seq_lens.npy"]
    (tmp_path / "a" / "meta.json").write_text(json.dumps(metas[0]))
    (tmp_path / "b" / "seq_lens.npy").rename(tmp_path / "a" / "seq_lens.npy")
    with pytest.raises(StoreError, match="5 tokens and 5 labels for documents of 4 tokens"):
        TokenStore.open(tmp_path / "a")


def test_verify_finds_a_changed_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = TokenStore.build(tmp_path / "one", D(LENS))
    TokenStore.build(tmp_path / "two", D(LENS))
    assert main(["verify", str(tmp_path)]) == 0
    rewrite(tmp_path / "one" / "tokens.npy", flip(5000))
    TokenStore.open(tmp_path / "one")
    with pytest.raises(StoreError, match="tokens.npy does not match its checksum"):
        store.verify()
    capsys.readouterr()
    assert main(["verify", str(tmp_path)]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("damaged") and "tokens.npy" in out[0] and out[1].startswith("ok")
    assert main(["verify", str(tmp_path / "two")]) == 0


# ---- the command line ----------------------------------------------------------------------------


def test_the_command_line_lists_and_removes(tmp_path: Path) -> None:
    open_or_build(tmp_path, "alpaca-1", lambda: D([3, 0, 2]))
    open_or_build(tmp_path, "broken", lambda: D([3]))
    (tmp_path / "broken" / "labels.npy").unlink()

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torchtune_packing.store", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    listed = run("ls", str(tmp_path))
    assert listed.returncode == 1 and listed.stderr == ""
    header, good, bad = listed.stdout.splitlines()
    assert good.split() == ["3", "5", "0.0", "alpaca-1"]
    assert bad.split()[0] == "damaged" and "labels.npy is missing" in bad
    assert main(["rm", str(tmp_path / "broken")]) == 0
    assert main(["ls", str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [".locks", "alpaca-1"]


def test_one_store_is_listed_by_its_own_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_or_build(tmp_path, "alpaca-1", lambda: D([3, 0, 2]))
    assert main(["ls", str(store.path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["3", "5", "0.0", "alpaca-1"]


def test_shards_of_a_build_that_broke_off_are_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="sample 2 has no 'labels'"):
        build_in_shards(tmp_path, "key", lambda: [*D([3, 3]), {"tokens": [1]}], shard_size=1)
    assert main(["ls", str(tmp_path)]) == 0
    unfinished = capsys.readouterr().out.splitlines()[1].split()
    assert (unfinished[0], unfinished[-1]) == ("unfinished", ".shards-key-1")
    assert main(["rm", "--partial", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("way", ["link", "dot"])
def test_a_store_that_is_named_by_a_link_is_removed_itself(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, cache = tmp_path / "disk", tmp_path / "cache"
    TokenStore.build(disk / "store", D([3]))
    cache.mkdir()
    (cache / "key").symlink_to(disk / "store")
    if way == "dot":
        monkeypatch.chdir(disk / "store")
    assert main(["rm", "." if way == "dot" else str(cache / "key")]) == 0
    assert list(disk.iterdir()) == []
    assert (cache / "key").is_symlink() == (way == "dot")


def test_nothing_is_removed_unless_all_that_is_named_is_a_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = open_or_build(tmp_path, "key", lambda: D([3])).path
    other = tmp_path / "other"
    other.mkdir()
    (other / "meta.json").write_text("{}")
    (other / "precious.txt").write_text("x")
    for wrong, message in ((tmp_path / "no", "has no meta.json"), (other, "holds 'precious.txt'")):
        assert main(["rm", str(store), str(wrong)]) == 1
        assert f"{message}" in capsys.readouterr().err
    assert (other / "precious.txt").exists()
    TokenStore.open(tmp_path / "key")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rm", "--partial", "{}/no"], "is not a folder"),
        (["rm", "{}/no"], "is not a token store (it has no meta.json); nothing is removed"),
        (["rm", "{}"], "is not a token store"),
        (["ls", "{}/no"], "is not a folder"),
        (["verify", "{}"], "holds no token store"),
    ],
)
def test_the_command_line_refuses_with_one_sentence(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious.txt").write_text("x")
    assert main([argument.format(tmp_path) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert (tmp_path / "precious.txt").exists()
