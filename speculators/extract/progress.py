"""The progress bar of the stages: on standard error, with a rate in tokens per second."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class RowProgress:
    """A bar that counts rows and tells tokens per second; silent when not `enabled`."""

    def __init__(self, title: str, total: int | None, *, done: int = 0, enabled: bool = True) -> None:
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=not enabled,
        )
        self._task: TaskID = self._bar.add_task(title, total=total, completed=done, rate="")
        self._start = time.monotonic()
        self._tokens = 0

    def advance(self, rows: int, tokens: int = 0) -> None:
        """Count rows as done, and the tokens worked on since the last call."""
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._start, 1e-9)
        self._bar.update(self._task, advance=rows, rate=f"{rate:,.0f} tokens/s" if self._tokens else "")

    def __enter__(self) -> Self:
        self._bar.start()
        self._start = time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
