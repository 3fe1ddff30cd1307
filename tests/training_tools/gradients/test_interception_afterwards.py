"""Interception: nothing is left of it afterwards."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from intercepted_models import compiled, data, network

import prunekit as pk
from prunekit.training_tools.gradients import intercepting


class TestNothingIsLeft:
    @pytest.mark.parametrize("ends", ["well", "in the block", "in the function"])
    def test_on_the_model_and_its_layers(self, ends, tmp_path):
        (x, y), model = data("float32"), compiled(network())
        model.fit(x, y, verbose=0, validation_data=(x, y))
        model.predict(x, verbose=0)
        model.predict_function = None
        attributes = [set(vars(layer)) for layer in (model, *model.layers)]
        functions, config = (model.train_function, model.test_function, model.predict_function), model.get_config()

        def function(gradient):
            if ends == "in the function":
                raise RuntimeError("on purpose")
            return gradient

        def run():
            with intercepting(model, {"hidden": function, ("last", 0): tf.identity}):
                model.fit(x, y, verbose=0, validation_data=(x, y))
                model.predict(x, verbose=0)
                model.save(tmp_path / "inside.keras")
                assert model.get_config() == config
                if ends == "in the block":
                    raise RuntimeError("on purpose")

        if ends == "well":
            run()
            loaded = keras.models.load_model(tmp_path / "inside.keras")
            np.testing.assert_array_equal(loaded(x), model(x))
        else:
            with pytest.raises(RuntimeError, match="on purpose"):
                run()
        for layer, former in zip((model, *model.layers), attributes, strict=True):
            # Keras leaves an iterator where fit is interrupted.
            assert set(vars(layer)) - {"_eval_epoch_iterator"} == former
        assert functions == (model.train_function, model.test_function, model.predict_function)
        assert functions[2] is None, "what was traced inside has gone"

    def test_on_a_model_whose_function_a_pruner_found_inside(self):
        (x, y), model = data("float32"), compiled(network())
        model.fit(x, y, verbose=0)
        function = model.train_function
        with intercepting(model, {"hidden": tf.zeros_like}):
            model.train_on_batch(x, y)
            pruner = pk.Pruner(
                model, pk.schedules.ConstantSparsity(0.5, begin_step=0, frequency=1), allocation="uniform"
            )
            model.train_on_batch(x, y)
            pruner.step()
        bias = model.get_layer("hidden").bias.numpy()
        model.train_on_batch(x, y)
        pruner.step()
        assert np.any(model.get_layer("hidden").bias.numpy() != bias) and not any(pruner.audit().values())
        pruner.finish()
        assert model.train_function is function

    def test_of_two_scopes_that_are_left_out_of_order(self):
        (x, y), model = data("float32"), compiled(network())
        model.fit(x, y, verbose=0)
        function, layer = model.train_function, model.get_layer("hidden")
        first, second = (intercepting(model, {"hidden": change}) for change in (tf.zeros_like, tf.identity))
        first.__enter__()
        second.__enter__()
        for scope, moves in ((None, False), (first, True), (second, True)):
            if scope is not None:
                scope.__exit__(None, None, None)
            bias = layer.bias.numpy()
            model.fit(x, y, verbose=0)
            assert np.any(layer.bias.numpy() != bias) == moves
        assert model.train_function is function and "call" not in vars(layer)

    def test_in_a_loop_that_keeps_its_former_trace(self):
        (x, y), model = data("float32"), network()
        loop = pk.loops.TapeLoop(model, "sgd", "mse")
        loop.step(x, y)
        for _ in range(2):
            with intercepting(model, {"hidden": tf.zeros_like}):
                loop.step(x, y)
                loop.step(x[:3], y[:3])
                assert loop._train.traces == 1
        loop.step(x, y)
        assert loop._train.traces == 1
