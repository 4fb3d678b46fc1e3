"""Sequential temperature scaling on data whose right temperatures are known."""

import pytest
import torch

from speculators.errors import UsageError
from speculators.models.dspark.calibration import (
    expected_calibration_error,
    sequential_temperatures,
    survival,
    temperature_grid,
)

# On the grid, so that an exact search finds them exactly.
TRUE = [2.0, 0.5, 2.0 ** (9 / 32)]


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, len(TRUE), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_survival_is_the_running_product_of_scaled_sigmoids() -> None:
    logits_NK = torch.tensor([[0.0, 2.0]], dtype=torch.float64)
    expected = 1 / (1 + 2.718281828459045**-1.0)
    assert survival(logits_NK, [3.0, 2.0])[0].tolist() == pytest.approx([0.5, 0.5 * expected])
    assert survival(logits_NK)[0, 0].item() == pytest.approx(0.5)


def test_calibration_error_by_hand() -> None:
    """Four rows in two of ten bins: |0.15 + 0.12 - 1| / 4 + |0.95 + 1.0 - 1| / 4."""
    predicted = torch.tensor([0.15, 0.12, 0.95, 1.0])
    accepted = torch.tensor([True, False, False, True])
    assert expected_calibration_error(predicted, accepted, bins=10) == pytest.approx(0.73 / 4 + 0.95 / 4)
    assert expected_calibration_error(predicted, accepted, bins=1) == pytest.approx(abs(2.22 - 2) / 4)


def test_the_grid_tries_one_first_and_both_directions_alike() -> None:
    grid = temperature_grid()
    assert grid[0] == 1.0
    assert (min(grid), max(grid)) == (1 / 16, 16.0)
    assert {round(1 / value, 9) for value in grid} == {round(value, 9) for value in grid}


def test_expected_outcomes_give_the_temperatures_that_made_them() -> None:
    logits_NK = logits(400)
    assert sequential_temperatures(logits_NK, survival(logits_NK, TRUE)) == pytest.approx(TRUE)
    assert sequential_temperatures(logits_NK, survival(logits_NK)) == [1.0, 1.0, 1.0]


def test_drawn_outcomes_give_them_nearly() -> None:
    logits_NK = logits(60_000)
    draws = torch.rand(logits_NK.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    accepted_NK = draws < torch.sigmoid(logits_NK / torch.tensor(TRUE, dtype=torch.float64))
    survived_NK = accepted_NK.long().cumprod(-1).bool()
    found = sequential_temperatures(logits_NK, survived_NK)
    assert found == pytest.approx(TRUE, rel=0.12)
    for position in range(3):
        before = expected_calibration_error(survival(logits_NK)[:, position], survived_NK[:, position])
        after = expected_calibration_error(survival(logits_NK, found)[:, position], survived_NK[:, position])
        assert after < 0.01 < before


def test_a_position_is_judged_by_the_product_so_far() -> None:
    """Where the first token is accepted less than any temperature can say, the second makes up for it."""
    logits_NK = torch.full((10, 2), 2.0, dtype=torch.float64)
    survived = torch.cat((torch.full((10, 1), 0.3), torch.full((10, 1), 0.3)), 1)
    first, second = sequential_temperatures(logits_NK, survived)
    # sigmoid(2 / t) is above a half at every t, so the first stays at the highest temperature of the grid.
    assert first == 16.0
    before = torch.sigmoid(torch.tensor(2.0 / 16)).item()
    errors = {t: abs(before * torch.sigmoid(torch.tensor(2.0 / t)).item() - 0.3) for t in temperature_grid()}
    assert second == min(errors, key=errors.get)


def test_logits_that_no_temperature_changes_keep_one() -> None:
    assert sequential_temperatures(torch.zeros(5, 2), torch.zeros(5, 2, dtype=torch.bool)) == [1.0, 1.0]


def test_rows_count_as_far_as_they_are_valid() -> None:
    logits_NK = logits(400)
    survived = survival(logits_NK, TRUE)
    valid = torch.ones(400, 3, dtype=torch.bool)
    valid[300:, 1] = False
    spoilt, wrong = logits_NK.clone(), survived.clone()
    spoilt[300:, 1:], wrong[300:, 1:] = float("nan"), 1.0
    found = sequential_temperatures(spoilt, wrong, valid)
    assert found == pytest.approx(TRUE)
    assert found[1:] == sequential_temperatures(logits_NK[:300], survived[:300])[1:]


def test_bad_input_is_refused() -> None:
    with pytest.raises(UsageError, match=r"\[4, 2\], \[4, 3\]"):
        sequential_temperatures(torch.zeros(4, 2), torch.zeros(4, 3))
    with pytest.raises(UsageError, match="not finite"):
        sequential_temperatures(torch.full((4, 2), float("nan")), torch.zeros(4, 2))
    with pytest.raises(UsageError, match="draft token 1"):
        sequential_temperatures(torch.zeros(4, 2), torch.zeros(4, 2), torch.tensor([[True, False]] * 4))
