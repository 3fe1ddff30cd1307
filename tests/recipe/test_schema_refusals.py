"""What a recipe may not say, and the reason that is told."""

import pytest
from recipe_documents import SCHEDULES, export, one_shot, prune, recipe

from prunekit.recipe.text.loader import RecipeError, load_recipe

REFUSED = {
    "no steps": (recipe() | {"steps": []}, r"^steps: .*at least 1 item"),
    "steps missing": ({"version": 1}, r"'steps' is missing"),
    "unknown step": (recipe({"quantise": {}}), r"steps\[0\]: unknown key 'quantise'.*train, prune, finetune"),
    "two steps in one": (
        recipe({"train": {"epochs": 1}, "finetune": {"epochs": 1}}),
        "only one of .*train and finetune",
    ),
    "empty step": (recipe({"train": None}), r"steps\[0\]\.train: 'epochs' is missing"),
    "step without settings": (recipe("train"), r"steps\[0\]: expected a mapping, such as train: \{epochs: 10\}"),
    "zero epochs": (recipe({"train": {"epochs": 0}}), r"epochs: .*greater than or equal to 1"),
    "half an epoch": (recipe({"train": {"epochs": 1.5}}), r"expected a whole number. Received: 1\.5"),
    "epochs true": (recipe({"train": {"epochs": True}}), r"expected a whole number. Received: true"),
    "epochs as text": (recipe({"train": {"epochs": "3"}}), r"expected a whole number. Received: '3'"),
    "train without data": (recipe(data=None), r"steps\[0\]\.train: this step trains, and the recipe has no 'data'"),
    "train without compile": (recipe(compile=None), r"steps\[0\]\.train: .*no 'compile'"),
    "gradual without compile": (recipe(prune(), compile=None), r"steps\[0\]\.prune: .*no 'compile'"),
    "accuracy without data": (
        recipe(one_shot(), {"expect": {"metrics": {"accuracy": {"min": 0.5}}}}, data=None),
        r"steps\[1\]\.expect: this step measures accuracy, and the recipe has no 'data'",
    ),
    "end before begin": (
        recipe(prune({"type": "linear", "final_sparsity": 0.5, "begin": {"epochs": 2}, "end": {"epochs": 1}})),
        r"schedule\.end: the schedule ends before it begins: begin=2 epochs, end=1 epochs",
    ),
    "initial above final": (
        recipe(prune(SCHEDULES["linear"] | {"initial_sparsity": 0.6})),
        r"initial_sparsity: a schedule never restores pruned weights",
    ),
    "stages that fall": (
        recipe(
            prune(
                {
                    "type": "multi_step",
                    "sparsities": [{"at": {"steps": 1}, "sparsity": 0.5}, {"at": {"steps": 2}, "sparsity": 0.2}],
                }
            )
        ),
        r"sparsities\[1\]\.sparsity: sparsities rise",
    ),
    "a duration of both kinds": (
        recipe(prune(SCHEDULES["linear"] | {"end": {"epochs": 1, "steps": 5}})),
        r"end\.epochs: expected only one of steps, epochs",
    ),
    "a bare duration": (recipe(prune(SCHEDULES["linear"] | {"end": 5})), r"such as \{epochs: 9\} or \{steps: 500\}"),
    "schedule without type": (recipe(prune({"final_sparsity": 0.5})), r"schedule: 'type' is missing. Valid here: poly"),
    "unknown schedule": (recipe(prune({"type": "lineal"})), r"type: unknown type 'lineal'. Did you mean 'linear'"),
    "schedule without epochs": (recipe(prune(epochs=None)), "a schedule needs 'epochs' in the same step"),
    "one-shot with epochs": (recipe(one_shot(epochs=3)), r"epochs: 'sparsity' prunes in one shot"),
    "one-shot by movement": (
        recipe(one_shot(criterion="movement")),
        r"prune\.criterion: 'movement' measures how training changes the weights: add 'epochs'",
    ),
    "neither schedule nor sparsity": (recipe({"prune": {"epochs": 3}}), "expected one of schedule, sparsity"),
    "2:4 to 0.9": (recipe(one_shot(0.9, pattern="2:4")), r"prune\.sparsity: 2:4 keeps 2 of every 4.*is 0\.5"),
    "4:2": (recipe(one_shot(pattern="4:2")), "needs 0 < n < m"),
    "block 0": (recipe(one_shot(pattern="block:0x4")), "at least one input and one output"),
    "unknown pattern": (recipe(one_shot(pattern="blocks")), "unknown pattern 'blocks'. Valid here: unstructured"),
    "pooling by its earlier key": (
        recipe(one_shot(pattern="block:4x1", pooling="max")),
        r"prune\.pooling: 'pooling' is a key no longer: write pattern: block:4x1:max\.",
    ),
    "the rules of tfmot by their earlier key": (
        recipe(one_shot(compat="tfmot")),
        r"prune\.compat: 'compat' is a key no longer: write policy: tfmot\.",
    ),
    "a repair by the rules of tfmot": (
        recipe(one_shot(policy="tfmot", repair="none")),
        r"prune\.repair: policy: tfmot repairs nothing",
    ),
    "unknown policy": (recipe(one_shot(policy="tfmod")), r"policy: unknown value 'tfmod'. Did you mean 'tfmot'"),
    "bad regular expression": (recipe(one_shot(include=["re:("])), r"include\[0\]: 're:\(' is not a regular expr"),
    "empty pattern": (recipe(one_shot(exclude=[""])), r"exclude\[0\]: .*an empty pattern"),
    "a number instead of patterns": (recipe(one_shot(exclude=3)), r"exclude: expected a list\. Received: 3"),
    "a word instead of a list": (
        recipe({"export": {"formats": "litert"}}),
        r"formats: expected a list\. Received: 'litert'\. Write \[litert\]\.",
    ),
    "falling finals": (
        recipe(one_shot(0.8), one_shot(0.5)),
        r"steps\[1\]\.prune\.sparsity: pruned weights do not come back: .* to 0\.8\. Received: 0\.5",
    ),
    "unknown format": (recipe(export("tflite")), r"formats\[0\]: unknown value 'tflite'. Did you mean 'litert'"),
    "format twice": (recipe(export("keras", "keras")), r"formats\[1\]: format 'keras' is listed twice"),
    "no format": (recipe({"export": {"formats": []}}), r"formats: .*at least 1 item"),
    "same export name": (recipe(export("keras"), export("keras")), r"steps\[1\]\.export: an earlier export step"),
    "export outside": (recipe(export("keras", name="../x")), "expected a name that can be a file name"),
    "expect of a format never exported": (
        recipe(export("keras"), {"expect": {"bytes": {"litert": {"max": 5}}}}),
        r"bytes\.litert: 'litert' has no size to check.*exported so far: keras",
    ),
    "expect before the export": (
        recipe({"expect": {"bytes": {"keras": {"max": 5}}}}, export("keras")),
        "no export step comes before",
    ),
    "expect of an unknown format": (recipe({"expect": {"bytes": {"kera": {"max": 5}}}}), "Did you mean 'keras'"),
    "expect nothing": (recipe({"expect": {}}), "at least one of metrics, drop, sparsity"),
    "expect no metric": (
        recipe({"expect": {"metrics": {}}}),
        r"expect\.metrics: expected at least one metric, such as",
    ),
    "expect a metric without bound": (
        recipe({"expect": {"metrics": {"mae": {}}}}),
        r"mae: expected at least one of min",
    ),
    "expect crossed bounds": (
        recipe({"expect": {"metrics": {"mae": {"min": 2.0, "max": 1.0}}}}),
        r"mae\.max: expected min <= max\. Received: 2 and 1",
    ),
    "expect no drop": (
        recipe({"expect": {"drop": {"relative": True}}}),
        r"drop: expected at least one metric, such as",
    ),
    "expect a drop that is no number": (
        recipe({"expect": {"drop": {"mae": {"max": 1}}}}),
        r"drop\.mae: expected the largest drop that is allowed, a number\. Received: a mapping",
    ),
    "expect a drop below zero": (recipe({"expect": {"drop": {"mae": -1}}}), r"drop\.mae: .*at least 0\. Received: -1"),
    "expect a relative number": (
        recipe({"expect": {"drop": {"mae": 1, "relative": 2}}}),
        r"drop\.relative: 'relative' is true or false\. Received: 2",
    ),
    "expect a drop of a metric unpruned": (
        recipe({"expect": {"drop": {"mae": 1}}}),
        "'drop' can be measured only after",
    ),
    "unknown metric with arguments": (
        recipe(compile={"metrics": {"out": [{"metric": "mea"}]}}),
        r"metrics\.out\[0\]\.metric: unknown metric 'mea'",
    ),
    "a metric that needs arguments": (
        recipe(compile={"metrics": ["mean_io_u"]}),
        r"metrics\[0\]: 'mean_io_u' needs arguments: write {metric: mean_io_u, arguments: {num_classes: \.\.\.}}",
    ),
    "a metric without its arguments": (
        recipe(compile={"metrics": [{"metric": "io_u", "arguments": {"num_classes": 3}}]}),
        r"metrics\[0\]\.arguments: 'io_u' needs the arguments target_class_ids",
    ),
    "a direction that is known": (
        recipe(compile={"metrics": [{"metric": "mae", "direction": "max"}]}),
        r"metrics\[0\]\.direction: 'direction' needs 'factory'",
    ),
    "accuracy with arguments": (
        recipe(compile={"metrics": [{"metric": "accuracy", "arguments": {"threshold": 0.5}}]}),
        "Keras chooses the class of 'accuracy'",
    ),
    "unknown loss of an output": (recipe(compile={"loss": {"out": "mes"}}), r"compile\.loss\.out: unknown loss 'mes'"),
    "a list of losses": (recipe(compile={"loss": ["mse"]}), r"compile\.loss: expected a mapping\. Received: a list"),
    "a weight of an unknown output": (
        recipe(compile={"loss": {"out": "mse"}, "loss_weights": {"other": 1.0}}),
        r"loss_weights\.other: the loss of output 'other' has a weight, but 'loss' does not name",
    ),
    "unknown direction": (
        recipe(compile={"monitor": {"name": "mae", "direction": "up"}}),
        r"monitor\.direction: unknown value 'up'",
    ),
    "expect no bytes": (recipe({"expect": {"bytes": {}}}), r"expect\.bytes: expected at least one exported format"),
    "expect a percentage": (
        recipe({"expect": {"metrics": {"accuracy": {"min": 96}}}}),
        r"Received: 96\. Write 0\.96 for 96 %",
    ),
    "expect by earlier keys": (
        recipe(one_shot(), {"expect": {"accuracy_drop": {"max": 0.02}}}),
        r"expect\.accuracy_drop: 'accuracy_drop' is a key no longer: write drop: \{accuracy: 0\.02\}\.",
    ),
    "expect sparsity unpruned": (recipe({"expect": {"sparsity": {"min": 0.5}}}), "only after a prune step"),
    "expect a drop unpruned": (recipe({"expect": {"drop": {"accuracy": 0.5}}}), "only after a prune step"),
    "empty range": (recipe(one_shot(), {"expect": {"sparsity": {"min": 0.6, "max": 0.5}}}), "expected min <= max"),
    "h5 file": (recipe(model={"file": "x.h5"}), r"model\.file: only \.keras files"),
    "two models": (recipe(model={"file": "x.keras", "builtin": "digits-cnn"}), "only one of .*file and builtin"),
    "no model source": (recipe(model={}), "model: expected one of file, builtin, factory"),
    "factory without function": (recipe(model={"factory": "os.system"}), "expected 'package.module:function'"),
    "factory with a call": (recipe(data={"factory": "os:system('x')"}), "expected 'package.module:function'"),
    "arguments without factory": (
        recipe(model={"builtin": "digits-cnn", "arguments": {"a": 1}}),
        "model.arguments: 'arguments' needs 'factory'",
    ),
    "argument that is no name": (recipe(model={"factory": "a:b", "arguments": {"a b": 1}}), "keyword argument"),
    "argument that is an object": (
        recipe(model={"factory": "a:b", "arguments": {"a": object()}}),
        "expected text, fin",
    ),
    "path for digits": (recipe(data={"builtin": "digits", "path": "x"}), "leave out 'path'"),
    "scale for digits": (recipe(data={"builtin": "digits", "scale": 2.0}), "leave out 'scale'"),
    "arrays without npz": (
        recipe(data={"builtin": "digits", "arrays": {"train_inputs": "x"}}),
        "needs 'npz', which is missing",
    ),
    "idx with one file": (recipe(data={"idx": {"train_inputs": "x"}}), r"data\.idx: 'train_labels' is missing"),
    "split of everything": (recipe(data={"builtin": "digits", "validation": 1.0}), r"in \[0, 1\)"),
    "limit 0": (recipe(data={"builtin": "digits", "limit": 0}), "greater than or equal to 1"),
    "npz that is a mapping": (
        recipe(data={"npz": {"file": "x.npz"}}),
        r"data\.npz: expected the path of a file, such as data: \{npz: arrays\.npz\}; options .*arrays: .*a mapping",
    ),
    "images that are a number": (recipe(data={"images": 3}), r"such as data: \{images: photos\}; .*size: \[96, 96\]"),
    "images without size": (recipe(data={"images": "x"}), r"data\.images: 'size' is missing: add .*size: \[96, 96\]"),
    "three sizes": (recipe(data={"images": "x", "size": [1, 2, 3]}), r"data\.size: .*at most 2 items"),
    "size for arrays": (recipe(data={"npz": "x", "size": [1, 2]}), "'size' needs 'images', which is missing"),
    "csv without label": (recipe(data={"csv": "x"}), r"data\.csv: 'label' is missing: name the column"),
    "label for arrays": (recipe(data={"npz": "x", "label": "y"}), "'label' needs 'csv' or 'tfds_saved'"),
    "label that is a number": (recipe(data={"csv": "x", "label": 3}), "expected a name, or a list of names"),
    "input twice": (recipe(data={"csv": "x", "label": "y", "inputs": ["a", "a"]}), "expected each name once"),
    "inputs empty": (
        recipe(data={"csv": "x", "label": "y", "inputs": {}}),
        "a mapping from names of the model's inputs",
    ),
    "named inputs of saved data": (recipe(data={"tfds_saved": "x", "inputs": {"a": ["b"]}}), "expected a list of keys"),
    "split of everything by name": (
        recipe(data={"csv": "x", "label": "y", "validation": 0.5, "test": 0.5}),
        "must leave examples for the training",
    ),
    "split": (
        recipe(data={"csv": "x", "label": "y", "split": 0.1}),
        r"data\.split: 'split' is a key no longer: write validation: 0\.2, and test: 0\.2\.",
    ),
    "validation twice": (
        recipe(data={"builtin": "digits", "validation": 0.1, "validation_split": 0.1}),
        "'validation_split' is the former name of 'validation', which is here, too",
    ),
    "test of data with a test part": (recipe(data={"builtin": "digits", "test": 0.1}), "have a test part already"),
    "test folder of arrays": (
        recipe(data={"npz": "x", "test": "y"}),
        "expected a fraction such as 0.2: 'npz' takes no path",
    ),
    "test of everything": (recipe(data={"npz": "x", "test": 1}), r"expected a fraction of the examples in \(0, 1\)"),
    "array name that is a number": (
        recipe(data={"npz": "x", "arrays": {"train_inputs": 3}}),
        "expected the name of an array",
    ),
    "array names of a number": (
        recipe(data={"npz": "x", "arrays": {"train_inputs": {"a": 3}}}),
        "mapping from names of inputs or outputs",
    ),
    "unknown layer": (
        recipe(data={"npz": "x", "preprocessing": ["Normalisation"]}),
        r"data\.preprocessing\[0\]: unknown preprocessing layer 'Normalisation'\. Did you mean 'Normalization'",
    ),
    "random layer": (
        recipe(data={"npz": "x", "preprocessing": [{"RandomFlip": {}}]}),
        "takes no random layers, .* Received: 'RandomFlip'. Put the layer into the model",
    ),
    "layer without its option": (
        recipe(data={"npz": "x", "preprocessing": ["Rescaling"]}),
        "Rescaling needs the option 'scale'",
    ),
    "layer with another option": (
        recipe(data={"npz": "x", "preprocessing": [{"Rescaling": {"scale": 1, "ofset": 2}}]}),
        "unknown key 'ofset'. Did you mean 'offset'",
    ),
    "layer with options in a list": (
        recipe(data={"npz": "x", "preprocessing": [{"Rescaling": [1]}]}),
        "options of Rescaling",
    ),
    "vocabulary in a file": (
        recipe(data={"npz": "x", "preprocessing": [{"StringLookup": {"vocabulary": "/etc/passwd"}}]}),
        "expected a list of words: a file is not read",
    ),
    "no layers": (recipe(data={"npz": "x", "preprocessing": []}), "expected a list of 1 to 20 Keras layers"),
    "two layers in one": (
        recipe(data={"npz": "x", "preprocessing": [{"Rescaling": {"scale": 1}, "Normalization": {}}]}),
        "expected the name of a Keras layer",
    ),
    "layers of an unknown input": (
        recipe(data={"csv": "x", "label": "y", "inputs": {"a": ["b"]}, "preprocessing": {"c": ["Normalization"]}}),
        "unknown key 'c'.*Valid here: a",
    ),
    "unknown optimizer": (recipe(compile={"optimizer": "adma"}), "Did you mean 'adam'"),
    "optimizer of the wrong kind": (recipe(compile={"optimizer": 3}), r"such as \{name: adam"),
    "learning rate twice": (
        recipe(compile={"optimizer": {"name": "sgd", "arguments": {"learning_rate": 1.0}}}),
        "belongs beside 'name'",
    ),
    "learning rate 0": (recipe({"train": {"epochs": 1, "learning_rate": 0}}), "greater than 0"),
    "unknown loss": (
        recipe(compile={"loss": "sparse_categorical_crosentropy"}),
        "Did you mean 'sparse_categorical_crossentropy'",
    ),
    "logits for mse": (recipe(compile={"loss": "mse", "from_logits": True}), "'mse' has no from_logits"),
    "unknown metric": (recipe(compile={"metrics": ["acuracy"]}), r"metrics\[0\]: .*Did you mean 'accuracy'"),
    "seed below 0": (recipe(seed=-1), "seed: .*greater than or equal to 0"),
    "seed too large": (recipe(seed=2**32), "seed: .*less than or equal to 4294967295"),
    "name with a slash": (recipe(name="a/b"), "expected a name that can be a file name"),
    "number as name": (recipe(name=3), "name: expected text. Received: 3. Put it in quotes"),
    "version 2": (recipe(version=2), "version: this prunekit reads recipes of version 1. Received: 2"),
    "version true": (recipe(version=True), "Received: true"),
    "version 1.0": (recipe(version=1.0), "Received: 1"),
    "other version with other keys": (recipe(version=2, stages=[]), "reads recipes of version 1"),
    "nan": (recipe({"train": {"epochs": 1, "learning_rate": float("nan")}}), "finite number"),
    "key that is a number": (recipe() | {3: 4}, "unknown key 3"),
}


@pytest.mark.parametrize(("document", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_with_the_reason(document, message):
    with pytest.raises(RecipeError, match=message) as caught:
        load_recipe(document)
    assert "\n" not in str(caught.value)
