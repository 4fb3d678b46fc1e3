"""What a request asks of the verifier's logits before a token is chosen, at every position of its draft window.

Position t of a row is processed as though the request's tokens and its drafts before t were the history, so that each
position gets exactly the logits that decoding token by token would get there. The order is vLLM's: grammar, allowed
tokens, bad words, min_tokens, logit_bias, penalties; temperature and what follows it come later (`sampling.py`).
Shapes: B rows, T positions (a draft window's K + 1), V the verifier's vocabulary, N entries of any number.
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

    `exhausted` tells, for drafts of the newest window after which no token was left to choose, the reason. Where tokens
    that were there before are penalised, `counts` has how often the output holds each, those of the prompt first.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        bad_words: Sequence[Sequence[int]],
        end_token_ids: Sequence[int],
        grammar: GrammarState | None,
    ) -> None:
        self.params, self.grammar = params, grammar
        self.bad_words = [tuple(word) for word in bad_words]
        self.end_token_ids = list(end_token_ids)
        self.exhausted: dict[tuple[int, ...], str] = {}
        self.num_prompt_tokens = len(prompt_token_ids)
        self.output: list[int] = []
        self.counts: dict[int, int] = dict.fromkeys(prompt_token_ids, 0) if penalises(params) else {}
        self.num_distinct_in_prompt = len(self.counts)
        self.bias = dict(params.logit_bias or {})

    @property
    def masks(self) -> bool:
        """Whether tokens may be forbidden, so that none might be left."""
        return bool(self.grammar or self.bad_words or self.params.min_tokens or self.params.allowed_token_ids)

    def advance(self, tokens: Sequence[int]) -> None:
        """Take notice of a request's verified tokens, `tokens` being all of them with the prompt."""
        new = list(tokens[self.num_prompt_tokens + len(self.output) :])
        self.output += new
        self.exhausted = {}
        if penalises(self.params):
            for token in new:
                self.counts[token] = self.counts.get(token, 0) + 1
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
            "allowed_token_ids": bool(self.params.allowed_token_ids),
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
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, eos_token_ids
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

    row: int
    constraints: Constraints
    paths: Sequence[Sequence[int]]


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
        windows.append(_Window(b, request.constraints, chain if paths is None else paths[b]))
    processed_BTV = logits_BTV.to(torch.float32, copy=True)
    _mask_by_grammar(processed_BTV, windows)
    _mask_by_allowed_tokens(processed_BTV, windows)
    _mask_banned(processed_BTV, windows)
    _add_bias(processed_BTV, windows)
    _penalise(processed_BTV, windows)
    _note_exhausted(processed_BTV, windows)
    return processed_BTV


def as_its_grammar_leaves(logits_TV: Tensor, request: Constrained, tokens: Sequence[int]) -> Tensor:
    """Logits that `tokens`, which a request gains, were chosen from, but with its grammar's forbidden ones alone taken.

    Position t is that of tokens[t]; without a grammar, the given ones. Log-probabilities are told of these, as vLLM
    tells them: it masks by the grammar before it reads them, and biases, bans and penalties come after.
    """
    constraints = request.constraints
    if constraints is None or constraints.grammar is None:
        return logits_TV
    masked_1TV = logits_TV.to(torch.float32, copy=True)[None]
    _mask_by_grammar(masked_1TV, [_Window(0, constraints, [tokens[:t] for t in range(len(tokens))])])
    return masked_1TV[0]


def penalises(params: SamplingParams) -> bool:
    """Whether tokens that were there before get other logits."""
    return params.repetition_penalty != 1 or params.presence_penalty != 0 or params.frequency_penalty != 0


def _mask_by_grammar(logits_BTV: Tensor, windows: Sequence[_Window]) -> None:
    places: list[tuple[int, int]] = []
    masks: list[bytes] = []
    for window in windows:
        grammar = window.constraints.grammar
        if grammar is None or () in window.constraints.exhausted:
            continue
        for t, mask in enumerate(grammar.masks(window.paths)):
            if isinstance(mask, bytes):
                places.append((window.row, t))
                masks.append(mask)
            elif mask is not None:
                reason = f"its grammar cannot be followed any further: {mask}"
                window.constraints.exhausted[tuple(window.paths[t])] = reason
    if masks:
        forbidden_NV = ~allowed_tokens(masks, logits_BTV.shape[-1], logits_BTV.device)
        for (b, t), forbidden_V in zip(places, forbidden_NV, strict=True):
            logits_BTV[b, t].masked_fill_(forbidden_V, _NEVER)


def _mask_by_allowed_tokens(logits_BTV: Tensor, windows: Sequence[_Window]) -> None:
    for window in windows:
        allowed = window.constraints.params.allowed_token_ids
        if allowed is not None:
            logits_TV = logits_BTV[window.row, : len(window.paths)]
            index_A = torch.tensor(allowed, device=logits_BTV.device)
            kept_TA = logits_TV[:, index_A]
            logits_TV.fill_(_NEVER)
            logits_TV[:, index_A] = kept_TA


def _mask_banned(logits_BTV: Tensor, windows: Sequence[_Window]) -> None:
    banned = [
        (window.row, t, token)
        for window in windows
        if window.constraints.bad_words or window.constraints.params.min_tokens
        for t, path in enumerate(window.paths)
        for token in window.constraints.banned(path)
    ]
    if banned:
        logits_BTV[torch.tensor(banned, device=logits_BTV.device).unbind(1)] = _NEVER


def _add_bias(logits_BTV: Tensor, windows: Sequence[_Window]) -> None:
    entries = [(one.row, token, bias) for one in windows for token, bias in one.constraints.bias.items()]
    if entries:
        device = logits_BTV.device
        index_B, index_V = torch.tensor([entry[:2] for entry in entries], device=device).unbind(1)
        logits_BTV[index_B, :, index_V] += torch.tensor([[entry[2]] for entry in entries], device=device)


def _penalise(logits_BTV: Tensor, windows: Sequence[_Window]) -> None:
    """Penalties of what the prompt or the output (repetition) or the output alone (the others) holds.

    A repeated token's logit is divided by the repetition penalty where it is positive, else multiplied (Keskar et al.,
    arXiv 1909.05858); then frequency_penalty times its count and presence_penalty are subtracted. Only the N pairs of a
    row and a token of its history are touched, not the vocabulary.
    """
    places: list[tuple[int, int]] = []
    in_prompt: list[bool] = []
    counts: list[int] = []
    penalties: list[tuple[float, float, float]] = []
    drafted: list[tuple[int, int]] = []
    for window in windows:
        params, known = window.constraints.params, dict(window.constraints.counts)
        if not penalises(params):
            continue
        for path in window.paths:
            # What is no token of the verifier's is never reached.
            known.update((token, 0) for token in path if token not in known and 0 <= token < logits_BTV.shape[-1])
        place = {token: len(places) + i for i, token in enumerate(known)}
        drafted += [(place[token], t) for t, path in enumerate(window.paths) for token in path if token in place]
        places += [(window.row, token) for token in known]
        in_prompt += [i < window.constraints.num_distinct_in_prompt for i in range(len(known))]
        counts += known.values()
        penalties += [(params.repetition_penalty, params.frequency_penalty, params.presence_penalty)] * len(known)
    if not places:
        return
    device = logits_BTV.device
    index_B, index_V = torch.tensor(places, device=device).unbind(1)
    counts_NT = torch.tensor(counts, dtype=torch.float32, device=device)[:, None].repeat(1, logits_BTV.shape[1])
    if drafted:
        index = torch.tensor(drafted, device=device).unbind(1)
        counts_NT.index_put_(index, torch.ones(len(drafted), device=device), accumulate=True)
    present_NT = counts_NT > 0
    repetition_N1, frequency_N1, presence_N1 = torch.tensor(penalties, device=device)[:, :, None].unbind(1)
    logits_NT = logits_BTV[index_B, :, index_V]
    scaled_NT = torch.where(logits_NT > 0, logits_NT / repetition_N1, logits_NT * repetition_N1)
    repeated_NT = present_NT | torch.tensor(in_prompt, device=device)[:, None]
    logits_NT = torch.where(repeated_NT, scaled_NT, logits_NT) - frequency_N1 * counts_NT - presence_N1 * present_NT
    logits_BTV[index_B, :, index_V] = logits_NT


def _note_exhausted(logits_BTV: Tensor, windows: Sequence[_Window]) -> None:
    """Tell which positions have no token left, and give them logits that can be computed with."""
    masked = [window for window in windows if window.constraints.masks]
    if not masked:
        return
    highest_RT = torch.stack([logits_BTV[window.row].amax(-1) for window in masked])
    for r, t in (highest_RT == _NEVER).nonzero().tolist():
        constraints, paths = masked[r].constraints, masked[r].paths
        logits_BTV[masked[r].row, t] = 0.0
        if t < len(paths):
            count = len(constraints.output) + len(paths[t])
            reason = f"after {count} tokens of output, {constraints.names()} together leave no token to choose"
            constraints.exhausted.setdefault(tuple(paths[t]), reason)
