"""The token ids of running requests as one matrix, a request a row, kept in step with the engine's rows."""

from collections.abc import Sequence

import torch
from torch import Tensor

from speculators.runtime.request import Request


class TokenRows:
    """Ids of rows 0..B-1 on one device; only what a request has gained is copied.

    Rows are added as they are needed; ids beyond a request's length are meaningless.
    """

    def __init__(self, width: int, device: torch.device, *, dtype: torch.dtype, num_rows: int = 0) -> None:
        self.ids_RT = torch.zeros((num_rows, width), dtype=dtype, device=device)
        self._known: dict[int, tuple[str, int]] = {}

    def update(self, rows: slice, requests: Sequence[Request]) -> Tensor:
        """Write the new tokens of `requests`, which have rows `rows`; returns the lengths [B] int64."""
        device, width = self.ids_RT.device, self.ids_RT.shape[1]
        if rows.stop > len(self.ids_RT):
            more = torch.zeros((rows.stop - len(self.ids_RT), width), dtype=self.ids_RT.dtype, device=device)
            self.ids_RT = torch.cat([self.ids_RT, more])
        places: list[int] = []
        tokens: list[int] = []
        for row, request in enumerate(requests, rows.start):
            name, known = self._known.get(row, ("", 0))
            known = known if name == request.request_id else 0
            places += range(row * width + known, row * width + len(request.tokens))
            tokens += request.tokens[known:]
            self._known[row] = request.request_id, len(request.tokens)
        written = torch.tensor([places, tokens], dtype=torch.int64).to(device)
        self.ids_RT.view(-1)[written[0]] = written[1].to(self.ids_RT.dtype)
        return torch.tensor([len(request.tokens) for request in requests], device=device)

    def move(self, source: int, target: int, length: int) -> None:
        """A request of `length` tokens or more moved to another row."""
        if source not in self._known:
            self._known.pop(target, None)
            return
        name, known = self._known.pop(source)
        self.ids_RT[target] = self.ids_RT[source]
        self._known[target] = name, known

    def forget(self, request: Request) -> None:
        """A request has ended; its id may come again with other tokens."""
        self._known = {row: known for row, known in self._known.items() if known[0] != request.request_id}
