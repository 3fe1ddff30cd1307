"""Networks of keras.applications and KerasHub lose half of their channels exactly, or say what stays and why."""

import subprocess
import sys

import hub_models
import keras
import numpy as np
import pytest
from architectures import randomize
from removed_channels import arrays, difference, drawn, outputs_with, zeroed

import prunekit as pk
from prunekit.anatomy.channels.channels import find_channels
from prunekit.techniques.shrink.graph.rebuild import without_channels

# Of layers of KerasHub that are called with a mask.
pytestmark = pytest.mark.filterwarnings("ignore:.*does not support masking")

# Name -> largest share of the parameters that is left without half of the channels.
APPLICATIONS = {
    "VGG16": 0.26,
    "ResNet50": 0.26,
    "ResNet50V2": 0.26,
    "MobileNet": 0.27,
    "MobileNetV2": 0.28,
    "MobileNetV3Small": 0.28,
    "DenseNet121": 0.27,
    "NASNetMobile": 0.29,
    "InceptionV3": 0.26,
    "InceptionResNetV2": 0.26,
    "Xception": 0.26,
    "EfficientNetB0": 0.28,
    "EfficientNetV2B0": 0.27,
    # Its residual stream passes through LayerNormalization.
    "ConvNeXtTiny": 0.55,
}


def largest_difference(model, inputs):
    """(relative difference of the smaller model and the zeroed one, share of the parameters that is left)."""
    randomize(model)
    channels = find_channels(model)
    removed = drawn(channels, 0)
    smaller, _ = without_channels(channels, removed)
    wanted = outputs_with(model, zeroed(channels, removed), inputs)
    return difference(wanted, arrays(smaller(inputs))), smaller.count_params() / model.count_params()


@pytest.mark.thorough
@pytest.mark.parametrize("name", APPLICATIONS)
def test_half_of_the_channels_of_an_application_are_removed_exactly(name):
    size = 75 if "ception" in name else 64
    model = getattr(keras.applications, name)(weights=None, classes=10, input_shape=(size, size, 3))
    inputs = np.random.default_rng(0).normal(size=(2, size, size, 3)).astype("float32")
    found, left = largest_difference(model, inputs)
    assert found <= 1e-5 and left <= APPLICATIONS[name]


def hub_inputs(model):
    rng = np.random.default_rng(0)

    def drawn_for(name, one):
        if "mask" in name:
            # The last example is padded.
            return (np.arange(one.shape[1]) < np.array([[one.shape[1]], [one.shape[1] - 2]])).astype("int32")
        most = 2 if "segment" in name else 20
        whole = "int" in one.dtype
        return rng.integers(0, most, one.shape).astype("int32") if whole else rng.normal(size=one.shape)

    given = hub_models.inputs_of(model)
    return (
        {name: drawn_for(name, one) for name, one in given.items()} if isinstance(given, dict) else drawn_for("", given)
    )


def with_vocabulary(name):
    """A language model: the outputs of a backbone, multiplied with its own table of vectors."""
    kind = getattr(hub_models.keras_hub.models, f"{name}CausalLM")
    return kind(backbone=hub_models.backbone(f"{name}Backbone"), preprocessor=None)


# Name -> (options, largest share of the parameters that is left).
BACKBONES = {
    "BertBackbone": ({}, 0.6),
    "RobertaBackbone": ({}, 0.6),
    "DistilBertBackbone": ({}, 0.5),
    "ResNetBackbone": ({}, 0.6),
    "MobileNetBackbone": ({}, 0.6),
    "ViTBackbone": ({}, 0.7),
    "GPT2Backbone": ({}, 0.5),
    "T5Backbone": ({}, 0.55),
    "LlamaBackbone": ({}, 0.65),
    "MistralBackbone": ({"sliding_window": 3}, 0.65),
    "GemmaBackbone": ({}, 0.5),
}
VARIANTS = {
    "Llama with one key head": ("LlamaBackbone", {"num_key_value_heads": 1}),
    "Llama 3.1": (
        "LlamaBackbone",
        {
            "rope_frequency_adjustment_factor": 8.0,
            "rope_low_freq_factor": 1.0,
            "rope_high_freq_factor": 4.0,
            "rope_pretraining_sequence_length": 32,
        },
    ),
    "Gemma with one key head": ("GemmaBackbone", {"num_key_value_heads": 1}),
    "Gemma 2": (
        "GemmaBackbone",
        {
            "use_post_ffw_norm": True,
            "use_post_attention_norm": True,
            "attention_logit_soft_cap": 30.0,
            "use_sliding_window_attention": True,
            "sliding_window_size": 3,
            "dropout": 0.1,
        },
    ),
    "ViT without a class token": ("ViTBackbone", {"use_class_token": False}),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", BACKBONES)
def test_a_backbone_of_keras_hub_loses_half_of_its_channels_exactly(name):
    options, most = BACKBONES[name]
    model = hub_models.backbone(name, **options)
    found, left = largest_difference(model, hub_inputs(model))
    assert found <= 1e-5 and left <= most


@pytest.mark.thorough
@pytest.mark.parametrize("name", VARIANTS)
def test_so_does_each_variant_of_a_backbone(name):
    kind, options = VARIANTS[name]
    model = hub_models.backbone(kind, **options)
    found, left = largest_difference(model, hub_inputs(model))
    assert found <= 1e-5 and left <= 0.8


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma"])
def test_a_language_model_with_rms_normalization_loses_half_of_its_hidden_width_too(name):
    model = with_vocabulary(name)
    channels = find_channels(model)
    assert any(group.name.endswith("token_embedding") and group.channels.size == 16 for group in channels.groups)
    found, left = largest_difference(model, hub_inputs(model))
    assert found <= 1e-5 and left <= 0.3


@pytest.mark.thorough
def test_smaller_language_models_load_without_prunekit_and_train(tmp_path):
    ones = np.ones((2, 5), "int32")
    inputs = {"token_ids": ones, "padding_mask": ones}
    smaller = {}
    for name in ("Llama", "Mistral", "Gemma", "GPT2"):
        channels = find_channels(with_vocabulary(name))
        smaller[name], _ = without_channels(channels, drawn(channels, 0))
        smaller[name].save(tmp_path / f"{name}.keras")
    program = (
        "import sys, keras, keras_hub, numpy as np\n"
        "ones = np.ones((2, 5), 'int32')\n"
        "for name in sys.argv[1:]:\n"
        "    outputs = keras.models.load_model(name + '.keras')({'token_ids': ones, 'padding_mask': ones})\n"
        "    np.save(name, keras.ops.convert_to_numpy(outputs))\n"
        "assert 'prunekit' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program, *smaller], check=True, cwd=tmp_path)
    for name, model in smaller.items():
        np.testing.assert_allclose(arrays(model(inputs))[0], np.load(tmp_path / f"{name}.npy"), rtol=1e-5, atol=1e-6)
        before = model.get_weights()
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.train_on_batch(inputs, np.ones((2, 5)))
        assert any(not np.array_equal(one, other) for one, other in zip(before, model.get_weights(), strict=True))


def test_a_vision_transformer_loads_from_its_file(tmp_path):
    model = hub_models.backbone("ViTBackbone", num_layers=1)
    inputs = hub_inputs(model)
    channels = find_channels(model)
    smaller, variables = without_channels(channels, drawn(channels, 0))
    assert {id(weight) for weight in model.weights} <= variables.keys()
    smaller.save(tmp_path / "smaller.keras")
    loaded = keras.models.load_model(tmp_path / "smaller.keras")
    assert difference(arrays(smaller(inputs)), arrays(loaded(inputs))) == 0


def test_the_width_of_a_head_stays_with_a_rotary_embedding():
    channels = find_channels(hub_models.backbone("MistralBackbone", num_layers=1))
    (stop,) = (stop for stop in channels.stops if "rotary" in stop.name)
    assert "angles that depend on their number" in stop.reason
    assert {layer.rpartition("/")[2] for layer in stop.layers} == {"query", "key"}


def test_a_decoder_that_reads_the_mask_of_its_input_keeps_its_channels():
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(10, 8, mask_zero=True)(inputs)
    decoded = hub_models.keras_hub.layers.TransformerDecoder(12, 2, name="decoder")(x)
    channels = find_channels(keras.Model(inputs, keras.layers.Dense(3)(decoded)))
    assert not channels.groups
    assert any("pass it to the layer as `decoder_padding_mask`" in stop.reason for stop in channels.stops)


def test_the_report_names_the_class_whose_methods_are_gone():
    model = hub_models.backbone("DistilBertBackbone", num_layers=1)
    _, report = pk.shrink(model, channels=0.5)
    assert any("without the methods of DistilBertBackbone" in note for note in report.notes)
