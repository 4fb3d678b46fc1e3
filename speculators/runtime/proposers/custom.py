"""Drafting with a class of the user's own, of vLLM's signature or of this runtime's."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.draft_model import Proposal
from speculators.runtime.proposers.proposer import NewTokens, Proposer
from speculators.runtime.proposers.ragged import ragged_proposal
from speculators.runtime.proposers.token_rows import TokenRows
from speculators.runtime.request import Request
from speculators.runtime.verifier import Verifier


@dataclass(frozen=True)
class CustomSpeculativeConfig:
    """The speculation asked for: `method`, the class's dotted path and K."""

    method: str
    model: str
    num_speculative_tokens: int


@dataclass(frozen=True)
class CustomModelConfig:
    """The verifier: its name or path, the most tokens a request may have, and its vocabulary."""

    model: str
    max_model_len: int
    vocab_size: int

    def get_vocab_size(self) -> int:
        """Rows of the output head."""
        return self.vocab_size


@dataclass(frozen=True)
class CustomSchedulerConfig:
    """The most requests that run at once."""

    max_num_seqs: int


@dataclass(frozen=True)
class CustomConfig:
    """What a custom class is constructed with; its fields have the names that they have in vLLM's `VllmConfig`."""

    speculative_config: CustomSpeculativeConfig
    model_config: CustomModelConfig
    scheduler_config: CustomSchedulerConfig


class CustomProposer:
    """Drafts with the class at a dotted path, constructed with one argument, a `CustomConfig`.

    The class has `propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu, slot_mappings=None)`, where

    - `sampled_token_ids` is a list of the ids that each running request has just gained,
    - `num_tokens_no_spec` an int32 array [max_num_seqs], how many tokens each row has,
    - `token_ids_cpu` an int32 array [max_num_seqs, max_model_len] of them (prompt and output), and
    - `slot_mappings` always None,

    and which returns a list of ids a request, of at most K, [] for no draft. Or it is a `Proposer`, with `observe`,
    `propose`, `move` and `forget`. `load_model(target_model)` is called once, where it exists. EngineError where the
    class cannot be had, has no `propose`, or proposes something else; drafts count as one-hot.
    """

    def __init__(
        self, model: str, *, num_tokens: int, verifier: Verifier, max_model_len: int, max_num_seqs: int
    ) -> None:
        self.num_tokens, self._path, self._vocab_size = num_tokens, model, verifier.vocab_size
        config = CustomConfig(
            CustomSpeculativeConfig("custom_class", model, num_tokens),
            CustomModelConfig(verifier.name_or_path, max_model_len, verifier.vocab_size),
            CustomSchedulerConfig(max_num_seqs),
        )
        drafter = custom_class(model)(config)
        self._propose: Callable[..., object] = _method(model, drafter, "propose")
        load_model: object = getattr(drafter, "load_model", None)
        if callable(load_model):
            load_model(verifier.model)
        self._own = _as_proposer(model, drafter)
        self.aux_layer_ids: Sequence[int] = () if self._own is None else tuple(self._own.aux_layer_ids)
        self.verifier_ids_D: Tensor | None = None if self._own is None else self._own.verifier_ids_D
        self._rows = TokenRows(max_model_len, torch.device("cpu"), dtype=torch.int32, num_rows=max_num_seqs)
        self._lengths = torch.zeros(max_num_seqs, dtype=torch.int32)

    def observe(self, new: NewTokens) -> None:
        """Tell a `Proposer` of verified tokens; the other kind reads the matrix of ids."""
        if self._own is not None:
            self._own.observe(new)

    def propose(self, new: NewTokens, num_tokens: int) -> Proposal:
        """Ask the class for at most `num_tokens` a row, and check its answer."""
        if self._own is not None:
            return self._checked_proposal(self._own.propose(new, num_tokens), len(new.requests), num_tokens)
        self._lengths[new.rows] = self._rows.update(new.rows, new.requests).to(torch.int32)
        gained = [row[:n] for row, n in zip(new.next_ids_BT.tolist(), new.lengths, strict=True)]
        answer = self._propose(gained, self._lengths.numpy(), self._rows.ids_RT.numpy(), slot_mappings=None)
        return ragged_proposal(self._checked(answer, len(gained), num_tokens), num_tokens, new.next_ids_BT.device)

    def move(self, source: int, target: int, length: int) -> None:
        """Let whatever is kept follow a request to another row."""
        self._rows.move(source, target, length)
        if self._own is not None:
            self._own.move(source, target, length)

    def require_prefix_reuse(self, num_slots: int) -> None:
        """Raise EngineError for a `Proposer` of the user's own, which is to observe every token."""
        if self._own is not None:
            raise self._wrong("has `observe`, and would miss prompts that are cached; leave enable_prefix_caching out")

    def copy_prefix(self, source: int, target: int, length: int, request: Request | None) -> None:
        """Nothing to do: the matrix of ids is read from the requests."""

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        self._rows.forget(request)
        if self._own is not None:
            self._own.forget(request)

    def _checked(self, answer: object, batch: int, num_tokens: int) -> list[list[int]]:
        if not isinstance(answer, list | tuple) or len(answer) != batch:
            got = f"{len(answer)} lists" if isinstance(answer, list | tuple) else repr(answer)
            raise self._wrong(f"gave {got} for {batch} requests; expected a list of token ids a request")
        return [self._checked_draft(draft, row, num_tokens) for row, draft in enumerate(answer)]

    def _checked_draft(self, draft: object, row: int, num_tokens: int) -> list[int]:
        if isinstance(draft, np.ndarray):
            draft = draft.tolist()
        if not isinstance(draft, list | tuple):
            raise self._wrong(f"gave {draft!r} for request {row}; expected a list of token ids, [] for no draft")
        if len(draft) > num_tokens:
            raise self._wrong(f"gave {len(draft)} tokens for request {row}; expected at most {num_tokens}")
        for token in draft:
            whole = isinstance(token, int | np.integer) and not isinstance(token, bool)
            if not whole or not 0 <= token < self._vocab_size:
                raise self._wrong(f"gave {token!r} for request {row}; expected token ids in 0..{self._vocab_size - 1}")
        return [int(token) for token in draft]

    def _checked_proposal(self, answer: object, batch: int, num_tokens: int) -> Proposal:
        if not isinstance(answer, Proposal):
            raise self._wrong(f"gave {answer!r}; expected a Proposal, as its `observe` makes it a Proposer")
        shape, lengths = tuple(answer.token_ids_BK.shape), answer.lengths_B.tolist()
        if len(lengths) != batch or shape[0] != batch or max(lengths, default=0) > min(num_tokens, shape[1]):
            raise self._wrong(
                f"gave ids of shape {list(shape)} with lengths {lengths} for {batch} requests; expected [B, K] ids and "
                f"B lengths of at most {num_tokens}"
            )
        ids = answer.token_ids_BK.tolist()
        self._checked([draft[:length] for draft, length in zip(ids, lengths, strict=True)], batch, num_tokens)
        return answer

    def _wrong(self, what: str) -> EngineError:
        return EngineError(f"speculative_config: custom class {self._path!r} {what}")


def custom_class(path: str) -> Callable[[CustomConfig], object]:
    """The class at a dotted path; EngineError where it cannot be had, takes no config or has no `propose`."""
    where = f"speculative_config: custom class {path!r}"
    module_name, dot, name = path.rpartition(".")
    if not dot or not module_name:
        raise EngineError(f"{where}: expected a dotted path like 'package.module.Class'")
    try:
        module = importlib.import_module(module_name)
    except (ImportError, RuntimeError) as error:
        raise EngineError(f"{where}: module {module_name!r} cannot be imported: {error}") from error
    found: object = getattr(module, name, None)
    if not inspect.isclass(found):
        got = "nothing of that name" if found is None else f"{name}, which is a {type(found).__name__}"
        raise EngineError(f"{where}: module {module_name!r} has {got}; expected a class")
    try:
        inspect.signature(found).bind(None)
    except TypeError as error:
        raise EngineError(f"{where}: its constructor must take one positional argument, a config: {error}") from error
    _method(path, found, "propose")
    return cast(Callable[[CustomConfig], object], found)


def _method(path: str, drafter: object, name: str) -> Callable[..., object]:
    found: object = getattr(drafter, name, None)
    if not callable(found):
        raise EngineError(f"speculative_config: custom class {path!r} has no method `{name}`")
    return found


def _as_proposer(path: str, drafter: object) -> Proposer | None:
    """The drafter where it is a Proposer; None for one that has `propose` alone."""
    if not callable(getattr(drafter, "observe", None)):
        return None
    for name in ("propose", "move", "forget"):
        _method(path, drafter, name)
    for name in ("aux_layer_ids", "verifier_ids_D"):
        if not hasattr(drafter, name):
            raise EngineError(f"speculative_config: custom class {path!r} has `observe`, but no attribute `{name}`")
    return cast(Proposer, drafter)
