"""Losses between the outputs of a teacher and of its student, one value for each example, as pure functions."""

from __future__ import annotations

from typing import Any

from keras import ops

# Least squared length of a centred vector: gradients of square roots are infinite at 0.
_TINY = 1e-16
# Taken from the logit of the true class, so that its probability vanishes.
_GONE = 1000.0
# Weights of the two parts of decoupled distillation (Zhao et al. 2022, table 1 and section 4.2).
TARGET_SHARE, OTHERS_SHARE = 1.0, 8.0


def divergence(teacher: Any, student: Any, temperature: float) -> Any:
    """KL(softmax(teacher / T) || softmax(student / T)) * T^2: Kullback-Leibler divergence of softened probabilities.

    Args:
        teacher: Logits, shape (..., classes).
        student: Logits, of the same shape.
        temperature: T, above 0.

    Returns:
        Tensor of shape (...).

    Source: Hinton et al. 2015, arXiv:1503.02531, section 2.1.
    """
    return _divergence(teacher / temperature, student / temperature) * temperature**2


def relations(teacher: Any, student: Any, temperature: float, weights: Any = None) -> Any:
    """((1 - r) + mean over classes of (1 - r_class)) * T^2, with correlations of softened probabilities.

    r is the Pearson correlation of teacher and student over the classes of an example; r_class that over the examples
    of a batch, for each class.

    Args:
        teacher: Logits, shape (..., classes).
        student: Logits, of the same shape.
        temperature: T, above 0.
        weights: Weights of the examples in r_class, shape (...), or None.

    Returns:
        Tensor of shape (...); the part of the batch is in each of its entries.

    Source: Huang et al. 2022, arXiv:2205.10536, eq. 8 to 10 (DIST).
    """
    # Not `ops.softmax`, which for small batches takes three times as long on TensorFlow with oneDNN.
    one, two = (ops.exp(ops.log_softmax(logits / temperature)) for logits in (teacher, student))
    of_examples = 1.0 - correlation(one, two, axis=-1)
    first, second = (ops.reshape(values, (-1, values.shape[-1])) for values in (one, two))
    column = None if weights is None else ops.reshape(weights, (-1, 1))
    of_classes = ops.mean(1.0 - correlation(first, second, axis=0, weights=column))
    return (of_examples + of_classes) * temperature**2


def correlation(one: Any, two: Any, axis: int, weights: Any = None) -> Any:
    """Pearson correlation along an axis; 0 where one of the two is constant.

    Args:
        one: Tensor.
        two: Tensor of the same shape.
        axis: The axis.
        weights: Weights along the axis, which broadcast against the tensors; None = equal ones.
    """
    if weights is None:
        # Apart from weighted ones: few small operations are most of the cost of this loss.
        one, two = (values - ops.mean(values, axis, keepdims=True) for values in (one, two))
        moments = [ops.sum(product, axis) for product in (one * two, one * one, two * two)]
    else:
        weights = ops.broadcast_to(weights, ops.shape(one))
        total = ops.maximum(ops.sum(weights, axis, keepdims=True), _TINY)
        one, two = (values - ops.sum(weights * values, axis, keepdims=True) / total for values in (one, two))
        moments = [ops.sum(weights * product, axis) for product in (one * two, one * one, two * two)]
    lengths = [ops.maximum(squares, _TINY) for squares in moments[1:]]
    return moments[0] * ops.rsqrt(lengths[0]) * ops.rsqrt(lengths[1])


def decoupled(teacher: Any, student: Any, labels: Any, temperature: float) -> Any:
    """(TCKD + 8 NCKD) * T^2: the divergence in the true class, and that among the other classes, apart.

    TCKD is the divergence of (p, 1 - p) with the probability p of the true class; NCKD that of the probabilities of the
    other classes among themselves, which plain distillation multiplies by the small 1 - p of the teacher.

    Args:
        teacher: Logits, shape (..., classes).
        student: Logits, of the same shape.
        labels: Ones at the true classes, zeros elsewhere, of the same shape.
        temperature: T, above 0.

    Returns:
        Tensor of shape (...).

    Source: Zhao et al. 2022, arXiv:2203.08679, eq. 6 and 7 (DKD).
    """
    sides = []
    for logits in (teacher, student):
        log_probabilities = ops.log_softmax(logits / temperature)
        # Sums of exponentials, not 1 - p: it rounds to 0 where the teacher is certain.
        others = ops.logsumexp(log_probabilities - _GONE * labels, axis=-1)
        sides.append(ops.stack([ops.sum(log_probabilities * labels, axis=-1), others], axis=-1))
    target = ops.sum(ops.exp(sides[0]) * (sides[0] - sides[1]), axis=-1)
    among = _divergence(*(logits / temperature - _GONE * labels for logits in (teacher, student)))
    return (TARGET_SHARE * target + OTHERS_SHARE * among) * temperature**2


def squared_error(teacher: Any, student: Any) -> Any:
    """Mean square of the differences along the last axis; shape (...) of tensors of shape (..., values)."""
    return ops.mean(ops.square(student - teacher), axis=-1)


def map_error(teacher: Any, student: Any) -> Any:
    """Mean squared error of two feature maps, each divided by the root mean square of its example, shape (batch,).

    It is between 0 and 4, and does not depend on the scales of the maps.

    Args:
        teacher: Outputs of a layer, shape (batch, ...).
        student: Outputs of the student's layer, of the same shape.

    Source: Zagoruyko & Komodakis 2017, arXiv:1612.03928, eq. 2 (there on maps summed over the channels).
    """
    one, two = (_unit(ops.reshape(values, (ops.shape(values)[0], -1))) for values in (teacher, student))
    return ops.sum(ops.square(two - one), axis=-1)


def _unit(rows: Any) -> Any:
    return rows * ops.rsqrt(ops.maximum(ops.sum(ops.square(rows), axis=-1, keepdims=True), _TINY))


def _divergence(one: Any, two: Any) -> Any:
    """KL(softmax(one) || softmax(two)) along the last axis."""
    wanted, found = ops.log_softmax(one), ops.log_softmax(two)
    return ops.sum(ops.exp(wanted) * (wanted - found), axis=-1)
