"""Kept outputs: never those of another example."""

import keras
import numpy as np
import pytest
from keras import ops

from prunekit.techniques.distill import output_cache
from prunekit.techniques.distill.output_cache import OFF, READING, RECORDING, OutputCache, Row

pytestmark = pytest.mark.every_backend
X = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
ROW = Row(((3,),), ("float32",))


def answers(x):
    return np.stack([x.sum(-1), x[:, 0] * 2, x[:, 1] - 1], -1)


class Teacher:
    """Calculates outputs, moved by `moved`: what is found in the cache was calculated before it was set."""

    moved = 0.0

    def of(self, x):
        return lambda: [ops.stack([ops.sum(x, -1), x[:, 0] * 2, x[:, 1] - 1], -1) + self.moved]


def asked(cache, teacher, rows):
    """The outputs for a batch, and whether they were calculated now."""
    x = ops.convert_to_tensor(rows)
    (found,) = cache.outputs(x, teacher.of(x))
    moved = keras.ops.convert_to_numpy(found) - answers(rows)
    calculated = teacher.moved != 0 and moved[0, 0] > teacher.moved / 2
    np.testing.assert_allclose(moved, teacher.moved if calculated else 0, rtol=1e-4, atol=1e-4)
    return bool(calculated)


def epoch(cache, teacher, x=X, batch=8):
    """Whether each batch was calculated."""
    found = []
    for start in range(0, len(x), batch):
        found.append(asked(cache, teacher, x[start : start + batch]))
        cache.after_batch()
    cache.after_epoch()
    return found


def recorded(rows=X, batch=8, memory=1e9):
    cache, teacher = OutputCache(ROW, memory), Teacher()
    assert cache.mode == RECORDING
    epoch(cache, teacher, rows, batch)
    teacher.moved = 100.0
    return cache, teacher


def test_the_second_epoch_calculates_nothing_in_whatever_order():
    cache, teacher = recorded()
    assert (cache.mode, cache.examples, cache.bytes) == (READING, 40, 40 * (3 * 4 + 16))
    assert not any(epoch(cache, teacher, X[np.random.default_rng(1).permutation(40)]))
    assert cache.mode == READING


def test_an_unknown_example_has_its_batch_calculated():
    cache, teacher = recorded()
    rows = X[:8].copy()
    rows[3, 2] += 1e-6
    assert asked(cache, teacher, rows) and not asked(cache, teacher, X[:8])


def test_it_gives_up_where_fewer_than_half_of_the_examples_come_back():
    cache, teacher = recorded()
    assert epoch(cache, teacher, np.concatenate([X[:24], X[24:] + 1])) == [False, False, False, True, True]
    assert cache.mode == READING
    epoch(cache, teacher, np.concatenate([X[:16], X[16:] + 1]))
    assert cache.mode == OFF and not cache.variables
    assert all(epoch(cache, teacher))


def test_two_examples_that_share_the_first_word_are_not_taken_for_each_other(monkeypatch):
    def colliding(x):
        keys = original(x)
        return ops.concatenate([ops.zeros_like(keys[:, :1]), keys[:, 1:]], axis=1)

    original = output_cache.fingerprints
    monkeypatch.setattr(output_cache, "fingerprints", colliding)
    cache, teacher = recorded(X[:2], batch=1)
    assert cache.examples == 1
    assert epoch(cache, teacher, X[:2], batch=1) == [False, True]


def test_more_rows_than_fit_are_taken_to_the_host_in_between(monkeypatch):
    monkeypatch.setattr(output_cache, "_ROWS", 20)
    cache, teacher = recorded()
    assert cache.examples == 40
    assert not any(epoch(cache, teacher))


def test_rows_beyond_the_room_of_one_batch_are_calculated_again(monkeypatch):
    monkeypatch.setattr(output_cache, "_ROWS", 5)
    cache, teacher = recorded()
    assert cache.examples == 25
    assert epoch(cache, teacher, X[:8], batch=5) == [False, True]


def test_outputs_beyond_the_memory_are_not_kept():
    cache, teacher = recorded(memory=500)
    assert cache.mode == OFF and cache.bytes == 0
    assert all(epoch(cache, teacher))


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX has no float64 here")
def test_inputs_without_fingerprints_are_calculated_each_time():
    cache, teacher = recorded(X.astype("float64"))
    assert cache.mode == OFF
    assert all(epoch(cache, teacher))


def test_a_state_gives_the_outputs_back():
    cache, teacher = recorded()
    other = OutputCache(ROW, 1e9)
    other.restore(cache.snapshot())
    assert other.examples == 40 and not any(epoch(other, teacher))


def test_a_state_of_too_many_bytes_has_them_recorded_anew(monkeypatch):
    cache, _ = recorded()
    monkeypatch.setattr(output_cache, "SAVED", 10)
    other = OutputCache(ROW, 1e9)
    other.stop()
    other.restore(cache.snapshot())
    assert other.mode == RECORDING


def test_without_known_shapes_nothing_is_kept():
    cache = OutputCache(None, 1e9)
    cache.record()
    assert cache.mode == OFF
