"""Methods shadowed and wrapped for a while, and what is put back."""

import itertools

import keras
import pytest

from prunekit.core.runtime import patching


class Owner:
    name = "of the class"

    def method(self):
        return "method"

    @property
    def computed(self):
        return "computed"


class TestShadowed:
    def test_a_method_is_shadowed_on_one_instance_and_comes_back(self):
        owner, other = Owner(), Owner()
        with patching.shadowed(owner, "method", lambda: "shadow"):
            assert (owner.method(), other.method()) == ("shadow", "method")
        assert owner.method() == "method" and vars(owner) == {}

    @pytest.mark.parametrize("former", [None, "of the instance"])
    def test_what_was_in_the_instance_is_put_back(self, former):
        owner = Owner()
        owner.name = former
        with patching.shadowed(owner, "name", "shadow"):
            assert owner.name == "shadow"
        assert vars(owner) == {"name": former}

    def test_it_is_put_back_after_an_exception(self):
        owner = Owner()
        with pytest.raises(ValueError, match="inside"), patching.shadowed(owner, "name", "shadow"):
            raise ValueError("inside")
        assert owner.name == "of the class" and vars(owner) == {}

    def test_shadows_nest(self):
        owner = Owner()
        with patching.shadowed(owner, "name", "outer"):
            with patching.shadowed(owner, "name", "inner"):
                assert owner.name == "inner"
            assert owner.name == "outer"
        assert owner.name == "of the class"

    def test_keras_does_not_track_what_shadows(self, perceptron):
        optimizer, saved = keras.optimizers.SGD(), len(perceptron.variables)
        with patching.shadowed(perceptron, "extra", keras.layers.Dense(2)):
            assert len(perceptron._layers) == 3
        with patching.shadowed(optimizer, "apply", lambda *_: "shadow"):
            assert optimizer.apply([], []) == "shadow"
        assert "apply" not in vars(optimizer) and not hasattr(perceptron, "extra")
        assert len(perceptron.variables) == saved


class TestWrapped:
    @pytest.mark.parametrize("order", list(itertools.permutations("abc")), ids="".join)
    @pytest.mark.parametrize("own", [False, True], ids=["of the class", "of the instance"])
    def test_wrappers_of_a_method_are_removed_in_any_order(self, order, own):
        owner = Owner()
        if own:
            owner.method = lambda: "method"
        before, inside = dict(vars(owner)), list("abc")
        scopes = {
            one: patching.wrapped(owner, "method", lambda method, one=one: lambda: one + method()) for one in inside
        }
        for one in inside:
            scopes[one].__enter__()
        assert owner.method() == "cbamethod"
        for one in order:
            scopes[one].__exit__(None, None, None)
            inside.remove(one)
            assert owner.method() == "".join(reversed(inside)) + "method"
        assert vars(owner) == before
