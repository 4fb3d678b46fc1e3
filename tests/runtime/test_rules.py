"""Each rule against numpy, what a rule is made of, and synthetic acceptance."""

import logging
from itertools import product

import numpy as np
import pytest
import torch

from speculators.errors import EngineError
from speculators.runtime.additional import RejectionSamplerConfig
from speculators.runtime.lossy_rejection import posterior_tolerance, verify_ascend_block, verify_entropy
from speculators.runtime.rejection import (
    Verification,
    verify_block,
    verify_standard,
    verify_synthetic,
    verify_synthetic_greedy,
)
from speculators.runtime.rules import (
    AscendBlockRule,
    BlockRule,
    EntropyRule,
    Rule,
    SampledRows,
    StandardRule,
    SyntheticRule,
    conditional_rates,
    make_rule,
    rates_of_length,
)
from tests.runtime import numpy_rules

ROWS, VOCAB = 150, 11
RATES = [0.9, 0.7, 0.8, 0.4, 0.6]


class Batch:
    """Random rows of mixed lengths, where drafts and verifier give many tokens nothing, and padding is no valid id."""

    def __init__(self, slots: int, *, one_hot: bool, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = 2 * torch.randn(ROWS, slots + 1, VOCAB, generator=generator)
        scores = self.logits[:, :-1] + 1.5 * torch.randn(ROWS, slots, VOCAB, generator=generator)
        gone = torch.rand(2, ROWS, slots + 1, VOCAB, generator=generator) < 0.3
        self.target = self.logits.masked_fill(gone[0], -torch.inf).softmax(-1)
        self.draft = scores.masked_fill(gone[1, :, :-1], -torch.inf).softmax(-1)
        self.lengths = torch.randint(0, slots + 1, (ROWS,), generator=generator)
        ids = self.draft.reshape(-1, VOCAB).multinomial(1, generator=generator) if slots else torch.zeros(0, 1)
        self.ids = ids.view(ROWS, slots).long()
        self.ids[torch.arange(slots) >= self.lengths[:, None]] = -1
        self.coins = torch.rand(ROWS, slots, dtype=torch.float64, generator=generator)
        self.noise = torch.empty(ROWS, VOCAB).exponential_(generator=generator)
        self.arguments = (
            self.target,
            self.ids,
            self.lengths,
            None if one_hot else self.draft,
            self.coins,
            self.noise,
        )

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray | None, list[int], np.ndarray, np.ndarray]:
        """p, q, drafts, coins and noise of one row, as numpy's rules take them."""
        draft = self.arguments[3]
        return (
            self.target[number].double().numpy(),
            None if draft is None else draft[number].double().numpy(),
            self.ids[number, : self.lengths[number]].tolist(),
            self.coins[number].numpy(),
            self.noise[number].double().numpy(),
        )


def emitted(result: Verification) -> list[list[int]]:
    """What each row emits; that the rest is -1 is checked on the way."""
    rows = []
    for count, row in zip(result.num_accepted_B.tolist(), result.output_ids_BS.tolist(), strict=True):
        assert row[count + 1 :] == [-1] * (len(row) - count - 1)
        rows.append(row[: count + 1])
    return rows


each_kind = pytest.mark.parametrize(
    ("slots", "one_hot"), list(product([0, 1, 2, 5], [False, True])), ids=lambda value: str(value)
)


@each_kind
def test_rules_are_numpys(slots: int, one_hot: bool) -> None:
    batch = Batch(slots, one_hot=one_hot)
    rates = torch.tensor(RATES, dtype=torch.float64)
    tolerance = torch.rand(ROWS, slots, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    chosen = [tolerance[i].numpy() for i in range(ROWS)]
    cases = {
        "standard": (verify_standard(*batch.arguments), [()] * ROWS),
        "block": (verify_block(*batch.arguments), [()] * ROWS),
        "synthetic": (verify_synthetic(*batch.arguments, rates), [(RATES,)] * ROWS),
        "standard with tolerance": (verify_entropy(*batch.arguments, tolerance), [(one,) for one in chosen]),
        "ascend_block": (verify_ascend_block(*batch.arguments), [()] * ROWS),
        "ascend_block with tolerance": (verify_ascend_block(*batch.arguments, tolerance), [(one,) for one in chosen]),
    }
    for name, (result, options) in cases.items():
        rule = getattr(numpy_rules, name.removesuffix(" with tolerance"))
        assert emitted(result) == [rule(*batch.row(i), *options[i]) for i in range(ROWS)], name
    if slots == 5:
        # They are different rules.
        assert len({tuple(map(tuple, emitted(result))) for result, _ in cases.values()}) == len(cases)


@each_kind
def test_synthetic_greedy_rows_end_with_the_argmax(slots: int, one_hot: bool) -> None:
    batch, rates = Batch(slots, one_hot=one_hot, seed=1), torch.tensor(RATES, dtype=torch.float64)
    best = batch.target.argmax(-1)
    result = verify_synthetic_greedy(best, batch.ids, batch.lengths, batch.coins, rates)
    expected = []
    for i in range(ROWS):
        _, _, x, u, _ = batch.row(i)
        kept = next((k for k in range(len(x)) if u[k] >= RATES[k]), len(x))
        expected.append([*x[:kept], int(best[i, kept])])
    assert emitted(result) == expected


def test_the_tolerance_is_that_of_the_entropy() -> None:
    logits = 3 * torch.randn(7, 4, 19, generator=torch.Generator().manual_seed(2))
    for threshold, alpha in ((0.95, 0.4), (0.5, 0.0), (1.0, 2.5)):
        found = posterior_tolerance(logits, threshold, alpha)
        assert found.dtype is torch.float64
        np.testing.assert_allclose(found, numpy_rules.tolerances(logits.double().numpy(), threshold, alpha), atol=1e-6)
    assert (posterior_tolerance(logits, 0.5, 0.0) == 0.5).all()


def test_rules_run_their_functions() -> None:
    """Also lossy ones, whose tolerance is of the logits as they came."""
    batch = Batch(5, one_hot=False)
    rows = SampledRows(*batch.arguments, batch.logits)
    tolerance = posterior_tolerance(batch.logits[:, :-1], 0.8, 1.5)
    entropy = EntropyRule(0.8, 1.5)
    rates = torch.tensor(RATES, dtype=torch.float64)
    pairs: list[tuple[Rule, Verification]] = [
        (StandardRule(), verify_standard(*batch.arguments)),
        (BlockRule(), verify_block(*batch.arguments)),
        (SyntheticRule(tuple(RATES)), verify_synthetic(*batch.arguments, rates)),
        (entropy, verify_entropy(*batch.arguments, tolerance)),
        (AscendBlockRule(), verify_ascend_block(*batch.arguments)),
        (AscendBlockRule(entropy), verify_ascend_block(*batch.arguments, tolerance)),
    ]
    for rule, expected in pairs:
        assert torch.equal(rule.verify_sampled(rows).output_ids_BS, expected.output_ids_BS), rule
    assert [rule.lossless for rule, _ in pairs] == [True, True, False, False, False, False]
    assert all(("lossy" in rule.name) is isinstance(rule, EntropyRule | AscendBlockRule) for rule, _ in pairs)


def test_lossy_rules_keep_greedy_requests_exact() -> None:
    targets, drafts = torch.tensor([[5, 6, 7], [5, 6, 7]]), torch.tensor([[5, 6], [5, 9]])
    for rule in (StandardRule(), BlockRule(), EntropyRule(), AscendBlockRule()):
        result = rule.verify_greedy(targets, drafts, torch.tensor([2, 2]))
        assert emitted(result) == [[5, 6, 7], [5, 6]]


def test_make_rule_takes_what_a_user_asks(caplog: pytest.LogCaptureFixture) -> None:
    """Only what is no lossless rule says so at the start."""
    with caplog.at_level(logging.WARNING):
        assert make_rule() == StandardRule()
        assert make_rule("block", 3) == BlockRule()
        assert make_rule("standard", 1, lossy=RejectionSamplerConfig()) == StandardRule()
        assert caplog.messages == []
        assert make_rule("synthetic", 3, synthetic_acceptance_rates=[0.8, 0.4, 0]) == SyntheticRule((0.8, 0.5, 0.0))
        assert make_rule("synthetic", 3, synthetic_acceptance_length=2.25) == SyntheticRule((1.0, 0.25, 0.0))
        assert len(caplog.messages) == 2
        assert all("outputs are meaningless" in message for message in caplog.messages)
        caplog.clear()
        entropy = RejectionSamplerConfig(enable_entropy_verify=True, posterior_threshold=0.5, posterior_alpha=0)
        assert make_rule("standard", 1, lossy=entropy) == EntropyRule(0.5, 0.0)
        block = RejectionSamplerConfig(enable_block_verify=True)
        assert make_rule("standard", 3, lossy=block) == AscendBlockRule()
        both = RejectionSamplerConfig(enable_block_verify=True, enable_entropy_verify=True)
        assert make_rule("standard", 3, lossy=both) == AscendBlockRule(EntropyRule(0.95, 0.4))
        assert len(caplog.messages) == 3
        assert all("lossy" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rejection_sample_method": "blok"}, "rejection_sample_method='blok': expected one of standard, block"),
        ({"synthetic_acceptance_length": 2.0}, "synthetic_acceptance_length=2.0 belongs to .*synthetic.*'standard'"),
        ({"rejection_sample_method": "block", "synthetic_acceptance_rates": [1]}, "synthetic_acceptance_rates"),
        ({"rejection_sample_method": "synthetic"}, "exactly one of"),
        (
            {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [1, 1, 1],
                "synthetic_acceptance_length": 2,
            },
            "exactly one of",
        ),
        *(
            ({"rejection_sample_method": "synthetic", "synthetic_acceptance_length": value}, r"in \[1, 4\]")
            for value in (0.99, 4.01, True, "2", float("nan"), float("inf"))
        ),
        *(
            (
                {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": value},
                "num_speculative_tokens=3 numbers in",
            )
            for value in ([], [0.5], [0.5] * 4, [0.5, 0.6, 0.1], [1.1, 1, 1], [1, 0, -0.1], [True, 0, 0], "abc", 0.5)
        ),
        *(
            (
                {"rejection_sample_method": method, "lossy": RejectionSamplerConfig(**{option: True})},
                f"{option} cannot be comb",
            )
            for method in ("block", "synthetic")
            for option in ("enable_block_verify", "enable_entropy_verify")
        ),
        ({"num_speculative_tokens": 2, "lossy": RejectionSamplerConfig(enable_block_verify=True)}, "at least 3, got 2"),
    ],
)
def test_what_no_rule_can_be_made_of(options: dict, words: str) -> None:
    with pytest.raises(EngineError, match=words):
        make_rule(**{"num_speculative_tokens": 3, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"enable_block_verify": 1},
        {"enable_entropy_verify": "yes"},
        {"enable_entropy_verify": True, "posterior_threshold": 0},
        {"enable_entropy_verify": True, "posterior_threshold": 1.01},
        {"enable_entropy_verify": True, "posterior_threshold": "0.9"},
        {"enable_entropy_verify": True, "posterior_alpha": -0.1},
        {"enable_entropy_verify": True, "posterior_alpha": float("nan")},
        {"posterior_threshold": 0.9},
        {"enable_block_verify": True, "posterior_alpha": 0.5},
    ],
)
def test_wrong_lossy_options_are_named(options: dict) -> None:
    name, value = list(options.items())[-1]
    with pytest.raises(EngineError, match=f"rejection_sampler_config: .*{name}={value!r}.*: expected"):
        RejectionSamplerConfig(**options)


def test_rates_of_a_length_have_its_mean_and_least_variance() -> None:
    """All of floor(length - 1) drafts, and one more as often as the rest says."""
    assert rates_of_length(2.75, 4) == [1.0, 0.75, 0.0, 0.0]
    assert rates_of_length(1, 2) == [0.0, 0.0]
    assert rates_of_length(3, 2) == [1.0, 1.0]
    for length in np.linspace(1, 6, 41):
        assert 1 + sum(rates_of_length(float(length), 5)) == pytest.approx(length)


def test_conditional_rates_multiply_to_the_given_ones() -> None:
    assert conditional_rates([0.8, 0.4, 0.1]) == pytest.approx((0.8, 0.5, 0.25))
    assert conditional_rates([0.5, 0.0, 0.0]) == (0.5, 0.0, 0.0)
    assert conditional_rates([1, 1]) == (1.0, 1.0)


@pytest.mark.parametrize("asked", [1.0, 1.3, 2.0, 3.55, 5.0, [0.9, 0.7, 0.35, 0.1], [1, 1, 0.5, 0.5], [0, 0, 0, 0]])
@pytest.mark.parametrize("greedy", [True, False])
def test_synthetic_acceptance_is_what_was_asked(asked: float | list[float], greedy: bool) -> None:
    """Over 5,000 steps: the length within 2 %, each position's share within five standard errors, 0 and 1 exactly."""
    steps, slots = 5000, 4
    options = {f"synthetic_acceptance_{'rates' if isinstance(asked, list) else 'length'}": asked}
    rates = asked if isinstance(asked, list) else rates_of_length(asked, slots)
    rule = make_rule("synthetic", slots, **options)
    generator = torch.Generator().manual_seed(4)
    # The verifier never gives a drafted token anything: coins alone decide.
    target = torch.tensor([0.0, 0.5, 0.5]).expand(steps, slots + 1, 3)
    ids, lengths = torch.zeros(steps, slots, dtype=torch.int64), torch.full((steps,), slots)
    coins = torch.rand(steps, slots, dtype=torch.float64, generator=generator)
    noise = torch.empty(steps, 3).exponential_(generator=generator)
    if greedy:
        result = rule.verify_greedy(target.argmax(-1), ids, lengths, coins)
    else:
        result = rule.verify_sampled(SampledRows(target, ids, lengths, None, coins, noise, target.log()))
    kept = result.num_accepted_B.double()
    assert float(kept.mean()) + 1 == pytest.approx(1 + sum(rates), rel=0.02)
    for place, rate in enumerate(rates):
        share = float((kept > place).double().mean())
        assert abs(share - rate) <= 5 * (rate * (1 - rate) / steps) ** 0.5
    last = result.output_ids_BS.gather(1, result.num_accepted_B[:, None])
    assert set(last.unique().tolist()) == ({1} if greedy else {1, 2})


def test_more_drafts_than_synthetic_rates_are_refused() -> None:
    targets, drafts = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64)
    coins = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(EngineError, match="1 rates for 2 drafts"):
        SyntheticRule((0.5,)).verify_greedy(targets, drafts, torch.tensor([2]), coins)
