"""Ctrl-C while Keras is at work, where Python would lose it."""

import os
import signal
import threading

import keras
import numpy as np
import pytest

from prunekit.recipe.state.interruption import ctrl_c_held_back

pytestmark = pytest.mark.every_backend


class PressedAndLost(keras.callbacks.Callback):
    """Presses Ctrl-C at one event; what is raised there is lost, as in a function that a backend calls back."""

    def __init__(self, event, times=1):
        super().__init__()
        self.raised = 0
        self.batches = 0
        self._times = times
        setattr(self, event, self.press)

    def press(self, *_, **__):
        for _ in range(self._times):
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt:
                self.raised += 1
        self._times = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.batches += 1


@pytest.fixture(scope="module")
def model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.fixture(autouse=True)
def heeding():
    # A shell that starts this in the background has it ignore interrupts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the handler was not put back"
    signal.signal(signal.SIGINT, before)


def fit(model, *callbacks):
    pairs = np.ones((12, 2), np.float32), np.ones((12, 1), np.float32)
    model.fit(*pairs, batch_size=4, epochs=2, validation_data=pairs, callbacks=list(callbacks), verbose=0)


@pytest.mark.parametrize(
    ("event", "batches"),
    [("on_train_begin", 0), ("on_train_batch_end", 1), ("on_test_begin", 3), ("on_epoch_end", 3), ("on_train_end", 6)],
)
def test_a_ctrl_c_that_is_lost_where_it_comes_ends_the_training_as_the_next_batch_begins(model, event, batches):
    pressed = PressedAndLost(event)
    with pytest.raises(KeyboardInterrupt), ctrl_c_held_back() as held:
        fit(model, held, pressed)
    assert pressed.raised == 0
    assert pressed.batches == batches


def test_without_it_the_training_continues(model):
    pressed = PressedAndLost("on_train_batch_end")
    fit(model, pressed)
    assert pressed.raised == 1
    assert pressed.batches == 6


def test_the_second_ctrl_c_is_raised_at_once(model):
    pressed = PressedAndLost("on_train_batch_end", times=2)
    with pytest.raises(KeyboardInterrupt), ctrl_c_held_back() as held:
        fit(model, held, pressed)
    assert pressed.raised == 1
    assert pressed.batches == 1


def test_an_error_of_the_training_is_not_hidden_by_a_ctrl_c():
    with pytest.raises(ZeroDivisionError), ctrl_c_held_back():
        os.kill(os.getpid(), signal.SIGINT)
        raise ZeroDivisionError


def test_a_handler_of_another_library_is_left_alone():
    heard = []
    signal.signal(signal.SIGINT, lambda *_: heard.append(True))
    with ctrl_c_held_back():
        os.kill(os.getpid(), signal.SIGINT)
    assert heard == [True]
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_another_thread_than_the_main_one_changes_no_handler():
    seen = []

    def work():
        with ctrl_c_held_back():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
