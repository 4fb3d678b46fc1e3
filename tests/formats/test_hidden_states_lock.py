"""Per-request files: who may read them when, and what becomes of requests and writers that go wrong."""

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from speculators.errors import RequestError, StoreError
from speculators.formats.hidden_states import (
    HiddenStatesTimeoutError,
    HiddenStatesWriter,
    cleanup_hidden_states,
    flock_unsupported,
    load_hidden_states,
    sweep,
)
from tests.formats.request_files import LAYERS, content, held, write


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[HiddenStatesWriter]:
    with HiddenStatesWriter(tmp_path / "shared", num_writer_threads=2) as made:
        yield made


# Locks


def test_the_lock_is_held_from_reservation_until_the_file_is_there(writer) -> None:
    path = writer.reserve("r")
    lock = Path(f"{path}.lock")
    assert held(lock)
    assert not path.exists()
    go = threading.Event()
    states, ids = content()
    future = writer.submit(path, states, ids, LAYERS, ready=go.wait)
    with pytest.raises(HiddenStatesTimeoutError, match="not finished in time"):
        load_hidden_states(path, timeout=0.05)
    threading.Timer(0.1, go.set).start()
    assert torch.equal(load_hidden_states(path)["hidden_states"], states)
    assert future.done() or future.result(10)
    assert not held(lock)
    assert lock.exists()


def test_cleanup_removes_the_lock_always_and_the_file_unless_kept(writer) -> None:
    path = write(writer, "r")
    cleanup_hidden_states(path, keep_hidden_states=True)
    assert (path.exists(), Path(f"{path}.lock").exists()) == (True, False)
    assert load_hidden_states(path).keys() == {"hidden_states", "token_ids"}
    cleanup_hidden_states(path)
    cleanup_hidden_states(path)
    assert list(path.parent.iterdir()) == []


def test_without_locks_a_reader_waits_for_the_file(tmp_path) -> None:
    with HiddenStatesWriter(tmp_path, use_synchronization_lock=False) as writer:
        path = writer.reserve("r")
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(StoreError, match="no lock says that it is being written"):
            load_hidden_states(path)
        with pytest.raises(TimeoutError, match="not finished in time"):
            load_hidden_states(path, timeout=0.05)
        states, ids = content()
        threading.Timer(0.1, writer.submit, (path, states, ids, LAYERS)).start()
        assert torch.equal(load_hidden_states(path, timeout=10)["hidden_states"], states)
    assert [file.name for file in tmp_path.iterdir()] == ["r.safetensors"]


def test_without_flock_a_marker_stands_in_and_a_warning_says_so(tmp_path, caplog) -> None:
    with HiddenStatesWriter(tmp_path, flock=flock_unsupported) as writer:
        path, again = writer.reserve("r"), writer.reserve("again")
        assert sorted(file.name for file in tmp_path.iterdir()) == [
            "again.safetensors.writing",
            "r.safetensors.writing",
        ]
        assert caplog.text.count("has no file locks") == 1
        with pytest.raises(HiddenStatesTimeoutError):
            load_hidden_states(path, timeout=0.05)
        assert sweep(tmp_path, 0, flock=flock_unsupported).locks == 0
        states, ids = content()
        threading.Timer(0.1, writer.submit, (path, states, ids, LAYERS)).start()
        assert torch.equal(load_hidden_states(path)["hidden_states"], states)
        writer.release(again)
    assert [file.name for file in tmp_path.iterdir()] == ["r.safetensors"]


def test_a_marker_of_a_dead_process_is_no_writer(tmp_path) -> None:
    path = tmp_path / "r.safetensors"
    script = (
        "import sys; from speculators.formats.hidden_states import *\n"
        "HiddenStatesWriter(sys.argv[1], flock=flock_unsupported).reserve('r')\nimport os; os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False).returncode == 9
    assert Path(f"{path}.writing").exists()
    with pytest.raises(StoreError, match="its writer died"):
        load_hidden_states(path)
    assert sweep(tmp_path, 0).locks == 1
    assert list(tmp_path.iterdir()) == []


def test_a_reader_on_a_mount_without_flock_still_reads(writer) -> None:
    path = write(writer, "r")
    assert load_hidden_states(path, timeout=1, flock=flock_unsupported).keys() == {"hidden_states", "token_ids"}


def test_two_requests_cannot_have_one_path(tmp_path) -> None:
    with HiddenStatesWriter(tmp_path) as writer, HiddenStatesWriter(tmp_path) as other:
        writer.reserve("r")
        for one in (writer, other):
            with pytest.raises(RequestError, match="by another request"):
                one.reserve("r")


def test_what_a_reserved_path_held_before_is_never_read(tmp_path) -> None:
    with HiddenStatesWriter(tmp_path) as writer:
        path = write(writer, "r", seed=1)
        assert writer.reserve("r") == path
        writer.release(path)
        assert list(tmp_path.iterdir()) == []
        with pytest.raises(StoreError, match="does not exist"):
            load_hidden_states(path)


# Requests that end otherwise


def test_released_requests_leave_neither_file_nor_lock_nor_descriptor(writer) -> None:
    before = len(os.listdir("/proc/self/fd"))
    early, late = writer.reserve("early"), writer.reserve("late")
    writer.release(early)
    writer.release(early)
    go = threading.Event()
    future = writer.submit(late, *content(), LAYERS, ready=go.wait)
    writer.release(late)
    go.set()
    future.exception(10)
    writer.release(late)
    assert list(early.parent.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_reader_of_a_released_request_is_told(writer) -> None:
    path = writer.reserve("r")
    threading.Timer(0.1, writer.release, (path,)).start()
    with pytest.raises(StoreError, match="its request was aborted or its writer died"):
        load_hidden_states(path)


def test_close_finishes_what_is_queued_and_releases_the_rest(tmp_path) -> None:
    writer = HiddenStatesWriter(tmp_path, num_writer_threads=1)
    paths = [writer.reserve(f"r{i}") for i in range(3)]
    writer.reserve("never")
    for seed, path in enumerate(paths):
        writer.submit(path, *content(seed), LAYERS)
    writer.close()
    assert sorted(tmp_path.glob("*.safetensors")) == paths
    assert len(list(tmp_path.iterdir())) == 6
    late = HiddenStatesWriter(tmp_path)
    path = late.reserve("late")
    late.close()
    with pytest.raises(StoreError, match="not reserved"):
        late.submit(path, *content(), LAYERS)


def test_the_queue_is_bounded(tmp_path) -> None:
    go = threading.Event()
    submitted: list[int] = []
    with HiddenStatesWriter(tmp_path, num_writer_threads=1) as writer:

        def submit_all() -> None:
            for number in range(6):
                writer.submit(writer.reserve(str(number)), *content(number), LAYERS, ready=go.wait)
                submitted.append(number)

        thread = threading.Thread(target=submit_all)
        thread.start()
        while len(submitted) < 3:
            time.sleep(0.01)
        time.sleep(0.1)
        assert submitted == [0, 1, 2]
        go.set()
        thread.join(10)
        assert submitted == [0, 1, 2, 3, 4, 5]
    assert len(list(tmp_path.glob("*.safetensors"))) == 6


LIMITED = """
import resource, signal, sys, torch
from speculators.errors import StoreError
from speculators.formats.hidden_states import HiddenStatesWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = HiddenStatesWriter(sys.argv[1])
path = writer.reserve("big")
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
future = writer.submit(path, torch.zeros(100, 3, 8), torch.zeros(100, dtype=torch.int64), (0, 1, 2))
if sys.argv[2] == "look":
    print(future.exception())
writer.close()
"""


@pytest.mark.parametrize("look", ["look", "away"])
def test_a_write_that_fails_reaches_the_future_the_exit_code_and_the_reader(tmp_path, look) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, tmp_path, look], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == (look == "look")
    assert "cannot be written: File too large" in (done.stdout if look == "look" else done.stderr)
    assert [file.name for file in tmp_path.iterdir()] == ["big.safetensors.lock"]
    with pytest.raises(StoreError, match=r"was not written: .*File too large"):
        load_hidden_states(tmp_path / "big.safetensors")
    with HiddenStatesWriter(tmp_path) as writer:
        path = write(writer, "big")
    assert load_hidden_states(path)["token_ids"].tolist() == content()[1].tolist()


def test_a_reason_given_by_the_caller_reaches_the_reader_with_and_without_locks(tmp_path) -> None:
    for locks in (True, False):
        writer = HiddenStatesWriter(tmp_path, use_synchronization_lock=locks)
        path = writer.reserve("r")
        writer.fail(path, StoreError("row 3 is missing"))
        with pytest.raises(StoreError, match="was not written: row 3 is missing"):
            load_hidden_states(path)
        with pytest.raises(StoreError, match="row 3 is missing"):
            writer.close()


@pytest.mark.parametrize("shared", ["/proc/nowhere", "/dev/null/below"])
def test_a_folder_that_cannot_be_written_is_said_at_once(shared) -> None:
    with HiddenStatesWriter(shared) as writer:
        with pytest.raises(StoreError, match=f"{shared}.*cannot be written"):
            writer.reserve("r")
        with pytest.raises(StoreError, match=f"shared_storage_path {shared} cannot be written to"):
            writer.require_writable()


# Sweeping


def test_a_sweep_takes_what_nobody_works_on_and_is_old_enough(tmp_path) -> None:
    with HiddenStatesWriter(tmp_path) as writer:
        live, done = writer.reserve("live"), write(writer, "done")
        for name in ("dead.safetensors.lock", ".dead.safetensors.12ab.partial"):
            (tmp_path / name).touch()
        foreign = [tmp_path / name for name in ("other.lock", ".dead.json.12ab.partial", "notes.txt")]
        for file in foreign:
            file.touch()
        assert sweep(tmp_path, 3600) == sweep(tmp_path, 3600, files_too=True)
        assert len(list(tmp_path.iterdir())) == 8
        found = sweep(tmp_path, 0)
        assert (found.locks, found.partial_files, found.files) == (2, 1, 0)
        assert held(Path(f"{live}.lock"))
        assert all(file.exists() for file in [*foreign, done])
        assert sweep(tmp_path, 0, files_too=True).files == 1
        assert not done.exists()
        writer.submit(live, *content(), LAYERS).result(10)


def test_a_sweep_leaves_files_being_read_and_files_being_written(tmp_path) -> None:
    with HiddenStatesWriter(tmp_path, num_writer_threads=1) as writer:
        path = write(writer, "read")
        with Path(f"{path}.lock").open() as reader:
            fcntl.flock(reader, fcntl.LOCK_SH)
            found = sweep(tmp_path, 0, files_too=True)
        assert (found.locks, found.files) == (0, 0)
        partial = tmp_path / ".x.safetensors.ab.partial"
        with partial.open("w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            assert sweep(tmp_path, 0).partial_files == 0
        assert sweep(tmp_path, 0).partial_files == 1
