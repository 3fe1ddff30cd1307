"""Rows of the table of layer types for KerasHub's layers, by class name. Does not import KerasHub.

`layers.py` looks up classes of the package `keras_hub` here by name; a subclass has the row of its base class.
Layers of KerasHub that own no weights and multiply nothing have no row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from prunekit.anatomy.layers.counting import LayerShapes, Product, Sources
from prunekit.anatomy.layers.layer_rows import (
    BIAS,
    KERNEL,
    NORM,
    NORM_STATE,
    OTHER,
    OTHER_STATE,
    POSITION,
    LayerRow,
)
from prunekit.anatomy.layers.weight_spec import WeightSpec

PACKAGE = "keras_hub"
Products = Callable[[Any, LayerShapes], tuple[Product, ...]]

# (experts, inputs, outputs): a matrix per expert; every expert multiplies every token.
_EXPERTS = WeightSpec("kernel", (-2,), (-1,), parallel_axes=(-3,))
# (channels, window) of a causal depthwise convolution.
_DEPTHWISE_LAST = WeightSpec("depthwise_kernel", (), (-2,), prunable=False, parallel_axes=(-2,))


# ---------------------------------------------------------------- formulas


def _per_token(layer: Any, call: LayerShapes) -> int:
    """Returns the product of the lengths of all input axes except the last."""
    return math.prod(call.inputs[0][:-1])


def _per_masked_token(layer: Any, call: LayerShapes) -> dict[str, int]:
    """Returns the number of masked positions, which are the only positions that the head projects."""
    return {"kernel": math.prod(call.outputs[0][:-1])}


def _attention(query: str, key: str, value: str, output: str, key_input: Callable[[LayerShapes], int]) -> Products:
    """Returns the formula for the scores and for the weighted sum of the values, over all query heads.

    Args:
        query: Attribute of the layer that holds the projection of the queries.
        key: The same for the keys.
        value: The same for the values.
        output: The same for the results of all heads; its inputs are heads x width of a head.
        key_input: Function that returns the index of the input that keys and values are computed from.
    """

    def products(layer: Any, call: LayerShapes) -> tuple[Product, ...]:
        index = key_input(call)
        kernel = getattr(layer, output).kernel.shape
        width = math.prod(kernel) // kernel[-1]
        macs = math.prod(call.inputs[0][:-1]) * call.inputs[index][-2] * width
        queries: Sources = (0, query)
        keys: Sources = (index, key)
        return Product(macs, (queries, keys)), Product(macs, ((*queries, *keys), (index, value)))

    return products


def _own_input(call: LayerShapes) -> int:
    return 0


def _last_states(call: LayerShapes) -> int:
    """Returns the index of the last input of shape (batch, positions, features): the encoder's states if given."""
    states = zip(call.inputs, call.types, strict=True)
    return max(index for index, (shape, dtype) in enumerate(states) if len(shape) == 3 and "float" in dtype)


def _self_attention(affix: str = "{}_dense", names: str = "query key value output") -> Products:
    query, key, value, output = (affix.format(name) for name in names.split())
    return _attention(query, key, value, output, _own_input)


_PRIVATE = _self_attention("_{}_dense")
_PUBLIC = _self_attention()
_SHORT = _self_attention(names="q k v o")
_T5 = _attention("query_projector", "key_projector", "value_projector", "output_projector", _last_states)


# ---------------------------------------------------------------- rows


def _each(names: str, row: LayerRow) -> dict[str, LayerRow]:
    return dict.fromkeys(names.split(), row)


_NORMALIZATIONS = _each(
    "EdRecRMSNormalization Gemma3nAudioCumulativeGroupNorm Gemma3nRMSNorm GptOssLayerNormalization LlamaLayerNorm "
    "MistralLayerNormalization MixtralLayerNormalization Phi3LayerNorm Qwen3LayerNorm Qwen3MoeLayerNorm "
    "Qwen3_5LayerNorm Qwen3_5RMSNormGated QwenLayerNorm QwenMoeLayerNorm RMSNormalization RoformerNorm",
    LayerRow({"scale": NORM}),
) | {
    "Gemma4FrozenNorm": LayerRow({"scale": NORM_STATE}),
    "LayerScale2d": LayerRow({"gamma": NORM}),
    "RmsNorm2d": LayerRow({"gamma": NORM}),
    "T5LayerNorm": LayerRow({"weight": NORM}),
}

_EMBEDDINGS = {
    "AddPositionalEmbedding": LayerRow({"pos_embed": POSITION}),
    "BLIP2QueryTokens": LayerRow({"query_tokens": OTHER}),
    "CLIPVisionEmbedding": LayerRow({"class_embedding": OTHER, "position_ids": OTHER_STATE}),
    "DINOV2Embedding": LayerRow(
        {
            **dict.fromkeys(("cls_token", "mask_token", "register_tokens"), OTHER),
            **dict.fromkeys(("position_embeddings", "interpolated_position_embeddings"), POSITION),
        }
    ),
    "DINOV3Embedding": LayerRow(dict.fromkeys(("cls_token", "mask_token", "register_tokens"), OTHER)),
    "DeiTEmbeddings": LayerRow(
        {
            **dict.fromkeys(("class_token", "distillation_token", "mask_token"), OTHER),
            "position_embedding": POSITION,
        }
    ),
    "Gemma4VisionPatchEmbedder": LayerRow({"position_embedding_table": POSITION}, counted=False),
    "MetaCLIP2VisionEmbedding": LayerRow({"class_embedding": OTHER}),
    "MoonshineRotaryEmbedding": LayerRow({"inv_freq": OTHER_STATE}, counted=False),
    "PARSeqDecoder": LayerRow({"pos_query_embeddings": POSITION}),
    "PositionEmbedding": LayerRow({"position_embeddings": POSITION}),
    "RandomFrequencyPositionalEmbeddings": LayerRow(
        {"positional_encoding_gaussian_matrix": OTHER_STATE}, counted=False
    ),
    "RelativeEmbedding": LayerRow({"rel_embeddings": POSITION}),
    "SAM3Embedding": LayerRow(dict.fromkeys(("position_embeddings", "tiled_position_embeddings"), POSITION)),
    "SAM3ViTRotaryEmbedding": LayerRow(dict.fromkeys(("rope_embeddings_cos", "rope_embeddings_sin"), OTHER_STATE)),
    "SigLIPTextEmbedding": LayerRow({"position_ids": OTHER_STATE}),
    "SigLIPVisionEmbedding": LayerRow({"position_ids": OTHER_STATE}),
    "SmolLM3RotaryEmbedding": LayerRow({"inv_freq": OTHER_STATE}),
    "T5Gemma2Backbone": LayerRow(dict.fromkeys(("encoder_eoi_embedding", "decoder_eoi_embedding"), OTHER)),
    "VectorQuantizerEMA": LayerRow(
        dict.fromkeys(("embeddings", "ema_cluster_size", "ema_w"), OTHER_STATE), counted=False
    ),
    "ViTPatchingAndEmbedding": LayerRow({"class_token": OTHER}),
    "VideoPrismClassToken": LayerRow({"cls_token": OTHER}),
    "XLNetAttentionMaskLayer": LayerRow({"mask_emb": OTHER}),
}

_ATTENTIONS = (
    _each(
        "BloomAttention LlamaAttention CachedMistralAttention Qwen3Attention Qwen3MoeAttention Qwen3_5Attention "
        "QwenAttention",
        LayerRow({}, products=_PRIVATE),
    )
    | _each(
        "CachedGemma3Attention CachedGemmaAttention CachedMixtralAttention DINOV3Attention FalconAttention "
        "Gemma4TextAttention Phi3Attention",
        LayerRow({}, products=_PUBLIC),
    )
    | _each("EsmSelfAttention RoformerAttention", LayerRow({}, products=_SHORT))
    | {
        "GPTNeoXAttention": LayerRow(
            {}, products=_attention("_qkv_dense", "_qkv_dense", "_qkv_dense", "_output_dense", _own_input)
        ),
        "GptOssAttention": LayerRow({"sinks": OTHER}, products=_PUBLIC),
        "QwenMoeAttention": LayerRow(
            {}, products=_attention("query_dense", "key_dense", "value_dense", "_output_dense", _own_input)
        ),
        "SmolLM3Attention": LayerRow({}, products=_self_attention("{}_proj", "q k v o")),
        "T5MultiHeadAttention": LayerRow({"relative_attention_bias": BIAS}, products=_T5),
    }
)

_HEADS_AND_EXPERTS = {
    "Gemma4MoEBlock": LayerRow(
        {**dict.fromkeys(("gate_proj", "up_proj", "down_proj"), _EXPERTS), "per_expert_scale": OTHER}, counted=False
    ),
    "GptOssExperts": LayerRow(
        {
            **dict.fromkeys(("gate_up_proj", "down_proj"), _EXPERTS),
            **dict.fromkeys(("gate_up_proj_bias", "down_proj_bias"), BIAS),
        },
        _per_token,
    ),
    "MaskedLMHead": LayerRow({"kernel": KERNEL, "bias": BIAS}, _per_masked_token),
    **_each(
        "MixtralMoeExperts Qwen3MoeExperts Qwen3_5MoeExperts QwenMoeExperts",
        LayerRow(
            dict.fromkeys(
                (f"expert_feedforward_{part}_dense" for part in ("gate", "intermediate", "output")), _EXPERTS
            ),
            _per_token,
        ),
    ),
}

# These layers multiply in ways that no formula here describes: `pk.cost` reports their multiply-accumulates as unknown.
_UNCOUNTED = {
    "AddRelativePositionalEmbedding": LayerRow(dict.fromkeys(("rel_pos_h", "rel_pos_w"), POSITION), counted=False),
    "CLIPHead": LayerRow({"logit_scale": OTHER}, counted=False),
    "DFineDecoder": LayerRow(dict.fromkeys(("reg_scale", "upsampling_factor"), OTHER_STATE)),
    "DFineMultiscaleDeformableAttention": LayerRow({"num_points_scale": OTHER_STATE}, counted=False),
    "DINOV2LayerScale": LayerRow({"lambda1": OTHER}),
    "DINOV3LayerScale": LayerRow({"lambda1": OTHER}),
    "Gemma3nAudioAttention": LayerRow({"per_dim_scale": OTHER}, counted=False),
    "Gemma3nTextAltUp": LayerRow({"correct_output_scale": OTHER}, counted=False),
    "Gemma4AssistantCausalLM": LayerRow({"token_ordering": OTHER_STATE}, counted=False),
    "Gemma4AudioAttention": LayerRow({"per_dim_scale": OTHER}, counted=False),
    "Gemma4AudioRelativePositionEmbedding": LayerRow({"pos_proj": KERNEL}, counted=False),
    **_each(
        "Gemma4ClippableDense Gemma4ClippableEinsumDense",
        LayerRow(dict.fromkeys(("input_min", "input_max", "output_min", "output_max"), OTHER_STATE), counted=False),
    ),
    "Gemma4Router": LayerRow({"per_dim_scale": OTHER}),
    "Gemma4TextDecoderBlock": LayerRow({"layer_scalar": OTHER_STATE}, counted=False),
    "Gemma4VisionOutput": LayerRow(dict.fromkeys(("std_bias", "std_scale"), OTHER_STATE)),
    "HGNetV2LearnableAffineBlock": LayerRow({"scale": OTHER, "bias": OTHER}),
    "MetaCLIP2Head": LayerRow({"logit_scale": OTHER}, counted=False),
    "MultiHeadAttentionPooling": LayerRow({"probe": OTHER}),
    "Qwen3_5GatedDeltaNet": LayerRow(
        {"conv1d_weight": _DEPTHWISE_LAST, "dt_bias": BIAS, "A_log": OTHER},
        counted=False,
    ),
    "RWKV7ChannelMix": LayerRow({"x_k": OTHER}),
    "RWKV7TimeMix": LayerRow(
        {
            **dict.fromkeys(("w1", "w2", "a1", "a2", "g1", "g2", "v1", "v2"), KERNEL),
            **dict.fromkeys(("x_r", "x_w", "x_k", "x_v", "x_a", "x_g", "k_k", "k_a", "r_k"), OTHER),
            **dict.fromkeys(("w0", "a0", "v0"), BIAS),
        },
        counted=False,
    ),
    "SigLIPHead": LayerRow({"logit_scale": OTHER, "logit_bias": OTHER}, counted=False),
    "SigLIPMultiHeadAttentionPooling": LayerRow({"probe": OTHER}),
    "VideoPrismAttenTokenPoolingLayer": LayerRow({"pooling_attention_query": OTHER}),
    "VideoPrismPerDimScale": LayerRow({"per_dim_scale": OTHER}),
    "WindowAttention": LayerRow({"relative_position_bias_table": BIAS}, counted=False),
    "XLNetEncoder": LayerRow(
        {
            **dict.fromkeys(("content_attention_bias", "positional_attention_bias", "segment_attention_bias"), BIAS),
            "segment_encoding": OTHER,
        }
    ),
    **_each(
        "Attention2d Conv2DMultiHeadAttention ConvNormAct DFineIntegral DFineMultiheadAttention "
        "DisentangledSelfAttention Gemma3VisionAttention Gemma3nAudioRelativePositionEmbedding "
        "Gemma3nAudioSSCPConvBlock Gemma3nTextAttention Gemma3nTextModel Gemma4AudioConformerLightConv1d "
        "Gemma4AudioSSCPConvBlock Gemma4VisionAttention MMDiTBlock MultiHeadAttentionWithDownsampling "
        "MultiHeadAttentionWithRelativePE MultiQueryAttention2d PaliGemmaVitAttention Qwen3_5VisionAttention "
        "SAM3Attention SAM3DotProductScoring SAM3MaskDecoder SAM3RoPEAttention SAMMaskDecoder "
        "SegFormerMultiheadAttention T5Gemma2Attention T5Gemma2MergedAttention T5GemmaAttention "
        "TwoStreamRelativeAttention VideoPrismAttention",
        LayerRow({}, counted=False),
    ),
}

ROWS: dict[str, LayerRow] = {**_NORMALIZATIONS, **_EMBEDDINGS, **_ATTENTIONS, **_HEADS_AND_EXPERTS, **_UNCOUNTED}
