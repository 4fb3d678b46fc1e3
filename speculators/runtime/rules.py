"""Which rule verifies drafts: one object a rule, made of a user's options, run by Triton's kernels where those run.

Shapes and shared arguments are those of `rejection`.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import isfinite
from typing import ClassVar, Protocol, TypeGuard

import torch
from torch import Tensor

from speculators.errors import EngineError
from speculators.models.execution import launches_triton
from speculators.runtime import rejection
from speculators.runtime.additional import LEAST_BLOCK, RejectionSamplerConfig
from speculators.runtime.lossy_rejection import posterior_tolerance, verify_ascend_block, verify_entropy
from speculators.runtime.rejection import Verification

logger = logging.getLogger(__name__)

REJECTION_SAMPLE_METHODS = ("standard", "block", "synthetic")


@dataclass(frozen=True)
class SampledRows:
    """What sampled requests are verified by: shared arguments of `rejection`, and the logits [B, S, V] as they came."""

    target_probs_BSV: Tensor
    draft_ids_BK: Tensor
    lengths_B: Tensor
    draft_probs_BKV: Tensor | None
    accept_uniform_BK: Tensor
    sample_noise_BV: Tensor
    logits_BSV: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """The arguments that every rule takes, in order."""
        return (
            self.target_probs_BSV,
            self.draft_ids_BK,
            self.lengths_B,
            self.draft_probs_BKV,
            self.accept_uniform_BK,
            self.sample_noise_BV,
        )


class _Implementation(Protocol):
    """What `rejection` has, and its twin among the kernels."""

    def verify_greedy(self, target_ids_BS: Tensor, draft_ids_BK: Tensor, lengths_B: Tensor, /) -> Verification: ...

    def verify_standard(
        self, target: Tensor, ids: Tensor, lengths: Tensor, draft: Tensor | None, accept: Tensor, sample: Tensor, /
    ) -> Verification: ...

    def verify_block(
        self, target: Tensor, ids: Tensor, lengths: Tensor, draft: Tensor | None, accept: Tensor, sample: Tensor, /
    ) -> Verification: ...

    def verify_synthetic(
        self,
        target: Tensor,
        ids: Tensor,
        lengths: Tensor,
        draft: Tensor | None,
        accept: Tensor,
        sample: Tensor,
        rates_K: Tensor,
        /,
    ) -> Verification: ...

    def verify_synthetic_greedy(
        self, target_ids_BS: Tensor, ids: Tensor, lengths: Tensor, accept: Tensor, rates_K: Tensor, /
    ) -> Verification: ...


@cache
def implementation(device: torch.device) -> _Implementation:
    """The module that verifies on a device: Triton's kernels on a GPU where Triton runs, else the reference."""
    if not launches_triton(device):
        return rejection
    from speculators.runtime.kernels import verification

    return verification


class Rule(ABC):
    """How drafts are verified.

    `name` is what a user knows it by. `lossless` says whether outputs follow the verifier's own law, `notice` what a
    user is told at the start, and `tosses_greedy` whether greedy requests need coins too.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True
    tosses_greedy: ClassVar[bool] = False
    notice: ClassVar[str | None] = None

    def verify_greedy(
        self, target_ids_BS: Tensor, draft_ids_BK: Tensor, lengths_B: Tensor, coins_BK: Tensor | None = None
    ) -> Verification:
        """Verify greedy requests against the verifier's argmax; `coins_BK` U[0, 1) where the rule tosses any."""
        return implementation(draft_ids_BK.device).verify_greedy(target_ids_BS, draft_ids_BK, lengths_B)

    @abstractmethod
    def verify_sampled(self, rows: SampledRows) -> Verification:
        """Verify sampled requests."""


@dataclass(frozen=True)
class StandardRule(Rule):
    """Token by token, losslessly: `rejection.verify_standard`."""

    name: ClassVar[str] = "standard"

    def verify_sampled(self, rows: SampledRows) -> Verification:
        """Verify sampled requests."""
        return implementation(rows.draft_ids_BK.device).verify_standard(*rows.arguments)


@dataclass(frozen=True)
class BlockRule(Rule):
    """The drafts as a whole, losslessly: `rejection.verify_block`."""

    name: ClassVar[str] = "block"

    def verify_sampled(self, rows: SampledRows) -> Verification:
        """Verify sampled requests."""
        return implementation(rows.draft_ids_BK.device).verify_block(*rows.arguments)


@dataclass(frozen=True)
class SyntheticRule(Rule):
    """By coin alone, to measure speed at a given acceptance: `rejection.verify_synthetic`.

    `rates` are conditional: how likely each draft is kept where those before it were.
    """

    rates: tuple[float, ...]
    name: ClassVar[str] = "synthetic"
    lossless: ClassVar[bool] = False
    tosses_greedy: ClassVar[bool] = True
    notice: ClassVar[str | None] = (
        "rejection_sample_method 'synthetic' accepts drafts by coin, whatever they are: outputs are meaningless, only "
        "speed can be measured"
    )

    def verify_greedy(
        self, target_ids_BS: Tensor, draft_ids_BK: Tensor, lengths_B: Tensor, coins_BK: Tensor | None = None
    ) -> Verification:
        """Verify greedy requests by their coins."""
        assert coins_BK is not None
        rates_K = self._rates(draft_ids_BK)
        verify = implementation(draft_ids_BK.device).verify_synthetic_greedy
        return verify(target_ids_BS, draft_ids_BK, lengths_B, coins_BK, rates_K)

    def verify_sampled(self, rows: SampledRows) -> Verification:
        """Verify sampled requests by their coins."""
        rates_K = self._rates(rows.draft_ids_BK)
        return implementation(rows.draft_ids_BK.device).verify_synthetic(*rows.arguments, rates_K)

    def _rates(self, draft_ids_BK: Tensor) -> Tensor:
        if draft_ids_BK.shape[1] > len(self.rates):
            raise EngineError(
                f"the synthetic rule has {len(self.rates)} rates for {draft_ids_BK.shape[1]} drafts; give it one for "
                "each speculative token"
            )
        return torch.tensor(self.rates, dtype=torch.float64, device=draft_ids_BK.device)


@dataclass(frozen=True)
class EntropyRule(Rule):
    """Lossy: `lossy_rejection.verify_entropy`; greedy requests are verified exactly."""

    threshold: float = 0.95
    alpha: float = 0.4
    name: ClassVar[str] = "lossy_entropy"
    lossless: ClassVar[bool] = False
    notice: ClassVar[str | None] = (
        "rejection_sampler_config.enable_entropy_verify is lossy: sampled outputs no longer follow the verifier's law"
    )

    def tolerance(self, rows: SampledRows) -> Tensor:
        """What coins are multiplied by, float64 [B, K]."""
        return posterior_tolerance(rows.logits_BSV[:, :-1], self.threshold, self.alpha)

    def verify_sampled(self, rows: SampledRows) -> Verification:
        """Verify sampled requests."""
        return verify_entropy(*rows.arguments, self.tolerance(rows))


@dataclass(frozen=True)
class AscendBlockRule(Rule):
    """Lossy: `lossy_rejection.verify_ascend_block`, with `entropy`'s tolerance where there is one.

    Greedy requests are verified exactly.
    """

    entropy: EntropyRule | None = None
    name: ClassVar[str] = "lossy_ascend_block"
    lossless: ClassVar[bool] = False
    notice: ClassVar[str | None] = (
        "rejection_sampler_config.enable_block_verify is lossy: sampled outputs no longer follow the verifier's law; "
        "rejection_sample_method 'block' is the lossless rule"
    )

    def verify_sampled(self, rows: SampledRows) -> Verification:
        """Verify sampled requests."""
        tolerance_BK = None if self.entropy is None else self.entropy.tolerance(rows)
        return verify_ascend_block(*rows.arguments, tolerance_BK)


def make_rule(
    rejection_sample_method: str = "standard",
    num_speculative_tokens: int = 1,
    *,
    synthetic_acceptance_rates: Sequence[float] | None = None,
    synthetic_acceptance_length: float | None = None,
    lossy: RejectionSamplerConfig | None = None,
) -> Rule:
    """The rule of a user's options, K being `num_speculative_tokens`; says what a user of it must know.

    `synthetic_acceptance_rates` are unconditional: how often a step keeps the first i drafts at least.
    `synthetic_acceptance_length` is the mean of tokens emitted a step. EngineError names the option, what was got and
    what is allowed.
    """
    method, rates, length = rejection_sample_method, synthetic_acceptance_rates, synthetic_acceptance_length
    if method not in REJECTION_SAMPLE_METHODS:
        allowed = ", ".join(REJECTION_SAMPLE_METHODS)
        raise EngineError(f"speculative_config: rejection_sample_method={method!r}: expected one of {allowed}")
    for key, value in (("synthetic_acceptance_rates", rates), ("synthetic_acceptance_length", length)):
        if value is not None and method != "synthetic":
            raise EngineError(
                f"speculative_config: {key}={value!r} belongs to rejection_sample_method 'synthetic', got {method!r}; "
                "choose that method or leave the key out"
            )
    rule: Rule
    if lossy is not None and lossy.lossy:
        rule = _lossy_rule(lossy, method, num_speculative_tokens)
    elif method == "synthetic":
        rule = SyntheticRule(conditional_rates(_prefix_rates(num_speculative_tokens, rates, length)))
    else:
        rule = BlockRule() if method == "block" else StandardRule()
    if rule.notice is not None:
        logger.warning("%s", rule.notice)
    return rule


def _lossy_rule(options: RejectionSamplerConfig, method: str, num_tokens: int) -> Rule:
    asked = [name for name in ("enable_block_verify", "enable_entropy_verify") if getattr(options, name)]
    if method != "standard":
        raise EngineError(
            f"rejection_sampler_config: {' and '.join(asked)} cannot be combined with rejection_sample_method "
            f"{method!r}; leave either out"
        )
    if options.enable_block_verify and num_tokens < LEAST_BLOCK:
        raise EngineError(
            f"rejection_sampler_config: enable_block_verify needs num_speculative_tokens of at least "
            f"{LEAST_BLOCK}, got {num_tokens}; draft more, or leave it out"
        )
    entropy = None
    if options.enable_entropy_verify:
        entropy = EntropyRule(options.posterior_threshold, options.posterior_alpha)
    if entropy is None or options.enable_block_verify:
        return AscendBlockRule(entropy)
    return entropy


def _prefix_rates(num_tokens: int, rates: Sequence[float] | None, length: float | None) -> list[float]:
    """Unconditional rates of K positions, of whichever option is given."""
    if (rates is None) is (length is None):
        raise EngineError(
            "speculative_config: rejection_sample_method 'synthetic' needs exactly one of synthetic_acceptance_rates "
            f"(got {rates!r}) and synthetic_acceptance_length (got {length!r})"
        )
    if rates is None:
        if not _is_number(length) or not 1 <= length <= num_tokens + 1:
            raise EngineError(
                f"speculative_config: synthetic_acceptance_length={length!r}: expected a number in "
                f"[1, {num_tokens + 1}] (num_speculative_tokens + 1)"
            )
        return rates_of_length(length, num_tokens)
    expected = f"a list of num_speculative_tokens={num_tokens} numbers in [0, 1], none above the one before it"
    fine = isinstance(rates, list | tuple) and len(rates) == num_tokens
    fine = fine and all(_is_number(rate) and 0 <= rate <= 1 for rate in rates)
    if not fine or any(after > before for before, after in pairwise(rates)):
        raise EngineError(f"speculative_config: synthetic_acceptance_rates={rates!r}: expected {expected}")
    return [float(rate) for rate in rates]


def rates_of_length(length: float, num_tokens: int) -> list[float]:
    """Unconditional rates of K positions whose acceptance length is `length`, of least variance.

    As many drafts as always fit are always kept, and the next one as often as the rest asks.
    """
    return [min(max(length - 1 - place, 0.0), 1.0) for place in range(num_tokens)]


def conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """How likely each position is kept where those before it were; 0 after a rate of 0."""
    before = (1.0, *rates[:-1])
    return tuple(rate / previous if previous > 0 else 0.0 for rate, previous in zip(rates, before, strict=True))


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
