"""Feed-forward and convolutional architectures."""

import keras
from architecture_parts import architecture, chain, classify, conv_bn, stack
from keras import layers as L

# Feed-forward stacks.


@architecture
def mlp():
    """Three hidden Dense layers."""
    return stack(
        (11,),
        L.Dense(16, activation="relu", name="first"),
        L.Dense(13, activation="tanh", name="second"),
        L.Dense(9, name="third"),
        L.ReLU(),
        L.Dropout(0.2),
        L.Dense(5, name="head"),
    )


@architecture
def fashion_cnn():
    """Two convolutions with pooling, then Flatten and Dense."""
    return stack(
        (14, 12, 1),
        L.Conv2D(8, 3, activation="relu", name="first"),
        L.MaxPooling2D(),
        L.Conv2D(13, 3, activation="relu", name="second"),
        L.MaxPooling2D(),
        L.Flatten(),
        L.Dense(18, activation="relu", name="dense"),
        L.Dense(10, name="head"),
    )


@architecture
def fashion_cnn_channels_free():
    """Batch normalization after Flatten: one channel of the convolution is many of its entries."""
    return stack(
        (8, 7, 2),
        L.Conv2D(9, 3, strides=2, activation="relu", name="conv"),
        L.Flatten(),
        L.BatchNormalization(name="bn"),
        L.Dense(14, activation="relu", name="dense"),
        L.Dense(5, name="head"),
    )


@architecture
def conv1d():
    """Conv1D layers, one causal and one dilated."""
    return stack(
        (18, 4),
        L.Conv1D(9, 3, padding="causal", use_bias=False, name="first"),
        L.BatchNormalization(name="first_bn"),
        L.ReLU(),
        L.MaxPooling1D(),
        L.Conv1D(13, 3, dilation_rate=2, activation="relu", name="second"),
        L.GlobalMaxPooling1D(),
        L.Dense(5, name="head"),
    )


@architecture
def conv3d():
    """Conv3D layers."""
    return stack(
        (8, 7, 6, 2),
        L.Conv3D(8, 3, padding="same", name="first"),
        L.BatchNormalization(name="first_bn"),
        L.ReLU(),
        L.AveragePooling3D(2),
        L.Conv3D(11, 2, activation="relu", name="second"),
        L.GlobalAveragePooling3D(),
        L.Dense(5, name="head"),
    )


@architecture
def transposed():
    """A decoder: Dense reshaped to an image, then Conv2DTranspose layers up to an image."""
    return stack(
        (12,),
        L.Dense(4 * 5 * 9, activation="relu", name="dense"),
        L.Reshape((4, 5, 9)),
        L.Conv2DTranspose(14, 3, strides=2, padding="same", use_bias=False, name="first"),
        L.BatchNormalization(name="first_bn"),
        L.LeakyReLU(),
        L.Conv2DTranspose(10, 4, strides=2, padding="same", activation="relu", name="second"),
        L.Conv2DTranspose(3, 3, padding="same", activation="sigmoid", name="head"),
    )


# Convolutional networks.


@architecture
def grouped():
    """Convolutions in four groups, with batch normalization and a residual connection."""
    inputs = keras.Input((10, 9, 3))
    stem = conv_bn(inputs, 12, 3, "stem")
    x = conv_bn(stem, 16, 3, "widen", groups=4)
    x = conv_bn(x, 12, 3, "narrow", activation=None, groups=4)
    x = L.ReLU()(L.Add()([stem, x]))
    x = conv_bn(x, 20, 3, "last", groups=4)
    return keras.Model(inputs, classify(x))


def basic_block(x, filters, inner, name, strides=1):
    y = conv_bn(x, inner, 3, f"{name}_first", strides=strides)
    y = conv_bn(y, filters, 3, f"{name}_second", activation=None)
    if strides > 1:
        x = conv_bn(x, filters, 1, f"{name}_shortcut", activation=None, strides=strides)
    return L.ReLU()(L.Add(name=f"{name}_add")([x, y]))


@architecture
def resnet20():
    """ResNet-20 for small images: three stages of three blocks, with projections where the width changes."""
    inputs = keras.Input((12, 12, 3))
    x = conv_bn(inputs, 8, 3, "stem")
    for stage, filters in enumerate((8, 16, 32)):
        for block in range(3):
            strides = 2 if stage and not block else 1
            x = basic_block(x, filters, filters + 1 + block, f"stage{stage}_block{block}", strides)
    return keras.Model(inputs, classify(x, 10))


def bottleneck_block(x, filters, inner, name, strides=1, project=False):
    y = conv_bn(x, inner, 1, f"{name}_reduce", strides=strides)
    y = conv_bn(y, inner + 3, 3, f"{name}_spatial")
    y = conv_bn(y, filters, 1, f"{name}_expand", activation=None)
    if project:
        x = conv_bn(x, filters, 1, f"{name}_shortcut", activation=None, strides=strides)
    return L.ReLU()(L.Add(name=f"{name}_add")([x, y]))


@architecture
def bottleneck():
    """ResNet-50's bottleneck blocks: two stages of two."""
    inputs = keras.Input((16, 16, 3))
    x = conv_bn(inputs, 10, 7, "stem", strides=2)
    x = L.MaxPooling2D(3, strides=1)(L.ZeroPadding2D(1)(x))
    x = bottleneck_block(x, 18, 8, "stage0_block0", project=True)
    x = bottleneck_block(x, 18, 9, "stage0_block1")
    x = bottleneck_block(x, 23, 13, "stage1_block0", strides=2, project=True)
    x = bottleneck_block(x, 23, 14, "stage1_block1")
    return keras.Model(inputs, classify(x))


def inverted_residual(x, filters, expanded, name, strides=1):
    y = x
    if expanded is not None:
        y = conv_bn(y, expanded, 1, f"{name}_expand", activation=None)
        y = L.ReLU(6.0)(y)
    if strides > 1:
        y = L.ZeroPadding2D(((0, 1), (0, 1)), name=f"{name}_pad")(y)
    padding = "valid" if strides > 1 else "same"
    y = L.DepthwiseConv2D(3, strides, padding, use_bias=False, name=f"{name}_depthwise")(y)
    y = L.BatchNormalization(name=f"{name}_depthwise_bn")(y)
    y = conv_bn(L.ReLU(6.0)(y), filters, 1, f"{name}_project", activation=None)
    return L.Add(name=f"{name}_add")([x, y]) if x.shape == y.shape else y


@architecture
def mobilenetv2():
    """MobileNetV2: inverted residuals with linear bottlenecks."""
    inputs = keras.Input((16, 16, 3))
    x = L.ReLU(6.0)(conv_bn(inputs, 10, 3, "stem", activation=None, strides=2))
    x = inverted_residual(x, 8, None, "block0")
    x = inverted_residual(x, 12, 22, "block1", strides=2)
    x = inverted_residual(x, 12, 18, "block2")
    x = inverted_residual(x, 15, 20, "block3")
    x = L.ReLU(6.0)(conv_bn(x, 24, 1, "last", activation=None))
    return keras.Model(inputs, classify(x))


@architecture
def separable():
    """Separable and depthwise convolutions of images and of sequences, each with a depth multiplier of 2."""
    image, sequence = keras.Input((10, 9, 3)), keras.Input((12, 4))
    x = chain(
        image,
        L.SeparableConv2D(10, 3, depth_multiplier=2, activation="relu", name="separable_2d"),
        L.DepthwiseConv2D(3, depth_multiplier=2, name="depthwise_2d"),
        L.BatchNormalization(name="depthwise_2d_bn"),
        L.ReLU(),
        L.Conv2D(14, 1, activation="relu", name="pointwise_2d"),
        L.GlobalAveragePooling2D(),
    )
    y = chain(
        sequence,
        L.SeparableConv1D(9, 3, depth_multiplier=2, activation="relu", name="separable_1d"),
        L.DepthwiseConv1D(3, depth_multiplier=2, activation="relu", name="depthwise_1d"),
        L.GlobalAveragePooling1D(),
    )
    return keras.Model([image, sequence], L.Dense(5, name="head")(L.Concatenate()([x, y])))


def dense_layer(x, inner, growth, name):
    y = L.ReLU()(L.BatchNormalization(name=f"{name}_bn")(x))
    y = conv_bn(y, inner, 1, f"{name}_inner")
    y = L.Conv2D(growth, 3, padding="same", use_bias=False, name=f"{name}_growth")(y)
    return L.Concatenate(name=f"{name}_concat")([x, y])


@architecture
def densenet():
    """DenseNet: a block of three layers, a transition, and a block of two."""
    inputs = keras.Input((12, 12, 3))
    x = L.Conv2D(10, 3, padding="same", use_bias=False, name="stem")(inputs)
    for layer, (inner, growth) in enumerate([(12, 8), (14, 9), (16, 11)]):
        x = dense_layer(x, inner, growth, f"block0_layer{layer}")
    x = L.ReLU()(L.BatchNormalization(name="transition_bn")(x))
    x = L.AveragePooling2D(2)(L.Conv2D(19, 1, use_bias=False, name="transition")(x))
    for layer, (inner, growth) in enumerate([(15, 17), (13, 18)]):
        x = dense_layer(x, inner, growth, f"block1_layer{layer}")
    x = L.ReLU()(L.BatchNormalization(name="last_bn")(x))
    return keras.Model(inputs, classify(x))


@architecture
def unet():
    """U-Net: an encoder, and a decoder that concatenates the encoder's features; its output is an image."""
    inputs = keras.Input((16, 12, 3))
    high = conv_bn(conv_bn(inputs, 8, 3, "high_first"), 9, 3, "high_second")
    middle = conv_bn(L.MaxPooling2D()(high), 12, 3, "middle")
    x = conv_bn(L.MaxPooling2D()(middle), 18, 3, "low")
    x = conv_bn(L.UpSampling2D()(x), 14, 2, "up_middle")
    x = conv_bn(L.Concatenate()([middle, x]), 13, 3, "merge_middle")
    x = L.Conv2DTranspose(10, 2, strides=2, activation="relu", name="up_high")(x)
    x = conv_bn(L.Concatenate()([x, high]), 11, 3, "merge_high")
    return keras.Model(inputs, L.Conv2D(3, 1, activation="sigmoid", name="head")(x))


def inception_block(x, widths, name):
    one, three_inner, three, five_inner, five, pooled = widths
    branches = [
        conv_bn(x, one, 1, f"{name}_one"),
        conv_bn(conv_bn(x, three_inner, 1, f"{name}_three_inner"), three, 3, f"{name}_three"),
        conv_bn(conv_bn(x, five_inner, 1, f"{name}_five_inner"), five, 5, f"{name}_five"),
        conv_bn(L.AveragePooling2D(3, strides=1, padding="same")(x), pooled, 1, f"{name}_pooled"),
    ]
    return L.Concatenate(name=f"{name}_concat")(branches)


@architecture
def inception():
    """Two Inception blocks of four branches."""
    inputs = keras.Input((10, 10, 3))
    x = L.MaxPooling2D()(conv_bn(inputs, 11, 3, "stem"))
    x = inception_block(x, (8, 12, 13, 9, 10, 14), "block0")
    x = inception_block(x, (15, 17, 18, 16, 19, 20), "block1")
    return keras.Model(inputs, classify(x))


def squeeze_and_excite(x, pooled, reduced, name):
    """The features scaled by a gate, which two 1x1 convolutions compute from their 1x1 mean."""
    gate = L.Conv2D(reduced, 1, activation="swish", name=f"{name}_squeeze")(pooled)
    gate = L.Conv2D(x.shape[-1], 1, activation="sigmoid", name=f"{name}_excite")(gate)
    return L.Multiply(name=f"{name}_scale")([x, gate])


def mbconv(x, filters, expanded, reduced, name, strides=1):
    y = conv_bn(x, expanded, 1, f"{name}_expand", "swish")
    y = L.DepthwiseConv2D(3, strides, "same", use_bias=False, name=f"{name}_depthwise")(y)
    y = L.Activation("swish")(L.BatchNormalization(name=f"{name}_depthwise_bn")(y))
    pooled = L.Reshape((1, 1, expanded))(L.GlobalAveragePooling2D()(y))
    y = squeeze_and_excite(y, pooled, reduced, name)
    y = conv_bn(y, filters, 1, f"{name}_project", activation=None)
    return with_drop_connect(x, y)


def fused_mbconv(x, filters, expanded, name, strides=1):
    y = conv_bn(x, expanded, 3, f"{name}_expand", "swish", strides=strides)
    y = conv_bn(y, filters, 1, f"{name}_project", activation=None)
    return with_drop_connect(x, y)


def with_drop_connect(x, y):
    return L.Add()([L.Dropout(0.2, noise_shape=(None, 1, 1, 1))(y), x]) if x.shape == y.shape else y


@architecture
def efficientnet_v2():
    """EfficientNetV2: fused MBConv blocks, then MBConv blocks with squeeze-and-excitation."""
    inputs = keras.Input((16, 16, 3))
    x = conv_bn(inputs, 9, 3, "stem", "swish", strides=2)
    x = fused_mbconv(x, 9, 14, "fused0")
    x = fused_mbconv(x, 12, 17, "fused1", strides=2)
    x = mbconv(x, 15, 20, 8, "block0", strides=2)
    x = mbconv(x, 15, 22, 10, "block1")
    return keras.Model(inputs, classify(conv_bn(x, 24, 1, "last", "swish")))


@architecture
def squeeze_keepdims():
    """Squeeze-and-excitation whose pooling keeps the spatial axes."""
    inputs = keras.Input((10, 9, 3))
    x = conv_bn(inputs, 14, 3, "stem")
    x = squeeze_and_excite(x, L.GlobalAveragePooling2D(keepdims=True)(x), 8, "gate")
    return keras.Model(inputs, classify(conv_bn(x, 11, 3, "last")))
