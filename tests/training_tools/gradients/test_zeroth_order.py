"""Estimated gradients: against derivatives by hand, and against plain SPSA written out as a loop."""

import numpy as np
import pytest

from prunekit.training_tools.gradients.zeroth_order import SPSA, CentralDifferences


def cubic(labels, outputs):
    """One number per example, with its gradient by hand: a cubic that couples neighbouring outputs."""
    apart = (outputs - labels).reshape(len(outputs), -1)
    values = (apart**3).sum(1) + (apart[:, 1:] * apart[:, :-1]).sum(1)
    gradient = 3 * apart**2
    gradient[:, 1:] += apart[:, :-1]
    gradient[:, :-1] += apart[:, 1:]
    return values, gradient.reshape(outputs.shape)


def data(precision="float64", shape=(4, 3, 2)):
    rng = np.random.default_rng(0)
    return rng.normal(size=shape).astype(precision), rng.normal(size=shape).astype(precision)


class Counted:
    """The cubic as something that can only be evaluated, of each example or of the batch."""

    def __init__(self, labels, per_example):
        self.labels, self.per_example, self.seen = labels, per_example, []

    def __call__(self, outputs):
        self.seen.append(outputs)
        values = cubic(self.labels.astype("float64"), outputs.astype("float64"))[0]
        return values if self.per_example else values.mean()


def exact(labels, outputs, per_example):
    gradient = cubic(labels.astype("float64"), outputs.astype("float64"))[1]
    return gradient if per_example else gradient / len(outputs)


@pytest.mark.parametrize("per_example", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_central_differences_are_exact_to_the_square_of_their_size(dtype, per_example):
    labels, outputs = data(dtype)
    errors = []
    for size in (0.2, 0.1):
        measure = Counted(labels, per_example)
        found = CentralDifferences(size).estimator()(measure, labels, outputs, per_example=per_example)
        errors.append(np.abs(found - exact(labels, outputs, per_example)).max())
        assert len(measure.seen) == 2 * (6 if per_example else 24)
        assert all(moved.dtype == dtype for moved in measure.seen)
    # Of a cubic the error is exactly size^2, here shared by the batch.
    np.testing.assert_allclose(errors, np.array([0.04, 0.01]) / (1 if per_example else 4), rtol=2e-3)


def plain_spsa(evaluate, outputs, size, signs):
    """Spall's estimate, element by element."""
    gradient = np.zeros(outputs.shape)
    plus, minus = evaluate(outputs + size * signs), evaluate(outputs - size * signs)
    for place in np.ndindex(outputs.shape):
        of = place[0] if np.ndim(plus) else ()
        gradient[place] = (plus[of] - minus[of]) / (2 * size * signs[place])
    return gradient


@pytest.mark.parametrize("per_example", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_spsa_without_a_guess_is_spalls(dtype, per_example):
    labels, outputs = data(dtype)
    measure = Counted(labels, per_example)
    options = SPSA(0.125, samples=3, control_variate=None, seed=5)
    found = options.estimator()(measure, labels, outputs, per_example=per_example)
    assert len(measure.seen) == 6
    signs = [np.sign(plus.astype("float64") - outputs) for plus in measure.seen[::2]]
    expected = np.mean([plain_spsa(Counted(labels, per_example), outputs, 0.125, each) for each in signs], axis=0)
    np.testing.assert_allclose(found, expected, rtol=1e-10 if dtype == "float64" else 1e-4, atol=1e-6)
    assert {float(sign) for each in signs for sign in each.ravel()} == {-1.0, 1.0}


def many(options, labels, outputs, per_example, count, warm=0):
    estimator = options.estimator()
    measure = Counted(labels, per_example)
    found = [estimator(measure, labels, outputs, per_example=per_example) for _ in range(warm + count)]
    return np.array(found[warm:])


GUESSES = {
    "none": None,
    "linear": "linear",
    "the gradient itself": lambda labels, outputs: cubic(labels, outputs)[1],
    "half of it, and noise": lambda labels, outputs: 0.5 * cubic(labels, outputs)[1] + np.cos(50 * outputs),
    "nonsense": lambda labels, outputs: np.full(outputs.shape, 7.0),
}


@pytest.mark.parametrize("per_example", [True, False])
@pytest.mark.parametrize("guess", GUESSES)
def test_the_mean_is_the_gradient_whatever_is_guessed(guess, per_example):
    labels, outputs = data()
    found = many(SPSA(0.01, control_variate=GUESSES[guess]), labels, outputs, per_example, 3000)
    spread = found.std(0) / np.sqrt(len(found))
    # Five deviations of the mean, and the error of the size.
    wrong = np.abs(found.mean(0) - exact(labels, outputs, per_example))
    assert (wrong < 5 * spread + 3e-4).all()


@pytest.mark.parametrize("per_example", [True, False])
def test_a_guess_lowers_the_variance_as_the_docstring_says(per_example):
    labels, outputs = data()
    gradient = exact(labels, outputs, per_example)
    groups = [gradient[i] for i in range(len(gradient))] if per_example else [gradient]
    theory = sum((each.size - 1) * np.square(each).sum() for each in groups)
    variances = {
        name: many(SPSA(0.01, control_variate=guess), labels, outputs, per_example, 1500, warm=500).var(0).sum()
        for name, guess in GUESSES.items()
    }
    np.testing.assert_allclose(variances["none"], theory, rtol=0.15)
    assert variances["the gradient itself"] < 1e-3 * theory
    assert variances["half of it, and noise"] < 0.7 * theory
    assert variances["linear"] < 0.5 * theory
    assert variances["nonsense"] < 1.1 * theory


def test_the_linear_guess_learns_a_gradient_that_is_linear_while_outputs_change():
    rng, target = np.random.default_rng(1), np.array([1.0, -2.0, 0.5, 3.0])

    def squared_errors(control_variate):
        estimator, found = SPSA(0.1, control_variate=control_variate).estimator(), []
        for _ in range(200):
            labels, outputs = rng.normal(size=(16, 4)), rng.normal(size=(16, 4))

            def evaluate(moved, labels=labels):
                return np.square(moved - labels - target).sum(1)

            estimate = estimator(evaluate, labels, outputs, per_example=True)
            found.append(np.square(estimate - 2 * (outputs - labels - target)).sum())
        return np.mean(found[100:])

    assert squared_errors("linear") < 0.02 * squared_errors(None)


@pytest.mark.parametrize("control_variate", [None, "linear"])
def test_a_seed_gives_the_same_estimates_and_another_seed_others(control_variate):
    labels, outputs = data()
    runs = [
        many(SPSA(0.1, samples=2, control_variate=control_variate, seed=seed), labels, outputs, True, 4)
        for seed in (3, 3, 4)
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    assert (runs[0] != runs[2]).any()
    assert (runs[0][0] != runs[0][1]).any()


def test_batches_may_have_other_sizes_and_sequences_other_lengths():
    estimator = SPSA(0.1).estimator()
    for shape in ((5, 2), (3, 2), (5, 4), (1, 4)):
        labels, outputs = data(shape=shape)
        found = estimator(Counted(labels, True), labels, outputs, per_example=True)
        assert found.shape == shape and np.isfinite(found).all()


def test_labels_that_are_no_numbers_or_not_finite_do_not_reach_the_guess():
    estimator = SPSA(0.1).estimator()
    for _ in range(2):
        outputs = np.ones((2, 3))
        labels = {"words": np.array([b"a", b"b"]), "missing": np.array([np.nan, 1.0]), "number": np.array(3)}
        assert np.isfinite(estimator(lambda moved: moved.sum(1), labels, outputs, per_example=True)).all()


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf"), True, "small", None])
@pytest.mark.parametrize("kind", [CentralDifferences, SPSA])
def test_a_size_is_above_zero(kind, size):
    with pytest.raises(ValueError, match="`size` is the distance by which outputs are moved"):
        kind(size)


def test_what_is_no_spsa_is_refused():
    for samples in (0, 1.5, True, None):
        with pytest.raises(ValueError, match="samples must be (at least 1|an int). Received: samples="):
            SPSA(0.1, samples)
    with pytest.raises(ValueError, match="Received: 'quadratic'"):
        SPSA(0.1, control_variate="quadratic")
    with pytest.raises(ValueError, match="Received: shape \\(2, 1\\)"):
        options = SPSA(0.1, control_variate=lambda labels, outputs: outputs[:, :1])
        options.estimator()(lambda moved: moved.sum(1), None, np.ones((2, 3)), per_example=True)
    with pytest.raises(ValueError, match="Received: 600. Pass a function"):
        SPSA(0.1).estimator()(lambda moved: moved.sum(1), np.ones((2, 0)), np.ones((2, 600)), per_example=True)


@pytest.mark.parametrize("kind", [CentralDifferences, SPSA])
def test_a_size_that_vanishes_in_rounding_is_refused(kind):
    with pytest.raises(ValueError, match="too small for outputs as large as 1e\\+06 in float32"):
        kind(1e-3).estimator()(lambda moved: moved.sum(1), None, np.full((2, 3), 1e6, "float32"), per_example=True)
