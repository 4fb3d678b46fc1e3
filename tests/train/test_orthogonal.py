"""Muon's orthogonalisation: what it does to singular values, and the polynomials that do it."""

import numpy as np
import pytest
import torch

from speculators.train.orthogonal import MARGIN, best_quintic, orthogonalise, polar_express, times_transposed

JORDAN = (3.4445, -4.775, 2.0315)


def value(quintic: tuple[float, float, float], at: np.ndarray) -> np.ndarray:
    a, b, c = quintic
    return a * at + b * at**3 + c * at**5


@pytest.mark.parametrize("shape", [(8, 8), (6, 11), (13, 5)])
@pytest.mark.parametrize("tight", [False, True])
def test_orthogonalise_keeps_the_singular_vectors_and_evens_the_values(shape: tuple[int, int], tight: bool) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape, dtype=torch.float64)
    result = orthogonalise(matrix, [JORDAN] * 5, 1e-7, tight=tight)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    rotated = left.T @ result @ right.T
    torch.testing.assert_close(rotated, torch.diag(rotated.diagonal()), rtol=0, atol=1e-9)
    # The scalar iteration s -> a s + b s^3 + c s^5, applied five times to the normalised singular values.
    expected = values / (values.pow(4).sum() ** 0.25 if tight else values.norm())
    for _ in range(5):
        expected = 3.4445 * expected - 4.775 * expected**3 + 2.0315 * expected**5
    torch.testing.assert_close(rotated.diagonal(), expected)


def test_the_tight_scale_bounds_singular_values_by_one_and_is_no_looser_than_the_frobenius_norm() -> None:
    torch.manual_seed(0)
    identity = [(1.0, 0.0, 0.0)]
    for rows, columns in ((5, 9), (30, 30), (40, 3)):
        matrix = torch.randn(rows, columns, dtype=torch.float64)
        loose, tight = (
            torch.linalg.matrix_norm(orthogonalise(matrix, identity, 1e-7, tight=tight), 2) for tight in (False, True)
        )
        assert loose < tight <= 1 + 1e-9


def test_a_matrix_of_zeros_stays_one() -> None:
    for tight in (False, True):
        assert orthogonalise(torch.zeros(3, 4), polar_express(3), 1e-7, tight=tight).equal(torch.zeros(3, 4))


@pytest.mark.parametrize("interval", [(1e-3, 1.0), (0.1, 1.9), (0.7, 1.3), (0.95, 1.05)])
def test_the_error_of_the_best_quintic_alternates(interval: tuple[float, float]) -> None:
    """Chebyshev: of three coefficients the best ones are those whose error has its size four times, signs in turn."""
    places = np.linspace(*interval, 200_001)
    error = 1 - value(best_quintic(*interval), places)
    size = np.abs(error).max()
    extremes = np.nonzero(np.abs(error) >= size * (1 - 1e-6))[0]
    signs = np.sign(error[extremes])
    assert len(np.nonzero(np.diff(signs))[0]) == 3
    assert np.abs(error[[0, -1]]).min() == pytest.approx(size, rel=1e-6)


def test_the_best_quintic_gives_the_published_coefficients() -> None:
    """The first polynomial of arXiv 2505.16932: for singular values from 1e-3, made for those from 0.024 and scaled."""
    quintic = best_quintic(0.02407327424182761, 1.0)
    low, high = value(quintic, np.array([1e-3, 1.0]))
    published = (8.28721201814563, -23.595886519098837, 17.300387312530933)
    np.testing.assert_allclose(np.array(quintic) * 2 / (low + high), published, rtol=1e-9)


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8])
def test_polar_express_ends_within_three_tenths_of_one(steps: int) -> None:
    quintics = polar_express(steps)
    assert len(quintics) == steps
    places = ended = np.geomspace(1e-8, 1, 100_001)
    for quintic in quintics[:-1]:
        # Without the margin against rounding.
        ended = value(quintic, ended * MARGIN)
    ended = value(quintics[-1], ended)
    reached = places[np.nonzero(ended >= 0.7 - 1e-6)[0][0]]
    assert 0.7 - 1e-6 <= ended[places >= reached].min() <= ended.max() <= 1.3 + 1e-6
    # Jordan's one polynomial, as often, has its least singular value higher up.
    other = places
    for _ in range(steps):
        other = value(JORDAN, other)
    assert (other >= 0.7).sum() < (ended >= 0.7 - 1e-6).sum()


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_rounding_to_bfloat16_makes_no_singular_value_grow(steps: int) -> None:
    torch.manual_seed(0)
    for matrix in torch.randn(50, 12, 20):
        ended = torch.linalg.svdvals(orthogonalise(matrix.bfloat16(), polar_express(steps), 1e-7, tight=True).float())
        # Rounding is relative to the largest entries: up to a twentieth here.
        assert ended.max() < 1.35


def test_many_iterations_are_possible() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(6, 9, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    torch.testing.assert_close(orthogonalise(matrix, polar_express(30), 1e-7, tight=True), left @ right)


@pytest.mark.parametrize("size", [5, 384, 577])
def test_a_symmetric_product_is_made_by_half(size: int) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(size, 40, dtype=torch.float64)
    plus = matrix[:, :7] @ matrix[:, :7].T
    torch.testing.assert_close(times_transposed(matrix), matrix @ matrix.T)
    torch.testing.assert_close(
        times_transposed(matrix, plus=plus, beta=0.3, alpha=2.0), 2.0 * matrix @ matrix.T + 0.3 * plus
    )
