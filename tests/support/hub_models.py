"""Tiny models of KerasHub with random weights, and what its source says about its layers."""

import ast
import functools
import importlib
import inspect
import pathlib

import keras
import pytest

keras_hub = pytest.importorskip("keras_hub")

# Values of arguments by name; an argument with another name keeps its default.
SIZES = {
    "decoder_head_dim": 4,
    "decoder_hidden_dim": 16,
    "decoder_intermediate_dim": 12,
    "decoder_layer_types": ["full_attention", "sliding_attention"],
    "decoder_num_attention_heads": 4,
    "decoder_num_heads": 2,
    "decoder_num_key_value_heads": 2,
    "decoder_num_layers": 2,
    "embedding_dim": 6,
    "encoder_head_dim": 4,
    "encoder_hidden_dim": 16,
    "encoder_intermediate_dim": 12,
    "encoder_layer_types": ["full_attention", "sliding_attention"],
    "encoder_num_attention_heads": 4,
    "encoder_num_heads": 2,
    "encoder_num_key_value_heads": 2,
    "encoder_num_layers": 2,
    "filter_dim": 16,
    "head_dim": 6,
    "head_size": 8,
    "hidden_dim": 16,
    "hidden_size": 16,
    "image_shape": (32, 32, 3),
    "image_size": 32,
    "intermediate_dim": 12,
    "max_sequence_length": 16,
    "mlp_dim": 12,
    "moe_intermediate_dim": 10,
    "num_experts": 5,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "num_layers": 2,
    "num_query_heads": 4,
    "patch_size": 8,
    "shared_expert_intermediate_dim": 14,
    "shared_expert_intermediate_size": 14,
    "sliding_window": 4,
    "top_k": 2,
    "vit_hidden_dim": 8,
    "vit_num_heads": 2,
    "vit_num_layers": 1,
    "vit_patch_size": 8,
    "vocab_size": 20,
    "vocabulary_size": 20,
}
# Families that need arguments of their own.
SPECIAL = {
    "DenseNetBackbone": {"stackwise_num_repeats": [1, 1], "growth_rate": 4},
    "EdRecBackbone": {"num_layers_enc": 1, "num_layers_dec": 1},
    "MobileNetBackbone": {
        "stackwise_expansion": [[40, 56], [64, 144]],
        "stackwise_num_blocks": [2, 2],
        "stackwise_num_filters": [[16, 16], [24, 24]],
        "stackwise_kernel_size": [[3, 3], [5, 5]],
        "stackwise_num_strides": [[2, 1], [2, 1]],
        "stackwise_se_ratio": [[None, None], [0.25, 0.25]],
        "stackwise_activation": [["relu", "relu"], ["hard_swish", "hard_swish"]],
        "stackwise_padding": [[1, 1], [2, 2]],
        "output_num_filters": 16,
        "depthwise_filters": 8,
        "depthwise_stride": 2,
        "depthwise_residual": False,
        "last_layer_filter": 16,
    },
    "ResNetBackbone": {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [7],
        "stackwise_num_filters": [64, 64],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "basic_block",
    },
    "SwinTransformerBackbone": {
        "embed_dim": 8,
        "depths": (1, 1),
        "num_heads": (2, 2),
        "window_size": 4,
        "patch_size": 4,
    },
    "VGGBackbone": {"stackwise_num_repeats": [1, 1], "stackwise_num_filters": [4, 6]},
    "EfficientNetBackbone": {
        "stackwise_kernel_sizes": [3, 3],
        "stackwise_num_repeats": [1, 1],
        "stackwise_input_filters": [8, 8],
        "stackwise_output_filters": [8, 16],
        "stackwise_expansion_ratios": [1, 4],
        "stackwise_squeeze_and_excite_ratios": [0.0, 0.25],
        "stackwise_strides": [1, 2],
        "stackwise_block_types": ["fused", "unfused"],
        "stackwise_width_coefficients": [1.0, 1.0],
        "stackwise_depth_coefficients": [1.0, 1.0],
        "num_features": 16,
    },
    "MiTBackbone": {
        "layerwise_depths": [1, 1],
        "num_layers": 2,
        "layerwise_num_heads": [1, 2],
        "layerwise_sr_ratios": [2, 1],
        "max_drop_path_rate": 0.1,
        "layerwise_patch_sizes": [7, 3],
        "layerwise_strides": [4, 2],
        "hidden_dims": [8, 16],
    },
    "XceptionBackbone": {"stackwise_conv_filters": [[4, 4], [8, 8]], "stackwise_pooling": [True, False]},
}


def required(cls):
    """Names of the constructor's arguments without a default."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return [item.name for item in parameters if item.default is item.empty and item.kind is not item.VAR_KEYWORD]


def families():
    """Names of the backbones that `backbone` can build."""
    found = []
    for name in dir(keras_hub.models):
        cls = getattr(keras_hub.models, name)
        if name.endswith("Backbone") and cls.__init__ is not keras_hub.models.Backbone.__init__:
            known = {**SIZES, **SPECIAL.get(name, {}), **dict.fromkeys(_ENCODERS.get(name, ()))}
            if set(required(cls)) <= known.keys():
                found.append(name)
    return found


_ENCODERS = {
    "CLIPBackbone": ("vision_encoder", "text_encoder", "projection_dim"),
    "SigLIPBackbone": ("vision_encoder", "text_encoder"),
}


def _encoders(name):
    prefix = name.removesuffix("Backbone")
    folder = f"keras_hub.src.models.{prefix.lower()}"
    parts = {}
    for part in ("vision_encoder", "text_encoder"):
        found = importlib.import_module(f"{folder}.{prefix.lower()}_{part}")
        kind = getattr(found, f"{prefix}{part.replace('_encoder', '').title()}Encoder")
        parts[part] = kind(**_arguments(kind, {"embedding_dim": 16}))
    return parts | ({"projection_dim": 6} if "projection_dim" in _ENCODERS[name] else {})


def _arguments(cls, given):
    names = inspect.signature(cls.__init__).parameters
    wanted = {*required(cls), *({"max_sequence_length", "image_shape", "sliding_window"} & names.keys())}
    return {**{name: SIZES[name] for name in wanted if name in SIZES}, **given}


def backbone(name, **options):
    """A tiny backbone with random weights: two layers, features and heads of different lengths where it allows that."""
    cls = getattr(keras_hub.models, name)
    given = _encoders(name) if name in _ENCODERS else SPECIAL.get(name, {})
    return cls(**_arguments(cls, {**given, **options}))


# Open lengths of an encoder's inputs and of other inputs: different, and as long as windows of audio need.
LENGTHS = {"MoonshineBackbone": (900, 900), "SigLIPBackbone": (16, 16)}


def inputs_of(model, batch=2):
    """Specifications of a model's inputs."""
    lengths = LENGTHS.get(type(model).__name__, (5, 7))

    def sized(tensor, length):
        shape = [length if size is None else size for size in tensor.shape[1:]]
        return keras.KerasTensor((batch, *shape), tensor.dtype)

    if not isinstance(model.input, dict):
        return sized(model.input, lengths[1])
    return {name: sized(tensor, lengths["encoder" not in name]) for name, tensor in model.input.items()}


# ---------------------------------------------------------------- the source


PRODUCTS = {"einsum", "matmul", "dot", "tensordot", "conv", "depthwise_conv", "dot_product_attention"}


@functools.cache
def source_classes():
    """{class name: (names of base classes, attributes that hold weights, True if it multiplies matrices)}."""
    found = {}
    root = pathlib.Path(keras_hub.__file__).parent / "src"
    for path in sorted(root.rglob("*.py")):
        if path.parts[len(root.parts)] in ("layers", "models"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    bases, weights, products = found.setdefault(node.name, (set(), set(), set()))
                    bases |= {ast.unparse(base).split(".")[-1] for base in node.bases}
                    weights |= set(_weights(node))
                    products |= set(_products(node))
    return {name: (bases, weights, bool(products)) for name, (bases, weights, products) in found.items()}


def _weights(node):
    for item in ast.walk(node):
        value = getattr(item, "value", None)
        if isinstance(item, ast.Assign) and isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            if value.func.attr in ("add_weight", "Variable") and isinstance(item.targets[0], ast.Attribute):
                yield item.targets[0].attr.lstrip("_")


def _products(node):
    for function in node.body:
        if isinstance(function, ast.FunctionDef):
            for item in ast.walk(function):
                if isinstance(item, ast.BinOp) and isinstance(item.op, ast.MatMult):
                    yield function.name
                if isinstance(item, ast.Call) and isinstance(item.func, ast.Attribute) and item.func.attr in PRODUCTS:
                    yield function.name
