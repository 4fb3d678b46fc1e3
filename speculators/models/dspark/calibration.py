"""Sequential temperature scaling of a confidence head, so that its survival probabilities mean what they say.

A draft's first k + 1 tokens survive with probability c_0 * ... * c_k. Each confidence c_k = sigmoid(z_k / t_k) gets a
temperature; they are found from left to right, each by a search that makes the product so far as calibrated as can be,
those before it being fixed (arXiv 2607.05147). Shape suffixes: N blocks, M of them that count, K draft
tokens of a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from speculators.errors import UsageError
from speculators.models.draft_model import PackedBatch
from speculators.models.dspark.config import DSparkConfig
from speculators.models.dspark.model import DSparkModel
from speculators.models.dspark.objective import Confidences, DSparkObjective
from speculators.models.losses import VerifierHead
from speculators.models.speculator import Speculator

BINS = 20
_STEPS_AN_OCTAVE, _OCTAVES = 32, 4


def temperature_grid() -> list[float]:
    """The temperatures tried: 1/16 to 16, evenly on a logarithmic scale, those nearest to 1 first."""
    most = _STEPS_AN_OCTAVE * _OCTAVES
    steps = sorted(range(-most, most + 1), key=lambda step: (abs(step), step))
    return [2.0 ** (step / _STEPS_AN_OCTAVE) for step in steps]


def survival(logits_NK: Tensor, temperatures: Sequence[float] | None = None) -> Tensor:
    """Probability [N, K] that tokens 0..k are all accepted: the running product of sigmoid(z / t), t = 1 where None."""
    if temperatures is not None:
        logits_NK = logits_NK / torch.tensor(temperatures, dtype=logits_NK.dtype, device=logits_NK.device)
    return torch.sigmoid(logits_NK).cumprod(-1)


def expected_calibration_error(predicted_N: Tensor, outcome_N: Tensor, bins: int = BINS) -> float:
    """Sum over `bins` equal intervals of [0, 1] of the rows' share times |mean prediction - mean outcome| there.

    `predicted_N` in [0, 1]; `outcome_N` bool, or an expectation in [0, 1].
    """
    index_N = (predicted_N * bins).long().clamp(0, bins - 1)
    gap_N = predicted_N.double() - outcome_N.double()
    return gap_N.new_zeros(bins).index_add_(0, index_N, gap_N).abs().sum().item() / len(gap_N)


def sequential_temperatures(
    logits_NK: Tensor, survived_NK: Tensor, valid_NK: Tensor | None = None, *, bins: int = BINS
) -> list[float]:
    """Return the temperature of each position's confidence logit, K numbers.

    `logits_NK` float are the head's; `survived_NK` says whether tokens 0..k were all accepted (bool, or the probability
    of it); `valid_NK` bool where that is known. A row counts at position k where it is valid up to k. Of temperatures
    that do equally well, the one nearest to 1 is taken. UsageError where shapes differ, numbers are not finite or a
    position has no row.
    """
    valid_NK = torch.ones_like(logits_NK, dtype=torch.bool) if valid_NK is None else valid_NK
    if logits_NK.dim() != 2 or not logits_NK.shape == survived_NK.shape == valid_NK.shape:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in (logits_NK, survived_NK, valid_NK))
        raise UsageError(f"logits, survived and valid are {shapes}; expected one shape [blocks, draft tokens]")
    valid_NK = valid_NK.long().cumprod(-1).bool()
    if not (logits_NK[valid_NK].isfinite().all() and survived_NK[valid_NK].isfinite().all()):
        raise UsageError("confidence logits or outcomes are not finite; calibrate on a draft that computes numbers")
    before_N, found = logits_NK.new_ones(len(logits_NK), dtype=torch.float64), []
    for position in range(logits_NK.shape[1]):
        counted = valid_NK[:, position]
        if not counted.any():
            raise UsageError(f"no block reaches draft token {position}; calibrate on more data, or on fewer tokens")
        logits_M, before_M = logits_NK[counted, position].double(), before_N[counted]
        outcome_M = survived_NK[counted, position]
        best, least = 1.0, float("inf")
        for temperature in temperature_grid():
            error = expected_calibration_error(before_M * torch.sigmoid(logits_M / temperature), outcome_M, bins)
            if error < least:
                best, least = temperature, error
        found.append(best)
        before_N = before_N * torch.sigmoid(logits_NK[:, position].double() / best)
    return found


def calibrate(
    speculator: Speculator, objective: DSparkObjective, batches: Iterable[PackedBatch], verifier_head: VerifierHead
) -> Speculator:
    """Return `calibrated` by the temperatures that fit the given batches, which training should not have seen.

    A token's true chance is 1 - total variation between the two distributions: that of a token drawn from the draft's.
    Blocks stand where the objective puts them. UsageError for a draft without a confidence head, or too few batches.
    """
    parts: list[Confidences] = []
    for batch in batches:
        found = objective.confidences(speculator.draft, batch, verifier_head)
        if found is None:
            raise UsageError("this draft has no confidence head; train one with enable_confidence_head")
        parts.append(found)
    if not parts:
        raise UsageError("no batches to calibrate on; give some that training has not seen")
    temperatures = sequential_temperatures(
        torch.cat([part.logits_AJ for part in parts]),
        torch.cat([part.survived_AJ for part in parts]),
        torch.cat([part.counted_AJ for part in parts]),
    )
    return calibrated(speculator, temperatures)


def calibrated(speculator: Speculator, temperatures: Sequence[float]) -> Speculator:
    """Return the same draft, its tensors shared, with these `confidence_temperatures` in its config.

    FormatError where they are not one positive number a token that a block predicts.
    """
    config = DSparkConfig.from_json(speculator.config.to_json() | {"confidence_temperatures": list(temperatures)})
    draft = DSparkModel(config)
    present = {name: tensor for name, tensor in speculator.draft.state_dict().items() if not tensor.is_meta}
    draft.load_state_dict(present, strict=False, assign=True)
    return Speculator(config, draft.train(speculator.draft.training), borrowed=speculator.borrowed)
