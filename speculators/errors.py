"""The exceptions this package raises on purpose; everything else that escapes is a defect.

::

    SpeculatorsError            work failed                                        exit code 1
    ├── UsageError              a command line or recipe asked for nonsense        exit code 2
    ├── FormatError             a speculator directory or configuration is wrong   (may carry a code such as "F012")
    ├── VerifierError           a verifier is unreadable or unsuitable
    ├── DataError               a row of data is wrong                             (may carry its file and line)
    ├── StoreError              a hidden-states store is damaged or made for something else
    ├── ServerError             a server that is asked for something refuses, or does not answer
    ├── TrainingError           training cannot start, continue or resume
    ├── RequestError            a generation request or its sampling parameters are wrong
    └── EngineError             the runtime cannot do what it was configured to do

A message says what was got, what was expected, and what to do about it.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar


class SpeculatorsError(Exception):
    """Work failed for a reason that the message explains; the base of every exception raised on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(SpeculatorsError):
    """A command line, a recipe or an override asked for something that does not exist or contradicts itself."""

    exit_code: ClassVar[int] = 2


class FormatError(SpeculatorsError):
    """A speculator directory or configuration is wrong; `code` is the stable fault code, where there is one."""

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(message)
        self.code = code


class VerifierError(SpeculatorsError):
    """A verifier cannot be read, or is not one that a draft can be built on."""


class DataError(SpeculatorsError):
    """A row of data is malformed; `path` and `line` (1-based) say where, and open the message."""

    def __init__(self, message: str, *, path: str | Path | None = None, line: int | None = None) -> None:
        where = "" if path is None else f"{path}: " if line is None else f"{path}:{line}: "
        super().__init__(where + message)
        self.path = path
        self.line = line


class StoreError(SpeculatorsError):
    """A hidden-states store is damaged, or was made for another verifier, layer set or template."""


class ServerError(SpeculatorsError):
    """A server that this package is a client of refuses a request, or does not answer any more."""


class TrainingError(SpeculatorsError):
    """Training cannot start, continue or resume."""


class RequestError(SpeculatorsError):
    """A generation request, or one of its sampling parameters, cannot be honoured; `parameter` names the latter."""

    def __init__(self, message: str, *, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class EngineError(SpeculatorsError):
    """The runtime cannot do what it was configured to do."""
