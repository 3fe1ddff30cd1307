"""Gradient estimates from function values alone: central differences, simultaneous perturbation. Needs only NumPy."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.sparsity.arguments import whole

# Largest system of the linear control variate: 1 + outputs + labels of an example.
_MOST_FEATURES = 512
# Factor by which the weight of earlier batches decays with each new batch.
_MEMORY = 0.95

# (outputs) -> numbers, of shape () or (batch,).
Evaluate = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class CentralDifferences:
    """(f(o + size e_j) - f(o - size e_j)) / (2 size) for each output entry o_j. No noise; error O(size^2).

    Takes 2 evaluations per output entry of an example if `f` returns one number per example (all examples are moved at
    once); otherwise 2 evaluations per output entry of the batch.

    Args:
        size: Step size, in units of the outputs. For a piecewise constant `f`, larger than the steps of `f`.

    Raises:
        ValueError: `size` is not above zero; at an estimate: `size` is lost in the rounding of the outputs.

    Source: Kiefer and Wolfowitz 1952, "Stochastic estimation of the maximum of a regression function", Annals of
        Mathematical Statistics 23(3), here for several variables.
    """

    size: float

    def __post_init__(self) -> None:
        _check_size(self.size)

    def estimator(self) -> "_Differences":
        """A function (evaluate, labels, outputs) -> gradient."""
        return _Differences(self)


@dataclass(frozen=True)
class SPSA:
    """Simultaneous perturbation: all outputs are moved at once, by +size or -size at random. Mean error O(size^2).

    Takes 2 * samples evaluations for any number of outputs. With the signs D, one sample is

        h_j + [f(o + size D) - f(o - size D) - 2 size h.D] / (2 size D_j)

    where h is an approximate gradient (the control variate) that does not depend on D. The mean is the same for every
    h, because E[D_i D_j] = 0 for i != j. The variance of a sample, summed over n output entries, is
    (n - 1) |gradient - h|^2. The control variate is scaled by the factor that was optimal in earlier batches
    (covariance / variance, initially 0), so a bad control variate increases the variance only briefly.

    Args:
        size: Step size, in units of the outputs. For a piecewise constant `f`, larger than the steps of `f`.
        samples: Number of samples to average.
        control_variate: "linear" (least squares of earlier estimates on the outputs and labels of their examples), a
            NumPy function (labels, outputs) -> gradient, for example of a differentiable loss that resembles `f`, or
            None for h = 0.
        seed: Seed of the random signs.

    Raises:
        ValueError: `size` is not above zero; `samples` is not a positive integer; the control variate is unknown; at
            an estimate: too many outputs and labels for "linear", or a control variate of the wrong shape.

    Source: Spall 1992, "Multivariate stochastic approximation using a simultaneous perturbation gradient
        approximation", IEEE Transactions on Automatic Control 37(3), section II; for the surrogate as control variate,
        Grathwohl et al. 2018, arXiv:1711.00123, section 3.
    """

    size: float
    samples: int = 1
    control_variate: str | Callable[[Any, np.ndarray], Any] | None = "linear"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_size(self.size)
        whole("samples", self.samples, 1, wrong_type=ValueError)
        if self.control_variate not in ("linear", None) and not callable(self.control_variate):
            raise ValueError(
                '`control_variate` is "linear", a function (labels, outputs) -> gradient, or None. Received: '
                f"{self.control_variate!r}."
            )

    def estimator(self) -> "_Perturbation":
        """A function (evaluate, labels, outputs) -> gradient that updates its control variate after each estimate."""
        return _Perturbation(self)


def _check_size(size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int | float) or not 0 < size < np.inf:
        raise ValueError(
            f"`size` is the distance by which outputs are moved, so it is above zero. Received: size={size!r}."
        )


def _moved(outputs: np.ndarray, by: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(outputs + by, outputs - by, their difference after rounding)."""
    plus, minus = (outputs + by).astype(outputs.dtype), (outputs - by).astype(outputs.dtype)
    apart = plus.astype("float64") - minus
    if np.any((apart == 0) & (by != 0)):
        raise ValueError(
            f"`size` is too small for outputs as large as {np.abs(outputs).max():.3g} in {outputs.dtype}: moving them "
            f"by `size` does not change them. Received: size={np.abs(by).max():.3g}."
        )
    return plus, minus, apart


def _along(numbers: np.ndarray, outputs: np.ndarray) -> np.ndarray:
    """`numbers`, of shape () or (batch,), reshaped to broadcast against the outputs."""
    return numbers.reshape(numbers.shape + (1,) * (outputs.ndim - numbers.ndim))


class _Differences:
    def __init__(self, options: CentralDifferences):
        self._options = options

    def __call__(self, evaluate: Evaluate, labels: Any, outputs: np.ndarray, *, per_example: bool) -> np.ndarray:
        gradient = np.zeros(outputs.shape)
        # With one number per example, the same output entry is moved in all examples at once.
        for place in np.ndindex(outputs.shape[1:] if per_example else outputs.shape):
            where = (slice(None), *place) if per_example else place
            by = np.zeros(outputs.shape)
            by[where] = self._options.size
            plus, minus, apart = _moved(outputs, by)
            gradient[where] = (evaluate(plus) - evaluate(minus)) / apart[where]
        return gradient


class _Perturbation:
    def __init__(self, options: SPSA):
        self._options = options
        self._estimates = 0
        self._linear = _Linear() if options.control_variate == "linear" else None
        self._covariance, self._variance = 0.0, 0.0

    def __call__(self, evaluate: Evaluate, labels: Any, outputs: np.ndarray, *, per_example: bool) -> np.ndarray:
        signs = np.random.default_rng((self._options.seed, self._estimates))
        self._estimates += 1
        own_axes = tuple(range(1 if per_example else 0, outputs.ndim))
        guess = self._guess(labels, outputs)
        factor = self._covariance / self._variance if self._variance > 0 else 0.0
        gradient = np.zeros(outputs.shape)
        # Updated only after all samples: a control variate that depends on their signs would bias the estimate.
        covariance = variance = 0.0
        for _ in range(self._options.samples):
            by = self._options.size * (2.0 * signs.integers(0, 2, outputs.shape) - 1)
            plus, minus, apart = _moved(outputs, by)
            change = evaluate(plus) - evaluate(minus)
            guessed = (guess * apart).sum(own_axes)
            gradient += factor * guess + _along(change - factor * guessed, outputs) / apart
            covariance += float((change * guessed).sum())
            variance += float(np.square(guessed).sum())
        gradient /= self._options.samples
        self._covariance = _MEMORY * self._covariance + covariance
        self._variance = _MEMORY * self._variance + variance
        if self._linear is not None:
            self._linear.learn(labels, outputs, gradient)
        return gradient

    def _guess(self, labels: Any, outputs: np.ndarray) -> np.ndarray:
        if self._options.control_variate is None:
            return np.zeros(outputs.shape)
        if self._linear is not None:
            return self._linear.guess(labels, outputs)
        guess = np.asarray(self._options.control_variate(labels, outputs), "float64")  # type: ignore[operator]
        if guess.shape != outputs.shape or not np.isfinite(guess).all():
            raise ValueError(
                f"The control variate returns a finite gradient of the outputs' shape, {outputs.shape}. Received: "
                f"shape {guess.shape}{'' if np.isfinite(guess).all() else ', with NaN or infinity'}."
            )
        return guess


class _Linear:
    """Predicts an example's gradient from its outputs and labels, by least squares over earlier estimates."""

    def __init__(self) -> None:
        self._squares: np.ndarray | None = None
        self._products = np.zeros(0)

    def guess(self, labels: Any, outputs: np.ndarray) -> np.ndarray:
        features = _features(labels, outputs)
        if self._squares is None or len(self._squares) != features.shape[1]:
            return np.zeros(outputs.shape)
        # Small ridge: keeps the system regular if features are linearly dependent.
        ridge = 1e-8 * np.trace(self._squares) / len(self._squares)
        solved = np.linalg.solve(self._squares + ridge * np.eye(len(self._squares)), self._products)
        return (features @ solved).reshape(outputs.shape)

    def learn(self, labels: Any, outputs: np.ndarray, gradient: np.ndarray) -> None:
        features = _features(labels, outputs)
        squares, products = features.T @ features, features.T @ gradient.reshape(len(outputs), -1)
        if self._squares is None or self._squares.shape != squares.shape:
            self._squares, self._products = np.zeros(squares.shape), np.zeros(products.shape)
        self._squares = _MEMORY * self._squares + squares
        self._products = _MEMORY * self._products + products


def _features(labels: Any, outputs: np.ndarray) -> np.ndarray:
    """One row per example: 1, the outputs and the labels."""
    arrays = [outputs, *(np.asarray(leaf) for leaf in keras.tree.flatten(labels))]
    numbers = [array for array in arrays if array.dtype.kind in "biuf" and array.ndim and len(array) == len(outputs)]
    rows = [np.ones((len(outputs), 1)), *(array.reshape(len(outputs), -1).astype("float64") for array in numbers)]
    count = sum(row.shape[1] for row in rows)
    if count > _MOST_FEATURES:
        raise ValueError(
            f'control_variate="linear" takes up to {_MOST_FEATURES} outputs and labels of an example. Received: '
            f"{count - 1}. Pass a function (labels, outputs) -> gradient, or None."
        )
    return np.nan_to_num(np.concatenate(rows, axis=1))
