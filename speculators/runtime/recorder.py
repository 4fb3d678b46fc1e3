"""Hidden states of running requests, kept row by row and written when a request ends.

Legend: B rows of a batch, T tokens of a pass, A layers, H hidden size, X = A * H.
"""

import uuid
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from speculators.errors import EngineError, RequestError, SpeculatorsError
from speculators.formats.hidden_states import HiddenStatesWriter, WriteFuture, cleanup_hidden_states
from speculators.runtime.request import Request
from speculators.runtime.sampling import SamplingParams

_WAIT_SECONDS = 0.05


@dataclass
class _Recording:
    """A request under way: where its file will be, and the rows so far ([t, X] each)."""

    path: Path
    rows: list[Tensor] = field(default_factory=list)


@dataclass
class _Writing:
    """A request that has ended, whose file is being written; `aborted` where nobody wants it any more."""

    request: Request
    path: Path
    written: WriteFuture
    aborted: bool = False


class HiddenStatesRecorder:
    """Collects the states of `layer_ids` (ascending) for every request of an engine and hands them to a writer.

    A request is delivered once its file lies there, or with the reason why it does not. One thread calls this.
    """

    def __init__(self, writer: HiddenStatesWriter, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self._writer = writer
        self._planned: dict[str, Path] = {}
        self._recordings: dict[str, _Recording] = {}
        self._writings: dict[str, _Writing] = {}
        self._failed: list[Request] = []

    @property
    def busy(self) -> bool:
        """Whether a request that has ended is not delivered yet."""
        return bool(self._writings or self._failed)

    @property
    def unfinished(self) -> set[str]:
        """Ids of requests whose states are being kept or written."""
        return {*self._planned, *self._recordings, *self._writings}

    def knows(self, request_id: str) -> bool:
        """Whether a request's states are being kept or written."""
        return any(request_id in known for known in (self._planned, self._recordings, self._writings))

    def expect(self, request_id: str, params: SamplingParams) -> None:
        """Choose a request's file; RequestError for a path of its client's that is not allowed."""
        # The random end keeps requests of other engines that write to the same folder apart.
        name = f"{request_id}-{uuid.uuid4().hex[:8]}"
        self._planned[request_id] = self._writer.options.path_for(
            name, params.transfer_params.get("hidden_states_path")
        )

    def admit(self, request: Request) -> bool:
        """Lock a request's file; where that cannot be, the request ends with the reason, and False is returned."""
        path = self._planned.pop(request.request_id)
        try:
            # Not earlier: a lock is an open file, of which many waiting requests would have too many.
            self._writer.claim(path)
        except SpeculatorsError as error:
            request.fail(str(error))
            self._failed.append(request)
            return False
        self._recordings[request.request_id] = _Recording(path)
        return True

    def record(
        self, requests: Sequence[Request], starts: Sequence[int], lengths: Sequence[int], aux_BTX: Tensor
    ) -> None:
        """Keep what a pass computed for tokens `starts` to `starts + lengths` of each request."""
        for row, (request, start, length) in enumerate(zip(requests, starts, lengths, strict=True)):
            kept = length if _with_output(request.params) else min(length, len(request.prompt_token_ids) - start)
            if kept > 0:
                # A copy, since the view would keep the whole batch in memory.
                self._recordings[request.request_id].rows.append(aux_BTX[row, :kept].clone())

    def finish(self, request: Request) -> None:
        """Queue the file of a request that has ended."""
        recording = self._recordings.pop(request.request_id)
        count = request.num_computed if _with_output(request.params) else len(request.prompt_token_ids)
        rows_TX = torch.cat(recording.rows) if recording.rows else torch.empty(0)
        if len(rows_TX) != count:
            self._writer.release(recording.path)
            raise EngineError(f"request {request.request_id}: states of {len(rows_TX)} tokens, expected {count}")
        states_TAH = rows_TX.unflatten(-1, (len(self.layer_ids), -1)).cpu()
        ids_T = torch.tensor(request.tokens[:count], dtype=torch.int64)
        written = self._writer.submit(recording.path, states_TAH, ids_T, self.layer_ids)
        self._writings[request.request_id] = _Writing(request, recording.path, written)

    def abort(self, request_id: str) -> None:
        """Leave no file of a request behind, wherever it stands; unknown ids are ignored."""
        self._planned.pop(request_id, None)
        recording = self._recordings.pop(request_id, None)
        if recording is not None:
            self._writer.release(recording.path)
        if request_id in self._writings:
            self._writings[request_id].aborted = True
            self._writer.release(self._writings[request_id].path)
        self._failed = [request for request in self._failed if request.request_id != request_id]

    def delivered(self, *, block: bool) -> list[Request]:
        """Requests whose files were written, or could not be, since the last call; with `block` it waits a moment."""
        if block and self._writings and not self._failed:
            wait([one.written for one in self._writings.values()], _WAIT_SECONDS, FIRST_COMPLETED)
        ended, self._failed = self._failed, []
        for request_id, writing in list(self._writings.items()):
            if not writing.written.done():
                continue
            del self._writings[request_id]
            error = writing.written.exception()
            if writing.aborted:
                # A client's path may have its next request by now.
                if all(recording.path != writing.path for recording in self._recordings.values()):
                    cleanup_hidden_states(writing.path)
                continue
            if error is None:
                writing.request.hidden_states_path = str(writing.path)
            else:
                writing.request.fail(f"{writing.path} was not written: {error}")
            ended.append(writing.request)
        return ended

    def abort_all(self) -> None:
        """Leave no file of any request behind that was not delivered yet."""
        for request_id in self.unfinished:
            self.abort(request_id)
        while self.busy:
            self.delivered(block=True)

    def close(self) -> None:
        """Give up what is under way and end the writer's threads."""
        self.abort_all()
        self._writer.close()


def check_extraction(params: SamplingParams, *, extracting: bool, completions: int) -> None:
    """Refuse a request whose wishes about hidden states this engine cannot honour; RequestError names them.

    `completions` are those asked for together: prompts times completions of each.
    """
    if not extracting and params.transfer_params:
        raise RequestError(
            f"kv_transfer_params={params.transfer_params!r}, but this engine extracts no hidden states; start it with "
            "speculative_config's method extract_hidden_states and a kv_transfer_config"
        )
    if extracting and completions > 1:
        raise RequestError(
            f"{completions} completions in one request, but hidden states of one are told (kv_transfer_params); ask "
            "for one at a time"
        )


def _with_output(params: SamplingParams) -> bool:
    return bool(params.transfer_params.get("include_output_tokens"))
