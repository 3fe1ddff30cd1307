"""Networks of keras.applications and KerasHub lose half of their channels exactly, or say what stays and why."""

import hub_models
import keras
import numpy as np
import pytest
from architectures import randomize
from removed_channels import arrays, difference, drawn, outputs_with, zeroed

from prunekit.anatomy.channels import find_channels
from prunekit.techniques.shrink.rebuild import without_channels

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
@pytest.mark.slow
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
            return np.ones(one.shape, "int32")
        most = 2 if "segment" in name else 20
        whole = "int" in one.dtype
        return rng.integers(0, most, one.shape).astype("int32") if whole else rng.normal(size=one.shape)

    given = hub_models.inputs_of(model)
    return (
        {name: drawn_for(name, one) for name, one in given.items()} if isinstance(given, dict) else drawn_for("", given)
    )


@pytest.mark.parametrize("name", ["BertBackbone", "RobertaBackbone", "ResNetBackbone", "MobileNetBackbone"])
def test_a_backbone_of_keras_hub_loses_half_of_its_channels_exactly(name):
    model = hub_models.backbone(name)
    found, left = largest_difference(model, hub_inputs(model))
    assert found <= 1e-5 and left <= 0.6


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("GemmaBackbone", "GemmaDecoderBlock"),
        ("GPT2Backbone", "TransformerDecoder"),
        ("T5Backbone", "T5TransformerLayer"),
    ],
)
def test_a_backbone_whose_blocks_cannot_be_followed_stays_and_names_them(name, kind):
    channels = find_channels(hub_models.backbone(name))
    assert not channels.groups
    assert any(kind in stop.reason for stop in channels.stops)


@pytest.mark.parametrize("name", ["LlamaBackbone", "ViTBackbone"])
def test_a_backbone_whose_layers_have_no_config_that_works_is_refused_by_the_layer(name):
    channels = find_channels(hub_models.backbone(name))
    with pytest.raises(ValueError, match="Llama|ViT") as caught:
        without_channels(channels, drawn(channels, 0))
    assert "cannot be made again" in str(caught.value)
