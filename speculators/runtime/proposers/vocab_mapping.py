"""Which tokens a draft language model shares with its verifier, and what each of the two calls them.

Shape suffixes: B rows, C tokens in both vocabularies, D rows of the draft's head, V rows of the verifier's head.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from speculators.errors import EngineError
from speculators.runtime.description import LanguageModel

logger = logging.getLogger(__name__)

FEW_TOKENS = 100
# How byte-level and SentencePiece vocabularies write a space at the beginning of a token.
SPACE_MARKERS = ("\u0120", "\u2581")


@dataclass(frozen=True)
class VocabMapping:
    """The C tokens that a draft may propose, and a draft id for whatever the verifier writes.

    `draft_ids_C` and `verifier_ids_C` int64 are the two ids of each of them, ascending in the draft's. `to_draft_V`
    int64 is the draft id by which the draft reads each verifier id; None where the ids are the same.
    """

    draft_ids_C: Tensor
    verifier_ids_C: Tensor
    to_draft_V: Tensor | None = None

    @classmethod
    def identity(cls, size: int) -> "VocabMapping":
        """One vocabulary of `size` ids on both sides."""
        ids = torch.arange(size)
        return cls(ids, ids)

    @property
    def keeps_ids(self) -> bool:
        """Whether the shared tokens are ids 0..C-1 of both sides."""
        first_C = torch.arange(len(self.draft_ids_C), device=self.draft_ids_C.device)
        return torch.equal(self.draft_ids_C, first_C) and torch.equal(self.verifier_ids_C, first_C)

    def to(self, device: torch.device) -> "VocabMapping":
        """The mapping with its tensors on this device."""
        to_draft = None if self.to_draft_V is None else self.to_draft_V.to(device)
        return replace(
            self,
            draft_ids_C=self.draft_ids_C.to(device),
            verifier_ids_C=self.verifier_ids_C.to(device),
            to_draft_V=to_draft,
        )

    def read(self, verifier_ids: Tensor) -> Tensor:
        """The draft's ids, by which it reads verifier ids of any shape."""
        return verifier_ids if self.to_draft_V is None else self.to_draft_V[verifier_ids]


def same_vocabulary(verifier: LanguageModel, draft: LanguageModel) -> VocabMapping:
    """The mapping of a draft whose ids are the verifier's, with or without rows of padding behind them.

    Ids without a token, and added tokens that only one of the two has, are never proposed; the draft reads ids that it
    has no row for as its unknown token. EngineError where an ordinary token differs: it names the first.
    """
    ours, theirs = _tokens_by_id(verifier), _tokens_by_id(draft)
    if ours is None or theirs is None:
        if verifier.vocab_size != draft.vocab_size:
            raise EngineError(
                f"draft model {draft.name_or_path!r} has {draft.vocab_size} tokens and verifier "
                f"{verifier.name_or_path!r} {verifier.vocab_size}, and there are not two tokenizers to tell padding "
                "from tokens; give both models their tokenizers"
            )
        return VocabMapping.identity(verifier.vocab_size)
    _require_same_tokens(verifier, draft, ours, theirs)
    ids = torch.tensor(sorted(i for i, token in ours.items() if theirs.get(i) == token), dtype=torch.int64)
    to_draft_V = None
    if draft.vocab_size < verifier.vocab_size:
        to_draft_V = torch.arange(verifier.vocab_size)
        to_draft_V[draft.vocab_size :] = _fallback_id(draft) or 0
    return VocabMapping(ids, ids, to_draft_V)


def shared_tokens(verifier: LanguageModel, draft: LanguageModel) -> VocabMapping:
    """The mapping of two vocabularies that have tokens in common (token-level intersection, arXiv 2502.05202).

    Two tokens are one where their strings agree once a marker of a space before the word is written as a space; of
    several such ids of one vocabulary, the draft proposes the first. Verifier ids without a counterpart are read by the
    draft as its unknown token, else as its end of sequence. Fewer than 100 tokens in common give a warning. EngineError
    where a tokenizer is missing, nothing is in common, or the draft has neither of those two tokens.
    """
    ours, theirs = _tokens_by_id(verifier), _tokens_by_id(draft)
    if ours is None or theirs is None:
        without = verifier if ours is None else draft
        raise EngineError(
            f"use_heterogeneous_vocab compares the tokens of two tokenizers, and {without.name_or_path!r} has none"
        )
    first_ours, first_theirs = (
        _first_ids(tokens, space_markers(model.tokenizer))
        for tokens, model in ((ours, verifier), (theirs, draft))
        if model.tokenizer is not None
    )
    pairs = sorted((first_theirs[text], first_ours[text]) for text in first_theirs.keys() & first_ours.keys())
    names = f"verifier {verifier.name_or_path!r} and draft model {draft.name_or_path!r}"
    if not pairs:
        raise EngineError(f"{names} have no token in common; choose a draft model of a nearer vocabulary")
    if len(pairs) < FEW_TOKENS:
        logger.warning("%s have only %d tokens in common; few drafts will be accepted", names, len(pairs))
    draft_ids_C, verifier_ids_C = torch.tensor(pairs, dtype=torch.int64).unbind(1)
    to_draft_V = torch.full((verifier.vocab_size,), _unknown_id(draft), dtype=torch.int64)
    markers = space_markers(verifier.tokenizer) if verifier.tokenizer is not None else ()
    for token_id, token in ours.items():
        to_draft_V[token_id] = first_theirs.get(normalised(token, markers), to_draft_V[token_id])
    return VocabMapping(draft_ids_C.contiguous(), verifier_ids_C.contiguous(), to_draft_V)


def space_markers(tokenizer: PreTrainedTokenizerBase) -> Sequence[str]:
    """How a tokenizer marks a space before a word: what stands before the letter in its token of " a".

    Both usual markers where it has no such token.
    """
    first = next(iter(tokenizer.convert_ids_to_tokens(tokenizer.encode(" a", add_special_tokens=False))), "")
    return (first[0],) if len(first) == 2 and first[1] == "a" else SPACE_MARKERS


def normalised(token: str, markers: Sequence[str]) -> str:
    """A token's string with every marker that it begins with written as a space."""
    rest = token.lstrip("".join(markers))
    return " " * (len(token) - len(rest)) + rest


def _first_ids(tokens: Mapping[int, str], markers: Sequence[str]) -> dict[str, int]:
    """The lowest id of each normalised string."""
    found: dict[str, int] = {}
    for token_id in sorted(tokens):
        found.setdefault(normalised(tokens[token_id], markers), token_id)
    return found


def _tokens_by_id(model: LanguageModel) -> dict[int, str] | None:
    """The string of every id that a model's tokenizer knows and its head has a row for."""
    if model.tokenizer is None:
        return None
    return {i: token for token, i in model.tokenizer.get_vocab().items() if i < model.vocab_size}


def _require_same_tokens(
    verifier: LanguageModel, draft: LanguageModel, ours: dict[int, str], theirs: dict[int, str]
) -> None:
    """Raise EngineError where an id has two strings, or none on one side, and not both are added tokens."""
    sides = ((ours, _added_tokens(verifier)), (theirs, _added_tokens(draft)))
    differing = [
        i
        for i in sorted(ours.keys() | theirs.keys())
        if ours.get(i) != theirs.get(i) and any(i in tokens and tokens[i] not in added for tokens, added in sides)
    ]
    if differing:
        i = differing[0]
        raise EngineError(
            f"token id {i} is {ours.get(i)!r} to verifier {verifier.name_or_path!r} and {theirs.get(i)!r} to draft "
            f"model {draft.name_or_path!r}, and {len(differing) - 1} more ids differ; expected one vocabulary: choose "
            "a draft model of the verifier's series, or set use_heterogeneous_vocab to draft the tokens they share"
        )


def _added_tokens(model: LanguageModel) -> frozenset[str]:
    return frozenset(() if model.tokenizer is None else model.tokenizer.get_added_vocab())


def _fallback_id(draft: LanguageModel) -> int | None:
    for name in ("unk_token_id", "eos_token_id"):
        found = getattr(draft.tokenizer, name, None)
        if isinstance(found, int) and found < draft.vocab_size:
            return found
    return None


def _unknown_id(draft: LanguageModel) -> int:
    """What the draft reads for tokens that it does not have."""
    found = _fallback_id(draft)
    if found is None:
        raise EngineError(
            f"draft model {draft.name_or_path!r} has neither an unknown token nor an end of sequence to read the "
            "verifier's other tokens as; give its tokenizer an unk_token"
        )
    if found != getattr(draft.tokenizer, "unk_token_id", None):
        logger.warning(
            "draft model %r has no unknown token: it reads the verifier's other tokens as its end of sequence",
            draft.name_or_path,
        )
    return found
