"""The arithmetic of SparseGPT against dense algebra in plain NumPy."""

import numpy as np
import pytest

from prunekit.sparsity.reconstruction import (
    curvatures,
    damped_hessian,
    inverse_factor,
    output_error,
    reconstruct,
    reconstruction_errors,
    refit,
    thin,
)


def data(inputs=24, outputs=7, rows=200, seed=0):
    """Correlated rows X, a matrix W and the Hessian X^T X."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, inputs)) @ rng.normal(size=(inputs, inputs))
    return x, rng.normal(size=(inputs, outputs)), x.T @ x


def surgeon(matrix, hessian, damping, run, keep, nearest=lambda row, values: values):
    """Optimal brain surgeon with the inverse written out: after each row, its row and column leave the Hessian."""
    n = len(hessian)
    weights, mask = matrix.copy(), np.ones(matrix.shape, bool)
    damped = hessian + damping * np.trace(hessian) / n * np.eye(n)
    # Inverse of the Hessian of the rows from i on, for each i.
    inverse = [np.linalg.inv(damped[i:, i:]) for i in range(n)]
    for start in range(0, n, run):
        rows = slice(start, min(start + run, n))
        scale = np.array([inverse[i][0, 0] for i in range(rows.start, rows.stop)])
        costs = weights[rows] ** 2 / scale[:, None]
        threshold = np.sort(costs, axis=None)[-keep]
        mask[rows] = costs >= threshold
        for i in range(rows.start, rows.stop):
            error = (weights[i] - np.where(mask[i], nearest(i, weights[i]), 0)) / inverse[i][0, 0]
            weights[i:] -= np.outer(inverse[i][:, 0], error)
    return np.where(mask, weights, 0), mask


def largest(keep):
    def select(rows, scores):
        return scores >= np.sort(scores, axis=None)[-keep]

    return select


@pytest.mark.parametrize("run", [1, 8, 24])
def test_reconstruction_agrees_with_the_surgeon_written_out(run):
    _, matrix, hessian = data()
    keep = 7 * run * 2 // 5
    runs = [slice(start, start + run) for start in range(0, 24, run)]
    found, mask = reconstruct(matrix, inverse_factor(hessian), runs, largest(keep))
    expected, chosen = surgeon(matrix, hessian, 0.01, run, keep)
    np.testing.assert_array_equal(mask, chosen)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)


def halves(row, values):
    """Rounds to multiples of 0.5, in odd rows of 0.25."""
    step = 0.25 if row % 2 else 0.5
    return np.clip(np.round(values / step), -3, 3) * step


@pytest.mark.parametrize("run", [1, 8, 24])
def test_pruning_and_rounding_in_one_pass_agrees_with_the_surgeon_written_out(run):
    _, matrix, hessian = data()
    keep = 7 * run * 2 // 5
    runs = [slice(start, start + run) for start in range(0, 24, run)]
    found, mask = reconstruct(matrix, inverse_factor(hessian), runs, largest(keep), halves)
    expected, chosen = surgeon(matrix, hessian, 0.01, run, keep, halves)
    np.testing.assert_array_equal(mask, chosen)
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-8)
    assert mask.sum() == keep * len(runs)


@pytest.mark.parametrize("run", [1, 5, 24])
def test_rounded_rows_are_exactly_what_was_returned_for_them(run):
    _, matrix, hessian = data()
    returned = np.zeros(matrix.shape)

    def nearest(row, values):
        returned[row] = halves(row, values)
        return returned[row]

    runs = [slice(start, min(start + run, 24)) for start in range(0, 24, run)]
    found, mask = reconstruct(matrix, inverse_factor(hessian), runs, nearest=nearest)
    assert mask.all()
    np.testing.assert_array_equal(found, returned)


def test_without_selection_and_rounding_nothing_changes():
    _, matrix, hessian = data()
    found, mask = reconstruct(matrix, inverse_factor(hessian), [slice(0, 10), slice(10, 24)])
    np.testing.assert_array_equal(found, matrix)
    assert mask.all()


def test_a_rounding_to_the_same_values_changes_no_pruning():
    _, matrix, hessian = data()
    arguments = matrix, inverse_factor(hessian), [slice(0, 24)], largest(70)
    for found, expected in zip(
        reconstruct(*arguments, lambda row, values: values), reconstruct(*arguments), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_unused_inputs_are_pruned_first_and_else_rounded_as_they_are():
    x, matrix, _ = data()
    x[:, [3, 10]] = 0
    factor = inverse_factor(x.T @ x)
    found, mask = reconstruct(matrix, factor, [slice(0, 24)], largest(100), halves)
    assert not mask[[3, 10]].any() and not found[[3, 10]].any()
    found, mask = reconstruct(matrix, factor, [slice(0, 24)], None, halves)
    np.testing.assert_array_equal(found[[3, 10]], [halves(row, matrix[row]) for row in (3, 10)])
    half = np.arange(7) < 4
    found, mask = reconstruct(matrix, factor, [slice(0, 24)], lambda rows, s: np.tile(half, (24, 1)), halves)
    np.testing.assert_array_equal(found[3], np.where(half, halves(3, matrix[3]), 0))


@pytest.mark.parametrize("size", [1, 5, 64, 65, 200])
def test_the_factor_is_the_upper_cholesky_factor_of_the_inverse(size):
    rng = np.random.default_rng(size)
    x = rng.normal(size=(2 * size, size))
    hessian = x.T @ x
    upper = inverse_factor(hessian, 0.01).upper
    damped = hessian + 0.01 * np.trace(hessian) / size * np.eye(size)
    np.testing.assert_allclose(upper, np.linalg.cholesky(np.linalg.inv(damped)).T, rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(curvatures(inverse_factor(hessian)), 1 / np.diag(np.linalg.inv(damped)), rtol=1e-8)


def test_refit_solves_the_normal_equations_of_each_output():
    _, matrix, hessian = data()
    mask = np.random.default_rng(1).random(matrix.shape) < 0.4
    found = refit(matrix, mask, hessian, steps=200, enough=0.0)
    for output in range(matrix.shape[1]):
        kept = np.flatnonzero(mask[:, output])
        expected = np.linalg.solve(hessian[np.ix_(kept, kept)], hessian[kept] @ matrix[:, output])
        np.testing.assert_allclose(found[kept, output], expected, rtol=1e-5, atol=1e-5)
    assert not found[~mask].any()


def test_every_step_of_a_refit_lowers_the_error():
    _, matrix, hessian = data()
    mask = np.random.default_rng(1).random(matrix.shape) < 0.4
    errors = [output_error(refit(matrix, mask, hessian, steps=steps) - matrix, hessian) for steps in range(6)]
    assert all(later < earlier for earlier, later in zip(errors, errors[1:], strict=False))


def test_compensation_and_refit_lower_the_error_one_after_the_other():
    _, matrix, hessian = data()
    found, mask = reconstruct(matrix, inverse_factor(hessian), [slice(0, 24)], largest(70))
    fitted = refit(matrix, mask, hessian, start=found)
    alone, compensated, refitted = (
        output_error(each - matrix, hessian) for each in (np.where(mask, matrix, 0), found, fitted)
    )
    assert refitted < compensated < alone
    assert mask.sum() == 70 and not found[~mask].any() and not fitted[~mask].any()


@pytest.mark.parametrize("rows", [1, 3, 23])
def test_a_singular_hessian_is_damped(rows):
    x, matrix, _ = data(rows=rows)
    found, mask = reconstruct(matrix, inverse_factor(x.T @ x, 0.0), [slice(0, 24)], largest(80))
    assert np.isfinite(found).all() and mask.sum() == 80


def test_unused_inputs_lose_their_weights_first():
    x, matrix, _ = data()
    x[:, [3, 10]] = 0
    factor = inverse_factor(x.T @ x)
    assert np.flatnonzero(factor.unused).tolist() == [3, 10]
    assert curvatures(factor)[[3, 10]].tolist() == [0, 0]
    found, mask = reconstruct(matrix, factor, [slice(0, 24)], largest(100))
    assert not mask[[3, 10]].any() and not found[[3, 10]].any()


def test_an_all_zero_hessian_is_no_error():
    found, _ = reconstruct(np.ones((4, 2)), inverse_factor(np.zeros((4, 4))), [slice(0, 4)], lambda rows, s: s >= 0)
    assert not found.any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_hessian_that_is_not_finite_is_refused(value):
    hessian = np.eye(3)
    hessian[1, 1] = value
    with pytest.raises(ValueError, match="NaN or infinite on the calibration data"):
        damped_hessian(hessian, 0.01)


def test_matrices_of_groups_are_reconstructed_as_each_alone():
    rows = [data(seed=seed) for seed in range(4)]
    matrices, hessians = np.stack([row[1] for row in rows]), np.stack([row[2] for row in rows])
    hessians[1, 3], hessians[1, :, 3] = 0.0, 0.0
    masks, runs = np.random.default_rng(0).random(matrices.shape) < 0.5, [slice(0, 10), slice(10, 24)]
    factor = inverse_factor(hessians)
    found, kept = reconstruct(matrices, factor, runs, lambda rows, scores: masks[..., rows, :])
    np.testing.assert_array_equal(kept, masks)
    for group, each in enumerate(factor.each()):
        alone = inverse_factor(hessians[group])
        np.testing.assert_allclose(each.upper, alone.upper, rtol=1e-12, atol=0.0)
        np.testing.assert_array_equal(each.unused, alone.unused)
        np.testing.assert_allclose(curvatures(factor)[group], curvatures(alone), rtol=1e-12)
        chosen = masks[group]
        expected, _ = reconstruct(matrices[group], alone, runs, lambda rows, scores, chosen=chosen: chosen[rows])
        np.testing.assert_allclose(found[group], expected, rtol=1e-9, atol=1e-12)
    errors = [output_error(*row) for row in zip(found - matrices, hessians, strict=True)]
    assert np.isclose(output_error(found - matrices, hessians), sum(errors))


@pytest.mark.parametrize("length", [1, 31, 40, 96])
def test_rows_change_one_by_one_or_after_all_rows_before_them(length):
    # More rows than change one by one, in runs that end before, at and after these.
    _, matrix, hessian = data(inputs=96, rows=400)
    masks, factor = np.random.default_rng(0).random(matrix.shape) < 0.5, inverse_factor(hessian)
    runs = [slice(start, min(start + length, 96)) for start in range(0, 96, length)]
    found, _ = reconstruct(matrix, factor, runs, lambda rows, scores: masks[rows])
    expected = matrix.copy()
    for i in range(96):
        error = (expected[i] - np.where(masks[i], expected[i], 0.0)) / factor.upper[i, i]
        expected[i:] -= np.outer(factor.upper[i, i:], error)
    np.testing.assert_allclose(found, np.where(masks, expected, 0.0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("damping", [0.01, 0.0])
def test_errors_are_those_of_the_reconstructed_matrix(damping):
    rows = [data(seed=seed) for seed in range(3)]
    matrices, hessians = np.stack([row[1] for row in rows]), np.stack([row[2] for row in rows])
    # An input that is never used, and Hessians that have no factor until more is added to the diagonal.
    hessians[1, 3], hessians[1, :, 3] = 0.0, 0.0
    hessians[2] = np.ones((24, 24))
    masks, runs = np.random.default_rng(0).random(matrices.shape) < 0.5, [slice(0, 10), slice(10, 24)]
    factor = inverse_factor(hessians, damping)
    chosen = matrices, factor, runs, lambda rows, scores: masks[..., rows, :]
    errors, (found, _) = reconstruction_errors(*chosen), reconstruct(*chosen)
    expected = np.einsum("gio,gij,gjo->go", found - matrices, hessians, found - matrices)
    np.testing.assert_allclose(errors, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rows", [400, 30], ids=["more rows than inputs", "fewer"])
def test_errors_in_float32_are_those_in_float64(rows):
    _, matrix, hessian = data(inputs=96, rows=rows)
    mask, runs = np.random.default_rng(0).random(matrix.shape) < 0.3, [slice(0, 40), slice(40, 96)]
    found, expected = (
        reconstruction_errors(matrix.astype(dtype), inverse_factor(hessian), runs, lambda rows, scores: mask[rows])
        for dtype in ("float32", "float64")
    )
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_an_output_is_fitted_as_if_it_were_alone():
    # Some outputs need more steps than others. Inputs that hardly depend on one another: else rounding errors grow.
    rng = np.random.default_rng(0)
    x, matrix = rng.normal(size=(400, 96)), rng.normal(size=(96, 7))
    mask = rng.random(matrix.shape) < np.linspace(0.02, 0.9, 7)
    found = refit(matrix, mask, x.T @ x)
    for output in range(7):
        one = slice(output, output + 1)
        np.testing.assert_allclose(found[:, one], refit(matrix[:, one], mask[:, one], x.T @ x), rtol=1e-9, atol=1e-12)


def test_a_fit_that_ends_early_has_nearly_the_smallest_error():
    _, matrix, hessian = data(inputs=96, rows=400)
    damped, _ = damped_hessian(hessian, 0.01)
    mask = np.random.default_rng(0).random(matrix.shape) < 0.5
    early, late = (
        output_error(refit(matrix, mask, damped, steps=500, enough=enough) - matrix, damped) for enough in (1e-6, 0.0)
    )
    assert late < early < late * (1 + 1e-4)


def of_all(scores, mask, kept):
    """The `kept` entries of the mask with the largest scores."""
    values = np.where(mask, scores, -np.inf)
    return values >= np.sort(values, axis=None)[-kept]


def test_fits_of_several_groups_are_those_of_each():
    groups = [data(seed=seed) for seed in range(3)]
    matrices, hessians = (np.stack([group[i] for group in groups]) for i in (1, 2))
    masks = np.random.default_rng(1).uniform(size=matrices.shape) < 0.4
    for together, *one in zip(refit(matrices, masks, hessians), matrices, masks, hessians, strict=True):
        np.testing.assert_allclose(together, refit(*one), rtol=1e-9, atol=1e-9)


def test_one_round_removes_the_least_scores_and_fits_the_rest():
    _, matrix, hessian = data()
    cost = 1 / np.diag(np.linalg.inv(hessian))
    found, mask = thin(matrix, hessian, cost, of_all, [50])
    expected = of_all(matrix**2 * cost[:, None], np.ones_like(mask), 50)
    np.testing.assert_array_equal(mask, expected)
    for output in range(matrix.shape[1]):
        kept = np.flatnonzero(mask[:, output])
        right = hessian[kept] @ matrix[:, output]
        np.testing.assert_allclose(found[kept, output], np.linalg.solve(hessian[np.ix_(kept, kept)], right), atol=1e-3)


def test_rounds_shrink_the_mask_to_the_last_count_and_lower_the_error():
    errors = []
    for seed in range(5):
        _, matrix, hessian = data(seed=seed)
        cost = 1 / np.diag(np.linalg.inv(hessian))
        seen = []

        def select(scores, mask, kept, seen=seen):
            seen.append(of_all(scores, mask, kept))
            return seen[-1]

        found, mask = thin(matrix, hessian, cost, select, [140, 100, 70, 50, 40])
        assert [int(one.sum()) for one in seen] == [140, 100, 70, 50, 40]
        assert all((later <= earlier).all() for earlier, later in zip(seen, seen[1:], strict=False))
        np.testing.assert_array_equal(found != 0, mask)
        once = thin(matrix, hessian, cost, of_all, [40])[0]
        errors.append([output_error(one - matrix, hessian) for one in (found, once)])
    assert all(rounds < single for rounds, single in errors), errors
