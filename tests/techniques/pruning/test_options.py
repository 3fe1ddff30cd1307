"""Every door to pruning takes the same options: callback, Pruner, one shot, recipes."""

import inspect
from dataclasses import fields

import prunekit as pk
from prunekit.recipe.settings.step_settings import Prune
from prunekit.techniques.pruning.masks.options import PruningKeywords, PruningOptions

NAMES = {option.name for option in fields(PruningOptions)} - {"choices"}


def test_the_types_of_keyword_options_are_those_of_the_dataclass():
    assert set(PruningKeywords.__annotations__) == NAMES


def test_what_the_callback_takes_by_position_are_options():
    named = [
        name
        for name, parameter in inspect.signature(pk.PruningCallback.__init__).parameters.items()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and name not in ("self", "schedule")
    ]
    assert named == ["criterion", "pattern", "allocation", "include", "exclude"] and set(named) < NAMES


def test_a_prune_step_has_every_option_that_is_not_the_runs_own():
    own = {"epochs", "schedule", "sparsity", "learning_rate", "examples", "repair", "memory", "distill"}
    assert set(Prune.model_fields) - own == NAMES - {"keep_zeros", "origin"}


def test_defaults_of_a_prune_step_are_those_of_the_options():
    options = PruningOptions()
    for name in ("include", "exclude", "keep_one", "misfits"):
        assert Prune(sparsity=0.5).model_dump()[name] == getattr(options, name), name
    for name in ("criterion", "pattern", "allocation", "policy"):
        assert PruningOptions(**{name: getattr(Prune(sparsity=0.5), name)}) == options, name
