"""The forms of low rank, against plain loops: products, sizes, the chain rule, and the fit of each form."""

import itertools

import numpy as np
import pytest

from prunekit.techniques.factorize.forms import CHANNELS, PAIR, SEPARABLE, TUCKER, Factors, Layout, Structure
from prunekit.techniques.factorize.window_forms import WindowForms

AREA = Layout((3, 2), 5, 7)
STRUCTURES = [Structure(CHANNELS, (4,)), Structure(SEPARABLE, (4,)), Structure(TUCKER, (3, 4))]


def named(structure):
    return structure.form


def drawn(layout, structure, seed=0):
    rng = np.random.default_rng(seed)
    return Factors(structure.form, tuple(rng.normal(size=shape) for shape in layout.shapes(structure)))


def kernel(factors, layout):
    """The kernel of a convolution, entry by entry."""
    columns, found = layout.window[1], np.zeros((*layout.window, layout.inputs, layout.outputs))
    for a, b, c, o in itertools.product(*map(range, found.shape)):
        p = a * columns + b
        if factors.form == CHANNELS:
            found[a, b, c, o] = factors.arrays[0][p * layout.inputs + c] @ factors.arrays[1][:, o]
        elif factors.form == SEPARABLE:
            found[a, b, c, o] = factors.arrays[0][a, c] @ factors.arrays[1][b, :, o]
        else:
            entry, core, outer = factors.arrays
            found[a, b, c, o] = entry[c] @ core[p] @ outer[:, o]
    return found


@pytest.mark.parametrize("structure", STRUCTURES, ids=named)
def test_the_matrix_is_that_of_the_kernel_that_plain_loops_give(structure):
    factors = drawn(AREA, structure)
    np.testing.assert_allclose(factors.matrix, kernel(factors, AREA).reshape(-1, 7), atol=1e-12)
    assert factors.size == AREA.parameters(structure) == sum(one.size for one in factors.arrays)


@pytest.mark.parametrize("structure", STRUCTURES, ids=named)
@pytest.mark.parametrize("squared", [False, True])
def test_the_chain_rule_is_the_sum_over_the_entries_of_the_weight(structure, squared):
    factors, gradient = drawn(AREA, structure), np.random.default_rng(1).normal(size=(30, 7))
    if squared:
        gradient = np.square(gradient)
    for place, found in enumerate(factors.chained(gradient, squared=squared)):
        wanted = np.zeros_like(factors.arrays[place])
        for index in np.ndindex(*wanted.shape):
            # A product is linear in each array: the derivative is the product with a one in its place.
            one = np.zeros_like(wanted)
            one[index] = 1.0
            arrays = (*factors.arrays[:place], one, *factors.arrays[place + 1 :])
            if squared:
                arrays = tuple(map(np.square, arrays))
            wanted[index] = np.sum(gradient * Factors(structure.form, arrays).matrix)
        np.testing.assert_allclose(found, wanted, atol=1e-10)


def test_a_window_has_the_forms_that_its_sides_allow():
    assert Layout((), 9, 4).forms() == (PAIR,) and Layout((1, 1), 9, 4).forms() == (CHANNELS,)
    assert AREA.forms() == (CHANNELS, SEPARABLE, TUCKER)
    assert Layout((3,), 9, 4).forms() == Layout((3, 1), 9, 4).forms() == Layout((3, 3, 3), 9, 4).forms()
    assert Layout((3,), 9, 4).forms() == (CHANNELS, TUCKER)
    assert AREA.refusal(SEPARABLE) is None and Layout((), 9, 4).refusal(TUCKER) is None
    assert "3 x 1 has no two sides" in Layout((3, 1), 9, 4).refusal(SEPARABLE)
    # One form alone: the option says nothing about it.
    assert Layout((1, 1), 9, 4).refusal(TUCKER) is None and Layout((1, 1), 9, 4).asked(TUCKER) == (CHANNELS,)
    assert AREA.asked(TUCKER) == (TUCKER,) and AREA.asked("auto") == AREA.forms()


def problem(layout, seed=0, examples=700):
    """Rows of a layer whose neighbouring positions and channels are alike, as in images; its weight."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(examples, 1, 4)) + 0.4 * rng.normal(size=(examples, layout.positions, 4))
    rows = np.maximum(common @ rng.normal(size=(4, layout.inputs)), 0) + 0.1 * rng.normal(
        size=(examples, layout.positions, layout.inputs)
    )
    inputs = layout.positions * layout.inputs
    return rows.reshape(examples, inputs), rng.normal(size=(inputs, layout.outputs))


def lost(x, w, factors):
    return np.square(x @ (w - factors.matrix)).sum()


LAYOUTS = {"3 x 3": Layout((3, 3), 12, 10), "3 x 2": Layout((3, 2), 6, 16)}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("form", [CHANNELS, SEPARABLE, TUCKER])
def test_at_full_rank_the_weight_itself_comes_out(name, form):
    layout = LAYOUTS[name]
    x, w = problem(layout)
    for gram in (x.T @ x, np.ones(len(w))):
        found = WindowForms(gram, w, layout).factors(layout.full(form))
        np.testing.assert_allclose(found.matrix, w, atol=1e-8)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("structure", [Structure(SEPARABLE, (5,)), Structure(TUCKER, (4, 6))], ids=named)
def test_a_fit_to_the_outputs_loses_less_than_one_to_the_weights_and_alternations_less_than_the_first(name, structure):
    layout = LAYOUTS[name]
    x, w = problem(layout)
    on_data = WindowForms(x.T @ x, w, layout)
    of_weights = WindowForms(np.ones(len(w)), w, layout).factors(structure)
    found = on_data.factors(structure)
    assert lost(x, w, found) < 0.7 * lost(x, w, of_weights)
    errors = on_data.errors((structure.form,))
    if structure in errors:
        assert lost(x, w, found) <= errors[structure] * (1 + 1e-9)
    # No step along the gradient of one array makes it much better.
    best = lost(x, w, found)
    for place, array in enumerate(found.arrays):
        gradient = found.chained(-2 * x.T @ (x @ (w - found.matrix)))[place]
        step = 1e-4 * np.linalg.norm(array) * gradient / max(np.linalg.norm(gradient), 1e-12)
        arrays = (*found.arrays[:place], array - step, *found.arrays[place + 1 :])
        assert lost(x, w, Factors(structure.form, arrays)) > best * (1 - 2e-3)


@pytest.mark.parametrize("form", [CHANNELS, SEPARABLE, TUCKER])
def test_the_errors_are_those_of_the_factors_or_above(form):
    layout = LAYOUTS["3 x 3"]
    x, w = problem(layout)
    forms = WindowForms(x.T @ x, w, layout)
    errors, total = forms.errors((form,)), np.square(x @ w).sum()
    assert {one.form for one in errors} == {form}
    for structure in list(errors)[:: max(len(errors) // 8, 1)]:
        real = lost(x, w, forms.factors(structure))
        assert real <= errors[structure] * (1 + 1e-6) + 1e-9 * total
        assert real >= 0.5 * errors[structure] - 1e-9 * total


@pytest.mark.parametrize("rank", [1, 4, 9])
def test_without_inputs_separable_is_the_truncated_decomposition_of_the_rearranged_kernel(rank):
    """Jaderberg et al. 2014: rows and columns of the window apart."""
    layout = LAYOUTS["3 x 2"]
    _, w = problem(layout)
    forms = WindowForms(np.ones(len(w)), w, layout)
    apart = w.reshape(3, 2, 6, 16).transpose(0, 2, 1, 3).reshape(18, 32)
    singular = np.linalg.svd(apart, compute_uv=False)
    found = forms.factors(Structure(SEPARABLE, (rank,)))
    assert np.square(w - found.matrix).sum() == pytest.approx(np.square(singular[rank:]).sum(), rel=1e-6)


def test_without_inputs_tucker_loses_no_more_than_the_truncated_decomposition_of_both_modes():
    """De Lathauwer et al. 2000; Kim et al. 2016: HOSVD of the modes of inputs and outputs."""
    layout = LAYOUTS["3 x 3"]
    _, w = problem(layout)
    tensor = w.reshape(9, 12, 10)
    inputs = np.linalg.svd(tensor.transpose(1, 0, 2).reshape(12, -1))[0][:, :5]
    outputs = np.linalg.svd(tensor.reshape(-1, 10).T)[0][:, :6]
    theirs = np.einsum("pco,cd,oq->pdq", tensor, inputs @ inputs.T, outputs @ outputs.T)
    found = WindowForms(np.ones(len(w)), w, layout).factors(Structure(TUCKER, (5, 6)))
    assert np.square(w - found.matrix).sum() <= np.square(tensor - theirs).sum() * (1 + 1e-9)


def test_values_between_the_layers_are_as_large_as_what_is_made_of_them():
    layout = LAYOUTS["3 x 3"]
    x, w = problem(layout)
    entry, core, _ = WindowForms(x.T @ x, w, layout).factors(Structure(TUCKER, (5, 6))).arrays
    sizes = np.linalg.norm(x.reshape(-1, 12) @ entry, axis=0)
    rest = WindowForms(x.T @ x, w, layout).factors(Structure(SEPARABLE, (5,)))
    before = np.linalg.norm(
        x.reshape(-1, 3, 3, 12).transpose(0, 2, 1, 3).reshape(-1, 36) @ rest.arrays[0].reshape(36, 5), axis=0
    )
    behind = np.linalg.norm(rest.arrays[1], axis=(0, 2))
    np.testing.assert_allclose(before / behind, (before / behind)[0], rtol=1e-6)
    assert sizes.max() / sizes.min() < 100 and core.shape == (9, 5, 6)


def test_a_weight_of_zeros_has_factors():
    layout = LAYOUTS["3 x 3"]
    forms = WindowForms(np.eye(108), np.zeros((108, 10)), layout)
    for structure in (Structure(CHANNELS, (2,)), Structure(SEPARABLE, (2,)), Structure(TUCKER, (2, 2))):
        found = forms.factors(structure)
        assert all(np.isfinite(one).all() for one in found.arrays) and not found.matrix.any()


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("structure", [Structure(CHANNELS, (4,)), Structure(SEPARABLE, (4,))], ids=named)
def test_the_second_array_is_fitted_to_what_becomes_of_the_first(structure):
    rng = np.random.default_rng(5)
    rows, matrix = rng.normal(size=(200, 30)), rng.normal(size=(30, 7))
    seen = []

    def coarse(one, gram):
        seen.append(one)
        np.testing.assert_allclose(gram, gram.T, atol=1e-8)
        return 0.5 * np.sign(one) if len(seen) == 1 else one

    found = WindowForms(rows.T @ rows, matrix, AREA).changed(structure, coarse)
    np.testing.assert_array_equal(np.abs(found.arrays[0]), 0.5)
    # All weights that some second array makes of this first one, and the nearest of them.
    columns = []
    for index in np.ndindex(*found.arrays[1].shape):
        one = np.zeros_like(found.arrays[1])
        one[index] = 1.0
        columns.append((rows @ Factors(structure.form, (found.arrays[0], one)).matrix).ravel())
    basis, wanted = np.stack(columns, axis=1), (rows @ matrix).ravel()
    left = wanted - basis @ np.linalg.lstsq(basis, wanted)[0]
    assert np.square(rows @ (matrix - found.matrix)).sum() == pytest.approx(np.square(left).sum(), rel=0.01)
