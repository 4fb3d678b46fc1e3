"""What a request asks of the verifier's logits before a token is chosen, at every position of its draft window.

Position t of a row is processed as though the request's tokens and its drafts before t were the history, so that each
position gets exactly the logits that decoding token by token would get there. The order is vLLM's: grammar, allowed
tokens, bad words, min_tokens, logit_bias, penalties; temperature and what follows it come later (`sampling.py`).
Shapes: B rows, R of them with constraints, T positions (a draft window's K + 1), V the verifier's vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from speculators.errors import RequestError
from speculators.runtime.guided import GrammarCompiler, GrammarState, allowed_tokens
from speculators.runtime.sampling import SamplingParams

_NEVER = float("-inf")


class Constraints:
    """Everything one request asks of its logits, and what of its output it knows already.

    `exhausted` tells, for drafts of the newest window after which no token was left to choose, the reason.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        bad_words: Sequence[Sequence[int]],
        end_token_ids: Sequence[int],
        grammar: GrammarState | None,
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.params, self.grammar = params, grammar
        self.bad_words = [tuple(word) for word in bad_words]
        self.end_token_ids = list(end_token_ids)
        self.exhausted: dict[tuple[int, ...], str] = {}
        self.num_prompt_tokens = len(prompt_token_ids)
        self.output: list[int] = []
        self.forbidden_V: Tensor | None = None
        self.counts_V: Tensor | None = None
        self.in_prompt_V: Tensor | None = None
        if params.allowed_token_ids is not None:
            self.forbidden_V = torch.ones(vocab_size, dtype=torch.bool, device=device)
            self.forbidden_V[torch.tensor(params.allowed_token_ids, device=device)] = False
        if penalises(params):
            self.counts_V = torch.zeros(vocab_size, device=device)
            self.in_prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.in_prompt_V[torch.tensor(prompt_token_ids, device=device)] = True
        self.bias = dict(params.logit_bias or {})

    @property
    def masks(self) -> bool:
        """Whether tokens may be forbidden, so that none might be left."""
        return bool(self.grammar or self.bad_words or self.params.min_tokens or self.forbidden_V is not None)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take notice of a request's verified tokens, `tokens` being all of them with the prompt."""
        new = list(tokens[self.num_prompt_tokens + len(self.output) :])
        self.output += new
        self.exhausted = {}
        if self.counts_V is not None and new:
            ids = torch.tensor(new, device=self.counts_V.device)
            self.counts_V.index_add_(0, ids, torch.ones(len(new), device=ids.device))
        if self.grammar is not None and not self.grammar.advance(new):
            self.exhausted[()] = f"its grammar does not allow the tokens {new} that were chosen"

    def banned(self, path: Sequence[int]) -> list[int]:
        """Tokens that bad words and min_tokens forbid after the output and these drafts."""
        history = [*self.output[max(0, len(self.output) - self._longest) :], *path]
        banned = [
            word[-1]
            for word in self.bad_words
            if len(word) - 1 <= len(history) and tuple(history[len(history) - len(word) + 1 :]) == word[:-1]
        ]
        if len(self.output) + len(path) < self.params.min_tokens:
            banned += self.end_token_ids
        return banned

    @property
    def _longest(self) -> int:
        return max((len(word) - 1 for word in self.bad_words), default=0)

    def names(self) -> str:
        """The sampling parameters that may forbid tokens."""
        given = {
            "structured_outputs": self.grammar is not None,
            "allowed_token_ids": self.forbidden_V is not None,
            "bad_words": bool(self.bad_words),
            "min_tokens": self.params.min_tokens > 0,
        }
        return ", ".join(name for name, there in given.items() if there)


class ConstraintBuilder:
    """Makes the constraints of requests to one verifier."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
        device: torch.device,
    ) -> None:
        self._tokenizer, self._vocab_size, self._device = tokenizer, vocab_size, device
        self._eos_token_ids = eos_token_ids
        self._grammars = GrammarCompiler(tokenizer, vocab_size, eos_token_ids)

    def build(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> Constraints | None:
        """Constraints of a request, None where it has none; RequestError for ids, words or grammars that are wrong."""
        self._require_in_vocabulary("logit_bias", params.logit_bias or ())
        self._require_in_vocabulary("allowed_token_ids", params.allowed_token_ids or ())
        wanted = params.structured_outputs
        if not (
            penalises(params)
            or params.logit_bias
            or params.allowed_token_ids is not None
            or params.bad_words
            or params.min_tokens
            or wanted is not None
        ):
            return None
        ends = {*self._eos_token_ids, *(params.stop_token_ids or ())}
        return Constraints(
            params,
            prompt_token_ids,
            bad_words=self._words(params.bad_words or ()),
            end_token_ids=sorted(token for token in ends if token < self._vocab_size),
            grammar=None if wanted is None else self._grammars.start(wanted),
            vocab_size=self._vocab_size,
            device=self._device,
        )

    def _words(self, words: Sequence[str]) -> list[list[int]]:
        """Token ids of each word, at the beginning of a text and, where that differs by its first token, after a space.

        As vLLM does it: the form after a space counts where it is as long as the other and begins with another token.
        """
        if words and self._tokenizer is None:
            raise RequestError("bad_words need a tokenizer, and the verifier has none", parameter="bad_words")
        found: list[list[int]] = []
        for word in words:
            assert self._tokenizer is not None
            plain, spaced = (
                list(self._tokenizer.encode(prefix + word.lstrip(), add_special_tokens=False)) for prefix in ("", " ")
            )
            found.append(plain)
            if len(spaced) == len(plain) and spaced[0] != plain[0]:
                found.append(spaced)
        return found

    def _require_in_vocabulary(self, name: str, token_ids: Sequence[int] | dict[int, float]) -> None:
        outside = [token for token in token_ids if token >= self._vocab_size]
        if outside:
            raise RequestError(
                f"sampling parameter {name} has token id {outside[0]}, which is outside 0..{self._vocab_size - 1}",
                parameter=name,
            )


class Constrained(Protocol):
    """A request as far as processing its logits goes: all its tokens, its drafts, and its constraints if it has any."""

    tokens: list[int]
    drafts: list[int]
    constraints: Constraints | None


@dataclass
class _Window:
    """Positions of one row: the drafts that lie before each of them."""

    constraints: Constraints
    paths: Sequence[Sequence[int]]

    def tokens(self, vocab_size: int) -> list[tuple[int, int]]:
        """(position, token) for every draft before a position; what is no token of the verifier's is never reached."""
        return [(t, token) for t, path in enumerate(self.paths) for token in path if 0 <= token < vocab_size]


def process(
    logits_BTV: Tensor, requests: Sequence[Constrained], paths: Sequence[Sequence[Sequence[int]]] | None = None
) -> Tensor:
    """Logits that verification chooses from, float32 [B, T, V]; the given ones where nobody has constraints.

    `paths[b][t]` are the drafts on the way to position t of row b; by default those before it, `drafts[:t]`. Further
    positions of a row are padding and stay as they are, as does what follows a draft that a grammar forbids: neither is
    ever reached. Where a position has no token left to choose, its row's constraints say so in `exhausted`.
    """
    rows = [b for b, request in enumerate(requests) if request.constraints is not None]
    if not rows:
        return logits_BTV
    windows = []
    for b in rows:
        request = requests[b]
        assert request.constraints is not None
        request.constraints.advance(request.tokens)
        chain = [request.drafts[:t] for t in range(len(request.drafts) + 1)]
        windows.append(_Window(request.constraints, chain if paths is None else paths[b]))
    processed_BTV = logits_BTV.to(torch.float32, copy=True)
    index_R = torch.tensor(rows, device=logits_BTV.device)
    logits_RTV = processed_BTV[index_R]
    _mask_by_grammar(logits_RTV, windows)
    _mask_by_allowed_tokens(logits_RTV, windows)
    _mask_banned(logits_RTV, windows)
    _add_bias(logits_RTV, windows)
    _penalise(logits_RTV, windows)
    _note_exhausted(logits_RTV, windows)
    processed_BTV[index_R] = logits_RTV
    return processed_BTV


def penalises(params: SamplingParams) -> bool:
    """Whether tokens that were there before get other logits."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _mask_by_grammar(logits_RTV: Tensor, windows: Sequence[_Window]) -> None:
    places: list[tuple[int, int]] = []
    masks: list[bytes] = []
    for r, window in enumerate(windows):
        grammar = window.constraints.grammar
        if grammar is None or () in window.constraints.exhausted:
            continue
        for t, mask in enumerate(grammar.masks(window.paths)):
            if isinstance(mask, bytes):
                places.append((r, t))
                masks.append(mask)
            elif mask is not None:
                reason = f"its grammar cannot be followed any further: {mask}"
                window.constraints.exhausted[tuple(window.paths[t])] = reason
    if masks:
        allowed_NV = allowed_tokens(masks, logits_RTV.shape[-1], logits_RTV.device)
        index_R, index_T = torch.tensor(places, device=logits_RTV.device).unbind(1)
        logits_RTV[index_R, index_T] = logits_RTV[index_R, index_T].masked_fill(~allowed_NV, _NEVER)


def _mask_by_allowed_tokens(logits_RTV: Tensor, windows: Sequence[_Window]) -> None:
    for r, window in enumerate(windows):
        if window.constraints.forbidden_V is not None:
            logits_RTV[r, : len(window.paths)].masked_fill_(window.constraints.forbidden_V, _NEVER)


def _mask_banned(logits_RTV: Tensor, windows: Sequence[_Window]) -> None:
    banned = [
        (r, t, token)
        for r, window in enumerate(windows)
        if window.constraints.bad_words or window.constraints.params.min_tokens
        for t, path in enumerate(window.paths)
        for token in window.constraints.banned(path)
    ]
    if banned:
        logits_RTV[torch.tensor(banned, device=logits_RTV.device).unbind(1)] = _NEVER


def _add_bias(logits_RTV: Tensor, windows: Sequence[_Window]) -> None:
    entries = [(r, token, bias) for r, window in enumerate(windows) for token, bias in window.constraints.bias.items()]
    if entries:
        device = logits_RTV.device
        index_R, index_V = torch.tensor([entry[:2] for entry in entries], device=device).unbind(1)
        logits_RTV[index_R, :, index_V] += torch.tensor([[entry[2]] for entry in entries], device=device)


def _penalise(logits_RTV: Tensor, windows: Sequence[_Window]) -> None:
    """Penalties of what the prompt or the output (repetition) or the output alone (the others) holds.

    A repeated token's logit is divided by the repetition penalty where it is positive, else multiplied (Keskar et al.,
    arXiv 1909.05858); then frequency_penalty times its count and presence_penalty are subtracted.
    """
    chosen = [r for r, window in enumerate(windows) if window.constraints.counts_V is not None]
    if not chosen:
        return
    device, (_, num_positions, vocab_size) = logits_RTV.device, logits_RTV.shape
    constraints = [windows[r].constraints for r in chosen]
    counts_PV = torch.stack([one.counts_V for one in constraints if one.counts_V is not None])
    in_prompt_PV = torch.stack([one.in_prompt_V for one in constraints if one.in_prompt_V is not None])
    counts_PTV = counts_PV[:, None].repeat(1, num_positions, 1)
    drafted = [(p, *place) for p, r in enumerate(chosen) for place in windows[r].tokens(vocab_size)]
    if drafted:
        index = torch.tensor(drafted, device=device).unbind(1)
        counts_PTV.index_put_(index, torch.ones(len(drafted), device=device), accumulate=True)
    present_PTV = counts_PTV > 0

    def column(name: str) -> Tensor:
        values = [[[float(getattr(one.params, name))]] for one in constraints]
        return torch.tensor(values, device=device)

    index_P = torch.tensor(chosen, device=device)
    logits_PTV, repetition_P11 = logits_RTV[index_P], column("repetition_penalty")
    scaled_PTV = torch.where(logits_PTV > 0, logits_PTV / repetition_P11, logits_PTV * repetition_P11)
    logits_PTV = torch.where(present_PTV | in_prompt_PV[:, None], scaled_PTV, logits_PTV)
    logits_PTV -= column("frequency_penalty") * counts_PTV
    logits_PTV -= column("presence_penalty") * present_PTV
    logits_RTV[index_P] = logits_PTV


def _note_exhausted(logits_RTV: Tensor, windows: Sequence[_Window]) -> None:
    """Tell which positions have no token left, and give them logits that can be computed with."""
    chosen = [r for r, window in enumerate(windows) if window.constraints.masks]
    if not chosen:
        return
    empty_RT = logits_RTV.amax(-1) == _NEVER
    for r, t in empty_RT.nonzero().tolist():
        if t < len(windows[r].paths):
            constraints, path = windows[r].constraints, tuple(windows[r].paths[t])
            count = len(constraints.output) + len(path)
            reason = f"after {count} tokens of output, {constraints.names()} together leave no token to choose"
            constraints.exhausted.setdefault(path, reason)
    logits_RTV.masked_fill_(empty_RT[..., None], 0.0)
