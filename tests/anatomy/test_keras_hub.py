"""KerasHub's layers in the table: every weight has a role; multiply-accumulates are those of TensorFlow's graphs."""

import io
import json
import re
import sys
import warnings
import zipfile
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest

hub_models = pytest.importorskip("hub_models")
from hub_models import backbone, families, inputs_of, keras_hub, source_classes  # noqa: E402

import prunekit as pk  # noqa: E402
from prunekit.anatomy.cost.cost import cost  # noqa: E402
from prunekit.anatomy.files.archives import FileRefused  # noqa: E402
from prunekit.anatomy.files.model_files import check_config, load_model  # noqa: E402
from prunekit.anatomy.layers import keras_hub_layers as hub, layers as table  # noqa: E402
from prunekit.anatomy.layers.model_weights import weights_in  # noqa: E402
from prunekit.anatomy.layers.targets import find_targets  # noqa: E402
from prunekit.anatomy.layers.weight_spec import WeightSpec  # noqa: E402

tf = pytest.importorskip("tensorflow")
profiled = pytest.importorskip("profiled")

pytestmark = pytest.mark.filterwarnings("ignore:Layer '.*' .*was passed an input with a mask:UserWarning")

# They only turn positions into angles, measure similarity outside the model, or prepare data.
NO_PRODUCT = re.compile(
    r"RotaryEmbedding|RotaryPositionalEmbedding|RoformrPositionalEmbedding|SinePositionEncoding|Embedder$|Converter$|"
    r"DFineHybridEncoder|ContentAndQueryEmbedding|^Gemma4VisionAveragePooling$|ConvBnActBlock|_"
)


def known_in(names, classes):
    """The rows of a class and of its base classes."""
    pending, rows = list(names), []
    while pending:
        name = pending.pop()
        rows += [hub.ROWS[name]] if name in hub.ROWS else []
        pending += classes.get(name, ((), (), False))[0]
    return rows


def test_the_rows_have_every_weight_that_the_source_of_keras_hub_creates():
    classes = source_classes()
    missing = [
        f"{name}.{attribute}"
        for name, (_, weights, _) in classes.items()
        for attribute in weights
        if not any(attribute in row.weights for row in known_in([name], classes))
    ]
    assert missing == []
    assert sum(map(len, (weights for _, weights, _ in classes.values()))) > 100


def test_every_class_that_multiplies_matrices_itself_has_a_formula_or_is_said_to_be_unknown():
    classes = source_classes()
    silent = [
        name
        for name, (_, _, multiplies) in classes.items()
        if multiplies and not NO_PRODUCT.search(name)
        if not any(row.products or row.uses or not row.counted for row in known_in([name], classes))
    ]
    assert silent == []


def test_rows_name_classes_of_keras_hub():
    assert [name for name in hub.ROWS if name not in source_classes()] == []


def test_no_module_of_prunekit_imports_keras_hub():
    sources = [path.read_text(encoding="utf-8") for path in Path(pk.__file__).parent.rglob("*.py")]
    assert [text for text in sources if re.search(r"^\s*(import|from) keras_hub", text, re.MULTILINE)] == []


FAMILIES = families()
CORE = ("BertBackbone", "GemmaBackbone", "LlamaBackbone", "MixtralBackbone", "ViTBackbone")


def cases(short):
    return [pytest.param(name, marks=() if name in short else pytest.mark.thorough) for name in FAMILIES]


def test_the_families_are_there():
    assert len(FAMILIES) >= 50
    assert set(CORE) <= set(FAMILIES)


@pytest.fixture(scope="module")
def models():
    """Backbones that several tests look at; no test changes them."""
    return {name: backbone(name) for name in CORE}


@pytest.mark.parametrize("name", cases(CORE))
def test_every_weight_of_every_family_has_a_role(name, models):
    model = models.get(name) or backbone(name)
    unknown = {
        f"{type(weight.layer).__name__}.{weight.attribute}"
        for weight in weights_in(model)
        if weight.spec.role == "unknown"
    }
    assert unknown == set()
    assert sum(weight.size for weight in weights_in(model)) == model.count_params()


def graph_macs(model, specs):
    """Multiply-accumulates of TensorFlow's graphs of a forward pass and of the gradients, without outer products."""
    tensors = keras.tree.map_structure(lambda one: tf.TensorSpec(one.shape, one.dtype), specs)

    def forward(inputs):
        outputs = keras.tree.flatten(model(inputs, training=True))
        return sum(tf.reduce_sum(tf.square(tf.cast(output, "float32"))) for output in outputs)

    def step(inputs):
        with tf.GradientTape() as tape:
            loss = forward(inputs)
        gradients = tape.gradient(loss, model.trainable_variables)
        return [loss, *(one for one in gradients if one is not None)]

    graphs = [tf.function(each, autograph=False).get_concrete_function(tensors) for each in (forward, step)]
    whole, both = (
        sum(times * contracted(one) for one, times in profiled.contractions(graph).items()) for graph in graphs
    )
    return whole, both - whole


def contracted(operation):
    """An einsum that sums over nothing multiplies element by element: rotary embeddings turn positions into angles."""
    if operation.type == "Einsum":
        operands, output = operation.get_attr("equation").decode().split("->")
        labels = [set(one) for one in operands.split(",")]
        if len(labels) == 2 and labels[0] & labels[1] <= set(output):
            return 0
    return profiled.CONTRACTIONS[operation.type](operation)


@pytest.mark.parametrize("name", cases(("LlamaBackbone",)))
def test_the_cost_of_a_family_is_that_of_tensorflows_graphs_or_is_said_to_be_unknown(name, models):
    model = models.get(name) or backbone(name)
    specs = inputs_of(model)
    counted = cost(model, batch_size=2, inputs=specs)
    forward, backward = graph_macs(model, specs)
    if counted.unknown:
        assert 0 < counted.macs < forward
        assert 0 < counted.backward_macs <= backward
    else:
        assert (counted.macs, counted.backward_macs) == (forward, backward)


def axes(model, name):
    target = next(target for target in find_targets(model)[0] if target.name.endswith(name))
    return target.shape, target.in_axes, target.out_axes, target.parallel_axes


def test_projections_of_attention_know_inputs_outputs_and_experts(models):
    gemma = models["GemmaBackbone"]
    assert axes(gemma, "attention/query/kernel") == ((4, 16, 6), (1,), (0, 2), ())
    assert axes(gemma, "attention/key/kernel") == ((2, 16, 6), (1,), (0, 2), ())
    assert axes(gemma, "attention/attention_output/kernel") == ((4, 6, 16), (0, 1), (2,), ())
    assert axes(models["LlamaBackbone"], "self_attention/query/kernel") == ((16, 4, 4), (0,), (1, 2), ())
    assert axes(models["MixtralBackbone"], "expert_feedforward_output_dense") == ((5, 12, 16), (1,), (2,), (0,))
    assert axes(models["BertBackbone"], "token_embedding/embeddings") == ((20, 16), (0,), (1,), (0,))


def test_kernels_and_embeddings_are_pruned_by_default_and_positions_and_scales_are_not(models):
    targets, skipped = find_targets(models["BertBackbone"])
    reasons = {item.name: item.reason for item in skipped}
    kernels = {target.name for target in targets}
    assert {"token_embedding/embeddings", "segment_embedding/embeddings", "pooled_dense/kernel"} <= kernels
    (positions,) = [name for name in reasons if "position" in name]
    assert reasons[positions] == "a table of positions: out unless include names it"
    _, skipped = find_targets(models["LlamaBackbone"])
    assert {item.reason for item in skipped} == {"a normalisation weight: out unless include names it"}
    named, _ = find_targets(models["BertBackbone"], include=[positions])
    assert [target.name for target in named] == [positions]


def test_a_tied_embedding_is_one_weight_and_multiplies_in_the_head(models):
    model = models["GemmaBackbone"]
    embedding = model.get_layer("token_embedding")
    head = embedding(model.output, reverse=True)
    language_model = keras.Model(model.input, head)
    rows = [weight for weight in weights_in(language_model) if weight.variable is embedding.embeddings]
    assert len(rows) == 1
    specs = inputs_of(model)
    extra = cost(language_model, inputs=specs).macs - cost(model, inputs=specs).macs
    assert extra == 7 * 16 * 20


def test_a_registered_row_has_priority_over_prunekits(models, monkeypatch):
    kind = type(models["LlamaBackbone"].get_layer("sequence_output_layernorm"))
    monkeypatch.setattr(table, "_TABLE", dict(table._TABLE))
    assert table.spec_of(models["LlamaBackbone"].get_layer("sequence_output_layernorm"), "scale", np.ones(16)).role == (
        "normalization"
    )
    pk.register_layer(kind, scale=WeightSpec("other", (), (), prunable=False))
    layer = models["LlamaBackbone"].get_layer("sequence_output_layernorm")
    assert table.spec_of(layer, "scale", np.ones(16)).role == "other"


def zeros_of(model, names):
    return {
        weight.name: int(np.sum(np.array(weight.values) == 0)) for weight in weights_in(model) if weight.name in names
    }


def classifier():
    model = keras_hub.models.BertTextClassifier(
        backbone("BertBackbone", num_layers=1), num_classes=2, preprocessor=None
    )
    x = {name: np.ones((8, 6), "int32") for name in model.input}
    return model, x, np.arange(8) % 2


def language_model():
    model = keras_hub.models.LlamaCausalLM(backbone("LlamaBackbone"), preprocessor=None)
    tokens = np.arange(48).reshape(8, 6) % 20
    return model, {"token_ids": tokens, "padding_mask": np.ones((8, 6), bool)}, (tokens + 1) % 20


@pytest.mark.parametrize(
    "make", [classifier, pytest.param(language_model, marks=pytest.mark.thorough)], ids=["BERT", "Llama"]
)
def test_fit_prunes_exactly_and_the_saved_file_is_plain_keras_hub(make, tmp_path):
    keras.utils.set_random_seed(3)
    model, x, y = make()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=[], jit_compile=False)
    pruning = pk.PruningCallback(
        pk.schedules.PolynomialDecay(final_sparsity=0.75, end_step=4, frequency=1), allocation="uniform"
    )
    model.fit(x, y, batch_size=4, epochs=3, verbose=0, shuffle=False, callbacks=[pruning])
    targets = {target.name: target.size for target in pruning.pruner.targets}
    assert zeros_of(model, targets) == {name: round(0.75 * size) for name, size in targets.items()}
    assert pruning.pruner.audit() == dict.fromkeys(pruning.pruner.audit(), 0)
    path = tmp_path / "pruned.keras"
    model.save(path)
    with zipfile.ZipFile(path) as archive, h5py.File(io.BytesIO(archive.read("model.weights.h5"))) as stored:
        assert b"prunekit" not in archive.read("config.json")
        # Iterations, learning rate, and Adam's two slots: no mask is stored with the optimizer.
        assert len(stored["optimizer/vars"]) == 2 + 2 * len(model.trainable_variables)
    with warnings.catch_warnings():
        # A task of KerasHub compiles itself, without the slots of the optimizer in the file.
        warnings.filterwarnings("ignore", "Skipping variable loading for optimizer")
        again = keras.models.load_model(path, compile=False)
    assert zeros_of(again, targets) == zeros_of(model, targets)
    assert type(again) is type(model)
    np.testing.assert_allclose(again(x), model(x), atol=1e-5)


def test_one_shot_pruning_is_exact():
    model = backbone("LlamaBackbone")
    report = pk.prune(model, 0.5, allocation="uniform")
    sizes = {row.name: row.size for row in report.weights if row.name in report.targets}
    assert zeros_of(model, sizes) == {name: size // 2 for name, size in sizes.items()}


# ---- model files -----------------------------------------------------------------------------------------------------


def test_a_file_of_keras_hub_is_read_without_its_classes_being_registered_by_the_user(tmp_path, models):
    model = models["BertBackbone"]
    model.save(tmp_path / "bert.keras")
    again = load_model(tmp_path / "bert.keras")
    assert type(again) is type(model)
    layer = type(models["LlamaBackbone"].get_layer("sequence_output_layernorm"))
    assert keras.saving.get_registered_name(layer) == layer.__name__, "an internal class, which is not registered"
    keras.Sequential([keras.Input((4,)), layer()]).save(tmp_path / "internal.keras")
    assert type(load_model(tmp_path / "internal.keras").layers[0]) is layer


def test_a_file_of_keras_hub_names_the_extra_where_keras_hub_is_absent(tmp_path, models, monkeypatch):
    models["BertBackbone"].save(tmp_path / "bert.keras")
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(FileRefused, match=r"needs BertBackbone of KerasHub.*pip install 'prunekit\[hub\]'"):
        load_model(tmp_path / "bert.keras")


@pytest.mark.parametrize("argument", ["vocabulary", "merges", "proto"])
@pytest.mark.parametrize("module", ["keras_hub.src.models.gpt2.gpt2_tokenizer", "keras_nlp.src.x", "elsewhere"])
def test_a_tokenizer_that_reads_another_file_is_refused(argument, module):
    registered = "keras_hub>GPT2Tokenizer"
    value = {"class_name": "GPT2Tokenizer", "module": module, "registered_name": registered, "config": {argument: "/x"}}
    with pytest.raises(FileRefused, match=f"takes its {argument} from another file"):
        check_config(json.dumps({"layer": value}), "m.keras")


def test_what_is_no_layer_of_keras_hub_is_refused():
    for module, name in (("keras_hub.src.utils.preset_utils", "load_json"), ("keras_hub.src.api_export", "types")):
        value = {"class_name": name, "module": module, "registered_name": None, "config": {}}
        with pytest.raises(FileRefused, match="is not registered here"):
            check_config(json.dumps({"layer": value}), "m.keras")
