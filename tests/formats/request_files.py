"""Content for per-request files, and the questions that their tests ask."""

import fcntl
from pathlib import Path

import torch
from torch import Tensor

from speculators.formats.hidden_states import HiddenStatesWriter

T, A, H = 5, 3, 8
LAYERS = (0, 2, 4)


def content(seed: int = 0, dtype: torch.dtype = torch.float32, tokens: int = T) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, A, H, generator=generator).to(dtype)
    return states, torch.randint(0, 100, (tokens,), generator=generator)


def write(writer: HiddenStatesWriter, name: str, seed: int = 0) -> Path:
    path = writer.reserve(name)
    writer.submit(path, *content(seed), LAYERS).result(10)
    return path


def held(lock: Path) -> bool:
    """Whether somebody else holds a lock, asked as any other program would."""
    with lock.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
