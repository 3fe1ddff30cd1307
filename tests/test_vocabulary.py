"""One word for one thing: the same names in Python, in recipes and on the command line."""

import inspect
import typing

import click
import pytest

import prunekit as pk
from prunekit.cli import cli
from prunekit.recipe.settings.step_kinds import STEP_KINDS
from prunekit.sparsity import shorthands

# Other name of a thing -> its name.
OTHER_NAMES = {
    "activations": "activation_bits",
    "alike": "per_kind",
    "calibration": "examples",
    "candidates": "bits",
    "compat": "policy",
    "left_float": "skipped",
    "number": "blocks or rounds",
    "pooling": "pattern",
    "ranges": "activation_ranges",
    "skip_misfits": "misfits",
    "weights": "bits",
}
OPERATIONS = (
    "choose_bits", "cluster", "export", "factorize", "prune", "prune_in_rounds", "quantize",
    "reduce_dimension", "remove_blocks",
    "search", "sensitivity", "shrink", "simplify",
)  # fmt: skip
CALLS = (
    *OPERATIONS,
    "Pruner",
    "PruningCallback",
    "Quantizer",
    "QuantizationCallback",
    "ClusterCallback",
    "DistillationCallback",
    "distilling",
)
# What stands before `data`: the model, and the target. Sizes have names, and so have the data beside them.
TARGETS = {
    "cluster": ["clusters"],
    "prune": ["sparsity"],
    "prune_in_rounds": ["train", "sparsity"],
    "remove_blocks": ["blocks"],
    "export": ["path"],
    "reduce_dimension": ["layer"],
}
# Step kind -> the operation that it runs, and the settings that are about its training, its file or its data.
TRAINING = {"epochs", "learning_rate", "examples"}
STEPS = {
    "prune": ("prune", TRAINING | {"schedule", "final_sparsity", "save_best", "distill"}),
    "rounds": ("prune_in_rounds", TRAINING | {"epochs_per_round"}),
    "shrink": ("shrink", TRAINING | {"rounds", "epochs_per_round"}),
    "quantize": ("quantize", TRAINING | {"begin_epoch", "distill", "budget", "drop", "integer_io", "sparse", "name"}),
    "remove_blocks": ("remove_blocks", TRAINING),
    "factorize": ("factorize", TRAINING),
    "cluster": ("cluster", TRAINING | {"distill"}),
    "simplify": ("simplify", set()),
    "export": ("export", {"examples"}),
    "search": ("search", {"name"}),
}
# (step kind, option) -> why its default is another one.
OTHER_DEFAULTS = {("quantize", "bits"): "None: 8, or 4 and 8 to choose from"}
# Command -> the options that are about its files.
FILES = {"model", "output", "force", "as_json", "data", "label", "examples", "others"}
COMMANDS = {
    "cluster": FILES,
    "export": FILES,
    "factorize": FILES,
    "prune": FILES,
    "quantize": FILES | {"keras", "budget", "integer_io", "uint8_io", "sparse"},
    "remove-blocks": FILES,
    "search": FILES | {"epochs"},
    "sensitivity": FILES,
    "shrink": FILES,
    "simplify": FILES,
}


ROUND = {"sparsity": 0.5, "epochs_per_round": 1}


def parameters(name):
    return inspect.signature(getattr(pk, name)).parameters


def fields(kind):
    return STEP_KINDS[kind].settings.model_fields


def options(command):
    return {option.name: option for option in cli.get_command(click.Context(cli), command).params}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_shows_all_its_options_and_no_other_name_for_them(name):
    found = parameters(name)
    assert inspect.Parameter.VAR_KEYWORD not in {one.kind for one in found.values()}
    assert not set(found) & set(OTHER_NAMES)


@pytest.mark.parametrize("name", OPERATIONS)
def test_data_follow_the_model_and_the_target(name):
    found = list(parameters(name))
    assert found[0] == "model"
    if "data" in found and name not in ("shrink", "factorize"):
        assert found[1 : found.index("data")] == TARGETS.get(name, [])


@pytest.mark.parametrize("kind", STEPS)
def test_a_step_has_the_options_of_its_operation(kind):
    operation, own = STEPS[kind]
    assert not set(fields(kind)) & set(OTHER_NAMES)
    assert set(fields(kind)) - own <= set(parameters(operation))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_options_of_its_operation(command):
    assert not set(options(command)) & set(OTHER_NAMES)
    assert set(options(command)) - COMMANDS[command] <= set(parameters(command.replace("-", "_")))


@pytest.mark.parametrize("kind", STEPS)
def test_an_option_has_one_default(kind):
    operation, own = STEPS[kind]
    found = parameters(operation)
    for name, field in fields(kind).items():
        required = field.is_required() or (name in found and found[name].default is inspect.Parameter.empty)
        if name in found and name not in own and not required and (kind, name) not in OTHER_DEFAULTS:
            default = field.get_default(call_default_factory=True)
            assert default == found[name].default or default in ((), {}), name


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        (
            "quantize",
            {"weights": 4, "activations": "float", "calibration": 9},
            {"bits": 4, "activation_bits": "float", "examples": 9},
        ),
        ("remove_blocks", {"number": 2, "calibration": 9}, {"blocks": 2, "examples": 9}),
        ("shrink", {"macs": 0.5, "calibration": 9}, {"macs": 0.5, "examples": 9}),
        ("prune", {"sparsity": 0.5, "calibration": 9}, {"sparsity": 0.5, "examples": 9}),
        ("rounds", {"number": 3, **ROUND}, {"rounds": 3, **ROUND}),
    ],
)  # fmt: skip
def test_former_names_in_recipes_are_read_with_a_warning(kind, old, new):
    settings = STEP_KINDS[kind].settings
    with pytest.warns(FutureWarning, match="The key '.*' of a recipe is now '.*'"):
        found = settings.model_validate(old)
    assert found == settings.model_validate(new)
    with pytest.raises(ValueError, match="is the former name of .*, which is here, too"):
        settings.model_validate({**new, **old})


def test_the_former_name_of_a_class_warns_and_that_of_an_option_is_answered():
    with pytest.warns(DeprecationWarning, match="prunekit.PolynomialDecay is now prunekit.schedules.PolynomialDecay"):
        assert pk.PolynomialDecay is pk.schedules.PolynomialDecay
    with pytest.raises(TypeError, match="Received: 'weights'. .* It is now 'bits'"):
        pk.quantize(None, weights=4)


def test_the_number_of_examples_has_one_default():
    defaults = {fields(kind)["examples"].default for kind in STEPS if "examples" in fields(kind)}
    defaults |= {
        found["examples"].default for found in map(options, COMMANDS.keys() - {"search"}) if "examples" in found
    }
    # None: 1,024 where data are read. A search judges by examples as well.
    assert defaults - {None} == {1024}


@pytest.mark.parametrize(
    ("names", "known"),
    [
        (shorthands.CriterionName, shorthands.CRITERIA),
        (shorthands.AllocationName, shorthands.ALLOCATIONS),
        (shorthands.PolicyName, shorthands.POLICIES),
    ],
    ids=["criteria", "allocations", "policies"],
)
def test_editors_show_the_names_that_are_registered(names, known):
    own = {name for name, row in known.items() if str(row.factory).startswith("prunekit.")}
    assert own == set(typing.get_args(names))
