"""Whole numbers that users pass: one check and one form of error, wherever an int is expected."""

import numpy as np
import pytest

from prunekit.core.runtime.arguments import require_positive
from prunekit.sparsity.arguments import LARGEST, whole


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_whole_number_becomes_an_int_of_python(value):
    assert type(whole("n", value, 3, largest=3)) is int


@pytest.mark.parametrize("value", [True, 3.0, "3", None, [3], np.float32(3), "x" * 10_000])
def test_what_is_no_integer_is_refused_by_its_type_in_a_short_message(value):
    with pytest.raises(TypeError, match="^n must be an int. Received: n=.* of type ") as refused:
        whole("n", value)
    assert len(str(refused.value)) < 120
    with pytest.raises(ValueError, match="^n must be an int. Received: n="):
        whole("n", value, wrong_type=ValueError)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "n must be at least 1. Received: n=0."),
        (-(10**5000), "n must be at least 1. Received: a number of 16610 bits."),
        (LARGEST + 1, "n must be at most 9223372036854775807. Received: n=9223372036854775808."),
        (10**5000, "n must be at most 9223372036854775807. Received: a number of 16610 bits."),
    ],
    ids=["small", "very small", "large", "very large"],
)
def test_a_number_out_of_range_is_refused_by_its_value(value, message):
    with pytest.raises(ValueError) as refused:
        whole("n", value, 1)
    assert str(refused.value) == message
    assert whole("n", value, largest=None) == value


def test_a_count_may_be_written_as_a_float_or_left_out():
    require_positive(limit=1e9, batch_size=None, epochs=1)
    for value in (0, 1.5, float("nan"), float("inf"), True, "1"):
        with pytest.raises(ValueError, match="limit must be (at least 1|an int). Received: limit="):
            require_positive(limit=value)
