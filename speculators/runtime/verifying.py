"""One verification of a batch: the engine's rule applied to greedy and to sampled requests."""

import torch
from torch import Tensor

from speculators.runtime.rejection import Verification
from speculators.runtime.request import Request
from speculators.runtime.rules import Rule, SampledRows
from speculators.runtime.sampling import NoiseStreams, exponential, probabilities, uniform


class BatchVerifier:
    """Applies a rule to a batch of requests whose drafts the verifier has scored.

    `verifier_ids_D` int64 gives the verifier's id of each draft id; None where they are the same. A request's noise
    comes from its own streams, as much of it as it has drafts, so that its tokens do not depend on the batch.
    """

    def __init__(self, rule: Rule, verifier_ids_D: Tensor | None) -> None:
        self.rule, self.verifier_ids_D = rule, verifier_ids_D

    def __call__(self, logits_BSV: Tensor, draft_ids_BK: Tensor, requests: list[Request]) -> list[list[int]]:
        """Tokens each request gains: its accepted drafts and one more; row b verifies `requests[b]`."""
        emitted: list[list[int]] = [[] for _ in requests]
        for greedy in (True, False):
            chosen = [i for i, r in enumerate(requests) if r.params.greedy is greedy]
            if not chosen:
                continue
            logits, drafts = logits_BSV, draft_ids_BK
            if len(chosen) < len(requests):
                rows = torch.tensor(chosen, device=logits.device)
                logits, drafts = logits_BSV[rows], draft_ids_BK[rows]
            verify = self._verify_greedy if greedy else self._verify_sampled
            result = verify(logits, drafts, [requests[i] for i in chosen])
            counts, outputs = result.num_accepted_B.tolist(), result.output_ids_BS.tolist()
            for place, i in enumerate(chosen):
                emitted[i] = outputs[place][: counts[place] + 1]
        return emitted

    def _verify_greedy(self, logits_BSV: Tensor, drafts_BK: Tensor, requests: list[Request]) -> Verification:
        coins_BK = None
        if self.rule.tosses_greedy:
            coins_BK = _coins([_noise(r, logits_BSV.device) for r in requests], requests, drafts_BK)
        return self.rule.verify_greedy(logits_BSV.argmax(-1), drafts_BK, _lengths(requests, drafts_BK), coins_BK)

    def _verify_sampled(self, logits_BSV: Tensor, drafts_BK: Tensor, requests: list[Request]) -> Verification:
        batch, width, vocab = logits_BSV.shape
        params = [r.params for r in requests for _ in range(width)]
        probs_BSV = probabilities(logits_BSV.reshape(batch * width, vocab), params).view(batch, width, vocab)
        noise = [_noise(r, logits_BSV.device) for r in requests]
        rows = SampledRows(
            probs_BSV,
            drafts_BK,
            _lengths(requests, drafts_BK),
            self._draft_probs(requests, drafts_BK, vocab),
            _coins(noise, requests, drafts_BK),
            torch.stack([exponential(vocab, streams.sample) for streams in noise]),
            logits_BSV,
        )
        return self.rule.verify_sampled(rows)

    def _draft_probs(self, requests: list[Request], drafts_BK: Tensor, vocab: int) -> Tensor | None:
        """Draft probabilities over the verifier's vocabulary [B, K, V]; None when every draft is one-hot."""
        if all(r.draft_probs_KD is None for r in requests):
            return None
        probs_BKV = torch.zeros((*drafts_BK.shape, vocab), device=drafts_BK.device)
        for row, request in enumerate(requests):
            kept = request.draft_probs_KD
            if kept is None:
                probs_BKV[row].scatter_(1, drafts_BK[row][:, None], 1.0)
            elif self.verifier_ids_D is None:
                probs_BKV[row, : len(kept), : kept.shape[1]] = kept
            else:
                probs_BKV[row][: len(kept)][:, self.verifier_ids_D] = kept
        return probs_BKV


def _lengths(requests: list[Request], drafts_BK: Tensor) -> Tensor:
    return torch.tensor([len(r.drafts) for r in requests], device=drafts_BK.device)


def _noise(request: Request, device: torch.device) -> NoiseStreams:
    """A request's streams; a greedy one is given them where coins are first tossed for it."""
    if request.noise is None:
        request.noise = NoiseStreams.from_seed(request.seed, device)
    return request.noise


def _coins(noise: list[NoiseStreams], requests: list[Request], drafts_BK: Tensor) -> Tensor:
    """U[0, 1) of each request's drafts, float64 [B, K]."""
    coins_BK = torch.zeros(drafts_BK.shape, dtype=torch.float64, device=drafts_BK.device)
    for row, (streams, request) in enumerate(zip(noise, requests, strict=True)):
        coins_BK[row, : len(request.drafts)] = uniform(len(request.drafts), streams.accept)
    return coins_BK
