"""Which stages of a run are complete, for which inputs, and how long they took."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculators.errors import UsageError
from speculators.formats.files import write_text

# Stages take minutes to hours; nobody minds half a second.
_LOOK_SECONDS = 0.5


class Journal:
    """One marker per stage in `directory/stages/`, and their times in `directory/timings.json` (seconds).

    Of several processes one `leads`: it works and marks, the others wait for its marks.
    """

    def __init__(self, directory: Path, *, leads: bool = True) -> None:
        self.directory = directory
        self._leads = leads

    @contextmanager
    def stage(
        self, name: str, inputs: Mapping[str, Any], outputs: Sequence[Path], *, together: bool = False
    ) -> Iterator[bool]:
        """Give whether the stage is due, and mark it complete where its work ends without an exception.

        It is due unless it was completed with equal `inputs` (JSON) and all `outputs` are there. Seconds of interrupted
        runs with the same inputs add up. A stage that processes do `together` is due for each of them.
        """
        marker = self.directory / "stages" / f"{name}.json"
        digest = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()
        before = _read(marker)
        same = before.get("inputs") == digest
        if same and before.get("complete") and all(path.exists() for path in outputs):
            yield False
            return
        if not self._leads:
            yield together
            wait_until(lambda: (found := _read(marker)).get("inputs") == digest and bool(found.get("complete")))
            return
        spent = before.get("seconds", 0.0) if same and not before.get("complete") else 0.0
        started = time.monotonic()
        complete = False
        try:
            yield True
            complete = True
        finally:
            seconds = round(spent + time.monotonic() - started, 3)
            _write(marker, {"inputs": digest, "complete": complete, "seconds": seconds})
            self._write_timings()

    def timings(self) -> dict[str, float]:
        """Seconds of every stage that was begun, in the order they were first begun."""
        markers = sorted((self.directory / "stages").glob("*.json"), key=lambda path: path.stat().st_mtime)
        return {path.stem: _read(path).get("seconds", 0.0) for path in markers}

    def _write_timings(self) -> None:
        _write(self.directory / "timings.json", self.timings())


def wait_until(done: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    while not done():
        time.sleep(_LOOK_SECONDS)


def file_digest(path: Path) -> str:
    """SHA-256 of a file; UsageError where it cannot be read."""
    try:
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; check the path in the recipe") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")
