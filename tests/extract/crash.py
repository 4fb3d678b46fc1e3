"""Kill writers of hidden states at random moments, and look for what must never be found.

    crash.py --kills 200 --out out/crash.json

A process writes per-request files with 8 threads, over and over, until it is killed with SIGKILL; another one reads
whatever is there, half the time without asking for locks. The report says how many files were torn (not readable, or
not what belongs under that name), how many locks, markers and temporary files outlived a sweep, and whether a rerun
then finished: `{kills, torn, locks_left, rerun_finished, files_read, locks_swept, partial_files_swept}`.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from speculators.errors import StoreError
from speculators.formats.hidden_states import HiddenStatesTimeoutError, HiddenStatesWriter, load_hidden_states, sweep

FILES, THREADS, LAYERS, HIDDEN = 48, 8, (0, 2, 4), 64
MAX_DELAY_SECONDS = 0.08
NOTHING_YET = ("was not written", "does not exist", "was removed while it was read")
BESIDE = ("*.lock", "*.writing", ".*.partial")


def content(number: int) -> tuple[Tensor, Tensor]:
    """What belongs into file `number`: up to 300 kB that no other file holds."""
    tokens = 20 + 37 * number % 380
    states = torch.arange(tokens * len(LAYERS) * HIDDEN, dtype=torch.float32) + 1e5 * number
    return states.view(tokens, len(LAYERS), HIDDEN), torch.arange(tokens) + number


def write_all(folder: Path, numbers: list[int]) -> None:
    with HiddenStatesWriter(folder, num_writer_threads=THREADS) as writer:
        for number in numbers:
            writer.submit(writer.reserve(str(number)), *content(number), LAYERS)


def write_until_killed(folder: Path, seed: int) -> None:
    order = random.Random(seed)
    while True:
        write_all(folder, order.sample(range(FILES), FILES))


def is_torn(path: Path, *, locked: bool) -> bool | None:
    """Whether a reader gets something that is not the whole file; None where it gets nothing at all."""
    try:
        found = load_hidden_states(path, timeout=0.05) if locked else load_file(path)
    except (FileNotFoundError, HiddenStatesTimeoutError):
        return None
    except SafetensorError:
        return True
    except StoreError as error:
        # The writer was killed, has not begun, or has begun anew: said as such, it is right.
        return None if any(words in str(error) for words in NOTHING_YET) else True
    except RuntimeError as error:
        # As torch says it where a file goes between its header and its content.
        if "No such file" not in str(error):
            raise
        return None
    states, ids = content(int(path.stem))
    return not (torch.equal(found["hidden_states"], states) and torch.equal(found["token_ids"], ids))


def read_until_told(folder: Path, stop: Path, report: Path) -> None:
    counts = {"files_read": 0, "torn": 0}
    while not stop.exists():
        for number in range(FILES):
            torn = is_torn(folder / f"{number}.safetensors", locked=number % 2 == 0)
            if torn is not None:
                counts["files_read"] += 1
                counts["torn"] += torn
    report.write_text(json.dumps(counts), encoding="utf-8")


def in_a_process(work: Callable[[], None]) -> int:
    """Run a function in a forked process, which starts at once; its process id."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        # The parent learns no more than a status.
        traceback.print_exc()
        raise
    finally:
        os._exit(code)


def left_after_sweep(folder: Path, swept: dict[str, int]) -> int:
    """Sweep, and count what stays; a reader may hold a lock for a moment."""
    give_up = time.monotonic() + 2
    while True:
        found = sweep(folder, 0)
        swept["locks_swept"] += found.locks
        swept["partial_files_swept"] += found.partial_files
        left = sum(1 for pattern in BESIDE for _ in folder.glob(pattern))
        if not left or time.monotonic() > give_up:
            return left


def crash(folder: Path, kills: int, seed: int) -> dict:
    stop, report, store = folder / "stop", folder / "report.json", folder / "store"
    store.mkdir()
    order = random.Random(seed)
    swept = {"locks_swept": 0, "partial_files_swept": 0}
    locks_left = 0
    reader = in_a_process(lambda: read_until_told(store, stop, report))
    for number in range(kills):
        writer = in_a_process(lambda number=number: write_until_killed(store, seed + number))
        time.sleep(order.uniform(0, MAX_DELAY_SECONDS))
        os.kill(writer, signal.SIGKILL)
        _, status = os.waitpid(writer, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, f"the writer ended by itself with status {status}"
        locks_left += left_after_sweep(store, swept)
    rerun = in_a_process(lambda: write_all(store, list(range(FILES))))
    finished = os.waitpid(rerun, 0)[1] == 0
    whole = [is_torn(store / f"{number}.safetensors", locked=True) is False for number in range(FILES)]
    stop.touch()
    os.waitpid(reader, 0)
    read = json.loads(report.read_text(encoding="utf-8"))
    return {
        "kills": kills,
        "torn": read["torn"],
        "locks_left": locks_left + left_after_sweep(store, swept),
        "rerun_finished": finished and all(whole),
        "files_read": read["files_read"],
        **swept,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        found = crash(Path(folder), args.kills, args.seed)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))
    return 0 if found["torn"] == found["locks_left"] == 0 and found["rerun_finished"] else 1


if __name__ == "__main__":
    sys.exit(main())
