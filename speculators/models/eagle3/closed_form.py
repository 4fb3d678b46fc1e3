"""A first guess of an EAGLE-3 draft by linear regression, from which training starts.

The best linear map from the verifier's features of token t to its last state at token t+1, which predicts token t+2,
is found by ridge regression in seconds; gradient descent needs hundreds of steps to get as far. It becomes `fc`, the
layers start as the identity, and the final norm is the verifier's with a temperature fitted to the regression's error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from speculators.models.draft_model import SampleSource
from speculators.models.eagle3.network import FusedDraftModel
from speculators.models.losses import Head, VerifierHead

# Of the rows' count; features have unit variance.
RIDGE = 0.03
SCALES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
CALIBRATION_ROWS = 512


@torch.no_grad()
def closed_form_start(model: FusedDraftModel, samples: SampleSource, verifier_head: VerifierHead, max_rows: int) -> int:
    """Set `fc`, the feature norms, the layers' outputs and the final norm; returns the rows used, 0 where none fit.

    `max_rows` positions are read, from the first samples on, whose token t+2 the verifier wrote. A draft of another
    width than the verifier, or fewer than two rows, is left as it is.
    """
    width = model.fc.weight.shape[0]
    batches = _Rows(samples, max_rows, model.fc.weight.device)
    if batches.count < 2 or verifier_head.norm_weight.shape[0] != width:
        return 0
    norms = model.feature_norms()
    if norms:
        gain = _inverse_deviation(features for features, _ in _normed(batches, len(norms), norms[0].eps))
        for norm, part in zip(norms, gain.chunk(len(norms)), strict=True):
            norm.weight.copy_(part)
    inputs = model.fc.weight.shape[1]
    gram = torch.zeros(inputs, inputs, device=model.fc.weight.device)
    cross = torch.zeros(inputs, width, device=model.fc.weight.device)
    last: tuple[Tensor, Tensor] | None = None
    for features, states in _normed(batches, len(norms), norms[0].eps if norms else 0.0):
        scaled = features * gain if norms else features
        target = F.rms_norm(states, states.shape[-1:], None, verifier_head.norm_eps)
        gram.addmm_(scaled.T, scaled)
        cross.addmm_(scaled.T, target)
        last = scaled, states
    gram.diagonal().add_(RIDGE * batches.count)
    model.fc.weight.copy_(torch.linalg.solve(gram, cross).T)
    for layer in model.blocks():
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    assert last is not None
    scaled, states = last[0][-CALIBRATION_ROWS:], last[1][-CALIBRATION_ROWS:]
    model.norm.weight.copy_(_calibrated_gain(model, scaled, states, verifier_head))
    return batches.count


class _Rows:
    """Features [R, A*H] and the verifier's next state [R, H], float32, sample by sample; can be read again."""

    def __init__(self, samples: SampleSource, max_rows: int, device: torch.device) -> None:
        self.samples, self.device = samples, device
        self.numbers: list[int] = []
        self.count = 0
        for number in range(len(samples)):
            if self.count >= max_rows:
                break
            rows = len(self._read(number)[0])
            if rows:
                self.numbers.append(number)
                self.count += rows

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self._read(number) for number in self.numbers)

    def _read(self, number: int) -> tuple[Tensor, Tensor]:
        """Supervised rows of a sample; broken states are left to the training loop, which names them."""
        sample = self.samples[number]
        kept = sample.loss_mask[2:]
        features = sample.aux_hidden_states[:-2][kept].flatten(1).to(self.device, torch.float32)
        states = sample.last_hidden_states[1:-1][kept].to(self.device, torch.float32)
        whole = features.isfinite().all(-1) & states.isfinite().all(-1)
        return features[whole], states[whole]


def _normed(batches: _Rows, parts: int, eps: float) -> Iterator[tuple[Tensor, Tensor]]:
    for features, states in batches:
        pieces: Sequence[Tensor] = features.chunk(parts, -1) if parts else ()
        normed = [F.rms_norm(piece, piece.shape[-1:], None, eps) for piece in pieces]
        yield torch.cat(normed, -1) if normed else features, states


def _inverse_deviation(batches: Iterator[Tensor]) -> Tensor:
    total, squares, count = torch.zeros(()), torch.zeros(()), 0
    for features in batches:
        total = total.to(features.device) + features.double().sum(0)
        squares = squares.to(features.device) + features.double().square().sum(0)
        count += len(features)
    variance = (squares / count - (total / count).square()).clamp(min=1e-6)
    return variance.rsqrt().float()


def _calibrated_gain(model: FusedDraftModel, scaled: Tensor, states: Tensor, verifier_head: VerifierHead) -> Tensor:
    """The verifier's norm gain times the scale of `SCALES` whose KL divergence from the verifier is least."""
    ids_D = model.verifier_ids_D
    teacher = verifier_head if ids_D is None else verifier_head.restricted(ids_D)
    log_p = teacher.logits(states).log_softmax(-1)
    guess = F.linear(scaled, model.fc.weight)
    normed = F.rms_norm(guess, guess.shape[-1:], verifier_head.norm_weight, verifier_head.norm_eps)
    head = Head(model.lm_head.weight)
    divergences = [
        float((log_p.exp() * (log_p - head.logits(normed * scale).log_softmax(-1))).sum(-1).mean()) for scale in SCALES
    ]
    return verifier_head.norm_weight * SCALES[divergences.index(min(divergences))]
