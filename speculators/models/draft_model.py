"""What every draft model takes and gives, in serving and in training.

Shape suffixes: B rows, T tokens, A aux layers, H hidden, X = A*H, V verifier vocabulary, D draft vocabulary, K drafts.
"""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from speculators.errors import SpeculatorsError
from speculators.formats.config import SpeculatorConfig
from speculators.formats.verifier_weights import VerifierWeights
from speculators.formats.vocab import DraftVocab
from speculators.models.cache import SlotCache
from speculators.models.compiling import CompilablePart
from speculators.models.execution import Execution
from speculators.models.family import Count, by_position
from speculators.models.loss_choice import LossChoice
from speculators.models.losses import VerifierHead

Made = TypeVar("Made")


class DraftSampler(Protocol):
    """Chooses draft tokens from draft logits."""

    def __call__(self, logits_BD: Tensor, step: int) -> tuple[Tensor, Tensor | None]:
        """Return draft ids [B] (int64) and, where the verification needs them, probabilities [B, D]."""
        ...


@dataclass
class DraftContext:
    """What one proposal starts from; its B rows are the cache rows `rows`.

    `token_ids_BT` int64: the token after each newly verified position. `aux_hidden_states_BTX`: the verifier's aux
    states at those positions (ascending layer ids, concatenated). `normed_hidden_states_BTH`: its state after the final
    norm, which its head reads. `starts`: the first of those positions, which is the number of tokens the draft cache
    already holds. `lengths`: how many of the T are valid, rows being padded on the right (0: the row takes no part).
    """

    token_ids_BT: Tensor
    aux_hidden_states_BTX: Tensor | None
    starts: Sequence[int]
    lengths: Sequence[int]
    cache: SlotCache
    rows: slice
    normed_hidden_states_BTH: Tensor | None = None

    @property
    def last(self) -> list[int]:
        """The index of each row's last valid position; 0 for a row that takes no part."""
        return [max(length, 1) - 1 for length in self.lengths]

    @property
    def ends(self) -> list[int]:
        """How many tokens the draft cache holds once these positions are written: where drafting goes on."""
        return [start + length for start, length in zip(self.starts, self.lengths, strict=True)]


@dataclass
class Proposal:
    """Draft tokens: `token_ids_BK` int64 ids of the verifier's vocabulary, `lengths_B` int64 of them valid.

    `probs_BKD` are the probabilities they were drawn from, over draft ids; None for one-hot drafts. `confidence_BK`:
    how likely each token is to be accepted once those before it were, where the draft can tell. `top_probs_BK`: the
    largest probability that the draft gave to a token there, where the proposer was asked for it.
    """

    token_ids_BK: Tensor
    lengths_B: Tensor
    probs_BKD: Tensor | None = None
    confidence_BK: Tensor | None = None
    top_probs_BK: Tensor | None = None


@dataclass
class Sample:
    """One training row, raw and unshifted: index t of every field belongs to token t.

    `input_ids` [T] int64, `loss_mask` [T] bool, `aux_hidden_states` [T, A, H], `last_hidden_states` [T, H] before the
    verifier's final norm.
    """

    input_ids: Tensor
    loss_mask: Tensor
    aux_hidden_states: Tensor
    last_hidden_states: Tensor


@dataclass
class PackedBatch:
    """Samples laid one after another into rows, raw and unshifted; padding has document id -1 and loss mask false.

    `input_ids` [B, T] int64, `loss_mask` [B, T] bool, `aux_hidden_states` [B, T, A*H], `last_hidden_states` [B, T, H],
    `document_ids` [B, T] int64 (a document is one run of equal ids), `position_ids` [B, T] int64 from 0 per document.
    """

    input_ids: Tensor
    loss_mask: Tensor
    aux_hidden_states: Tensor
    last_hidden_states: Tensor
    document_ids: Tensor
    position_ids: Tensor

    def to(self, device: torch.device | str, dtype: torch.dtype | None = None) -> PackedBatch:
        """Move all tensors; `dtype` is applied to the hidden states alone."""
        moved = {item.name: getattr(self, item.name).to(device, non_blocking=True) for item in fields(self)}
        if dtype is not None:
            for name in ("aux_hidden_states", "last_hidden_states"):
                moved[name] = moved[name].to(dtype)
        return replace(self, **moved)

    @property
    def num_tokens(self) -> int:
        """Positions that are no padding."""
        return int((self.document_ids >= 0).sum())


@dataclass
class StepOutput:
    """What an objective made of one batch: `loss`, a scalar to differentiate, and counts by name."""

    loss: Tensor
    metrics: dict[str, Count]


class SampleSource(Protocol):
    """Samples by number, with their lengths known beforehand; a hidden-states store is one."""

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each sample."""
        ...

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample: ...


class Objective(ABC):
    """A family's training step."""

    def begin(self, draft: nn.Module, samples: SampleSource, verifier_head: VerifierHead) -> None:
        """Prepare a fresh draft for its first step; `samples` are those it will be trained on. Most need nothing."""
        return

    def for_trained_draft(self) -> Self:
        """The same objective for a draft that has learnt already, whose values `begin` then leaves as they are."""
        return self

    def require_possible(self, execution: Execution) -> None:
        """Raise UsageError where the losses cannot be made as `execution` says; those of the data's tokens can."""
        return

    @abstractmethod
    def step(self, draft: nn.Module, batch: PackedBatch, verifier_head: VerifierHead) -> StepOutput:
        """Loss and counts of one batch.

        `draft` is the family's model, wrapped or not: it is only called, and its parameters are read through it. Among
        the counts of every family are `loss` and, for each draft token k, `full_acc_k`: the token was right together
        with all before it, of the positions at which all of them count.
        """

    def acceptance_length(self, metrics: Mapping[str, Count]) -> float:
        """Tokens a verification of greedy drafts would emit: 1 + the shares `full_acc_k`, summed over draft tokens."""
        return 1.0 + sum(count.rate for count in by_position(metrics))


class DraftModel(nn.Module, ABC):
    """A draft network on one device; names in its `state_dict()` are the checkpoint's tensor names."""

    # Tensors that a checkpoint may leave to the verifier, and the field of `VerifierWeights` that they come from.
    borrows: ClassVar[Mapping[str, str]] = {"embed_tokens.weight": "embed_tokens", "lm_head.weight": "lm_head"}

    # Those of them that are written all the same, because a reader of the family's files would not look for them.
    ships: ClassVar[frozenset[str]] = frozenset()
    # Patterns of the names of matrices with a row a token.
    tables: ClassVar[tuple[str, ...]] = ("embed_tokens.weight", "lm_head.weight")

    # How many of its head's likeliest tokens a draft chooses among, where another head biases them; None for all.
    num_candidates: int | None = None

    # Whether the methods of the model itself that are `compilable` are compiled; modules inside have their own.
    compiles = False

    def __init__(self, config: SpeculatorConfig) -> None:
        super().__init__()
        self.config = config
        self.execution = Execution()
        self.loss_choice = LossChoice()

    def execute(self, execution: Execution) -> None:
        """Carry out every later training forward in this way; TrainingError where this machine cannot."""
        execution.require_possible(self.device)
        self.execution = execution
        self.loss_choice = LossChoice(execution.losses)
        for module in self.modules():
            if hasattr(module, "compiles"):
                cast(CompilablePart, module).compiles = execution.compile

    def segment(self, part: Callable[..., Made], *inputs: Tensor) -> Made:
        """Run a part of the forward of which, with gradient checkpointing, only the inputs are kept.

        `part` has no effect but its result, draws no random number, and reads nothing that changes before the backward.
        """
        if not (self.execution.gradient_checkpointing and torch.is_grad_enabled()):
            return part(*inputs)
        return cast(Made, checkpoint(part, *inputs, use_reentrant=False, preserve_rng_state=False))

    @property
    def device(self) -> torch.device:
        """Where the parameters lie."""
        return self._parameter.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the parameters; borrowed embeddings may keep the verifier's."""
        return self._parameter.dtype

    @property
    def _parameter(self) -> nn.Parameter:
        return next(parameter for parameter in self.parameters() if not parameter.is_meta)

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Capture ids of the verifier states this draft reads, ascending."""
        return tuple(self.config.aux_layer_ids)

    @property
    def tells_confidence(self) -> bool:
        """Whether a head of the draft says how likely its tokens are to be accepted: proposals' `confidence_BK`."""
        return False

    @property
    def verifier_ids_D(self) -> Tensor | None:
        """int64 [D]: the verifier's id of each draft id; None where the two vocabularies are one."""
        d2t: Tensor | None = getattr(self, "d2t", None)
        return None if d2t is None else d2t + torch.arange(len(d2t), device=d2t.device)

    def to_verifier(self, draft_ids: Tensor) -> Tensor:
        """int64 draft ids of any shape -> the verifier's."""
        d2t: Tensor | None = getattr(self, "d2t", None)
        return draft_ids if d2t is None else draft_ids + d2t[draft_ids]

    def trained_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters an optimizer may change."""
        return (parameter for parameter in self.parameters() if parameter.requires_grad)

    def vocabulary_tables(self) -> frozenset[str]:
        """Names of matrices with a row a token: looked up or scored row by row, they are no linear maps."""
        names = [name for name, _ in self.named_parameters()]
        return frozenset(name for pattern in self.tables for name in fnmatch.filter(names, pattern))

    def missing_tensors(self) -> list[str]:
        """Names of tensors that still have to come from the verifier."""
        return [name for name, tensor in self.state_dict().items() if tensor.is_meta]

    def require_complete(self) -> Self:
        """Raise SpeculatorsError where a tensor of the verifier is still missing, else return self."""
        missing = self.missing_tensors()
        if missing:
            raise SpeculatorsError(
                f"the draft has no values for {', '.join(missing)}, which its directory leaves to the verifier; "
                "call Speculator.attach_verifier with the verifier's weights first"
            )
        return self

    @abstractmethod
    def reset_parameters(self, generator: torch.Generator) -> None:
        """Give every trained parameter a fresh random value."""

    def vocabulary_tensors(self, vocab: DraftVocab) -> dict[str, Tensor]:
        """How a checkpoint of this family stores a reduced draft vocabulary, by tensor name."""
        return {"d2t": vocab.d2t, "t2d": vocab.t2d}

    def start_from_verifier(self, weights: VerifierWeights, vocab: DraftVocab) -> None:
        """Give a fresh draft what it starts from besides borrowed tensors: for most, nothing."""
        return

    def native_tensors(self, directory: Path, weights: VerifierWeights) -> dict[str, Tensor]:
        """What a verifier's own checkpoint has of such a draft, by our names and as stored: for most, nothing.

        `directory` holds the checkpoint, `weights` are its embedding, head and norm. FormatError where what is there
        cannot be understood.
        """
        return {}

    def make_cache(self, num_slots: int) -> SlotCache:
        """An empty cache of this model's keys and values for `num_slots` requests; of no layers unless it has some."""
        return SlotCache(0, num_slots, dtype=self.dtype, device=self.device)

    @abstractmethod
    def propose(self, context: DraftContext, num_tokens: int, sampler: DraftSampler) -> Proposal:
        """Bring the cache in step with the verified tokens and draft `num_tokens` more (none at 0)."""
