"""Penalties on whole channels during training: group lasso and growing regularization."""

from __future__ import annotations

import contextlib
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.channels.channel_order import ALLOCATIONS, Order
from prunekit.anatomy.channels.channels import Channels, find_channels
from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.core.data.model_building import build_from_batch, waits_for_data
from prunekit.core.runtime import backend, jax_state, patching
from prunekit.core.runtime.optimizers import optimizers_for
from prunekit.core.runtime.snapshot import Snapshot
from prunekit.core.statistics.channel_importance import GroupImportance, entry_scores, reasons_to_stay
from prunekit.core.training import train_function
from prunekit.core.training.update_observer import updates_of
from prunekit.sparsity.arguments import kept_fraction, positive, whole
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.scores import get_criterion


class ChannelPenalty(keras.callbacks.Callback):
    """Multiplies the weights of each channel by a factor after every optimizer update.

    The weights of a channel are those that compute it: the columns of all kernels and biases that do, and its entries
    in the normalizations after them. So each weight entry belongs to one channel; only those of attention, whose
    kernels have an axis of heads and one of widths, belong to two.

    A callback of `fit`; in a loop of your own, `with penalty.applied(model, optimizer):` around the loop, before its
    `tf.function` runs for the first time.

    Args:
        include: Names, globs or `re:` patterns of layers that compute channels; empty = all.
        exclude: The same, of layers whose channels get no penalty.
    """

    def __init__(self, include: Sequence[str] | str = (), exclude: Sequence[str] | str = ()) -> None:
        super().__init__()
        self._include, self._exclude = include, exclude
        self._weights: ChannelWeights | None = None
        self._function: Any = None

    @abstractmethod
    def factors(self, weights: ChannelWeights, norms: Any, rate: Any, updates: Any) -> Any:
        """Returns the factor of each channel after one update; runs inside the compiled step.

        Args:
            weights: The weights of the channels.
            norms: Euclidean norm of the weights of each channel, float32 tensor of shape (channels,).
            rate: Learning rate of the update, scalar tensor; 0 if the optimizer only accumulated gradients.
            updates: Number of updates of the optimizer so far, integer scalar tensor.
        """

    def begin(self, weights: ChannelWeights, optimizers: Sequence[Any]) -> None:
        """Called before the first update, with the weights of the channels."""

    def snapshot(self) -> Snapshot:
        """Returns what a resumed training needs beside the weights."""
        return Snapshot({}, {})

    def resume(self, snapshot: Snapshot) -> None:
        """Restores what `snapshot` returned, before the resumed training begins."""

    def norms(self) -> dict[str, np.ndarray]:
        """Returns {name of a group: norm of the weights of each of its channels, shape (channels,)}.

        Raises:
            RuntimeError: No training has begun.
        """
        if self._weights is None:
            raise RuntimeError("`norms` exist once a training with this penalty has begun.")
        jax_state.sync_model_state(self._weights.model)
        found = ops.convert_to_numpy(self._weights.norms())
        return {name: found[places] for name, places in self._weights.groups.items()}

    @contextlib.contextmanager
    def applied(self, model: Any, optimizer: Any = None) -> Iterator[ChannelPenalty]:
        """Context manager in which each update of the optimizer is followed by the penalty.

        Args:
            model: A built Keras model.
            optimizer: Keras optimizer of the loop, or a list of optimizers; None uses those of the model.

        Raises:
            ValueError: The model has no channels that can be removed, or is not built.
            TypeError: `model` is not a Keras model, or `optimizer` is not an optimizer.
        """
        scope = self._scope(model, optimizer)
        with train_function.fresh_train_function(model), scope():
            yield self

    def _scope(self, model: Any, optimizer: Any = None) -> Callable[[], contextlib.AbstractContextManager[None]]:
        """Begins a training; returns what makes the context manager of its updates."""
        if self._weights is None or self._weights.model is not model:
            self._weights = ChannelWeights(model, self._include, self._exclude)
        optimizers = optimizers_for(model, optimizer)
        self.begin(self._weights, optimizers)
        around = functools.partial(self._penalized, self._weights)
        return lambda: patching.around_updates(optimizers, around)

    def _penalized(
        self, weights: ChannelWeights, optimizer: Any, update: Any, gradients: Sequence[Any], variables: Sequence[Any]
    ) -> Any:
        before = updates_of(optimizer)
        result = update(gradients)
        updates = updates_of(optimizer)
        rate = ops.cast(optimizer.learning_rate, "float32") * ops.cast(updates - before, "float32")
        weights.scale(self.factors(weights, weights.norms(), rate, updates), variables)
        return result

    # ---- in `fit` ----------------------------------------------------------------------------------------------------

    def on_train_begin(self, logs: Any = None) -> None:
        self._function = self._function if self._weights is not None and self._weights.model is self.model else None
        if not waits_for_data(self.model):
            self._prepare()

    def _prepare(self) -> None:
        scope = self._scope(self.model)
        # A large model takes most of a minute to trace, so a second `fit` uses the function of the first.
        if self._function is None or not self._function.fits(self.model):
            self._function = train_function.ScopedFunction(self.model, scope)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self._function is None:
            train_function.prepare_next_call(self.model, self._build)
        else:
            self._function.arm()

    def _build(self, batches: Any) -> Any:
        """Builds the model before its first update; returns the batches to train on."""
        batches = build_from_batch(self.model, batches)
        self._prepare()
        self._function.arm()
        return batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._function is not None:
            self._function.disarm()

    def on_train_end(self, logs: Any = None) -> None:
        if self._function is not None:
            self._function.disarm()


class GroupLasso(ChannelPenalty):
    """Group lasso on channels: a penalty of strength times the norm of each channel's weights, which makes some zero.

    The penalty is the sum over channels of strength * sqrt(n) * ||w||, with the n weights w of a channel. After each
    optimizer update with learning rate r, its proximal operator multiplies the weights of each channel by
    max(0, 1 - r * strength * sqrt(n) / ||w||): a channel whose norm is below r * strength * sqrt(n) becomes exactly
    zero. The step is apart from the gradient, as the weight decay of AdamW is, so that adaptive optimizers do not
    rescale it, and the loss that `fit` reports has no penalty in it.

    `pk.shrink(model, channels="nonzero")` removes the zero channels after the training, and `pk.shrink` the small ones.

    Args:
        strength: Strength of the penalty, above 0: the root mean square of a channel's weights shrinks by about
            strength times the learning rate at each update.
        include, exclude: As for `ChannelPenalty`.

    Raises:
        ValueError: `strength` is not positive.

    Source: group lasso: Yuan & Lin 2006; on channels of networks: Wen et al. 2016, arXiv:1608.03665, eq. 1 to 3; the
        proximal operator: Parikh & Boyd 2014, Proximal Algorithms, section 6.5.4.
    """

    def __init__(
        self, strength: float = 0.1, *, include: Sequence[str] | str = (), exclude: Sequence[str] | str = ()
    ) -> None:
        super().__init__(include, exclude)
        self.strength = float(positive("strength", strength))

    def factors(self, weights: ChannelWeights, norms: Any, rate: Any, updates: Any) -> Any:
        """Returns the factors of the proximal operator."""
        threshold = rate * ops.convert_to_tensor(self.strength * np.sqrt(weights.sizes), "float32")
        kept = ops.greater(norms, threshold)
        return ops.where(kept, 1.0 - threshold / ops.where(kept, norms, 1.0), 0.0)


class GrowingRegularization(ChannelPenalty):
    """Growing L2 regularization of the channels that will be removed.

    At the start of the training the channels of the smallest magnitude are selected. Their L2 penalty begins at
    `increase` and grows by `increase` every `frequency` updates up to `ceiling`, so that the other channels take over
    gradually before `pk.shrink` removes the small ones. After each update with learning rate r, the weights of a
    selected channel are divided by 1 + r * penalty, apart from the gradient, as the weight decay of AdamW is.

    Args:
        channels: Share of the channels that is left alone, in (0, 1): the `channels` of the later `pk.shrink`.
        increase: Increase of the penalty, above 0.
        frequency: Updates between two increases, at least 1.
        ceiling: Largest penalty, above 0.
        allocation: "uniform": each group loses the same share; "per_kind" or "global", as for `pk.shrink`.
        include, exclude: As for `ChannelPenalty`.

    Attributes:
        selected: {name of a group: indices of its selected channels}.

    Raises:
        ValueError: A number is out of its range; the allocation is unknown.

    Source: Wang et al. 2021, arXiv:2012.09243, algorithm 1 (GReg-1).
    """

    def __init__(
        self,
        channels: float = 0.5,
        *,
        increase: float = 1e-4,
        frequency: int = 10,
        ceiling: float = 1.0,
        allocation: str = "uniform",
        include: Sequence[str] | str = (),
        exclude: Sequence[str] | str = (),
    ) -> None:
        super().__init__(include, exclude)
        self.channels = kept_fraction("channels", channels)
        self.increase, self.ceiling = float(positive("increase", increase)), float(positive("ceiling", ceiling))
        self.frequency = whole("frequency", frequency, 1)
        if allocation not in ALLOCATIONS:
            raise ValueError(f"`allocation` is one of {', '.join(ALLOCATIONS)}. Received: {allocation!r}.")
        self.allocation = allocation
        self.selected: dict[str, np.ndarray] = {}
        self._begun = 0

    def begin(self, weights: ChannelWeights, optimizers: Sequence[Any]) -> None:
        """Selects the channels, once for a model; a second `fit` goes on with them."""
        if self.selected.keys() == weights.groups.keys():
            return
        found, free = weights.channels, weights.free
        scores = GroupImportance().of(found, entry_scores(found, get_criterion("magnitude")))
        order = Order([found.groups[i] for i in free], [scores[i] for i in free], self.allocation)
        gone = np.zeros(found.channel_of.size, bool)
        gone[order.removed(order.first(min(round((1 - self.channels) * order.total), order.length)))] = True
        self.selected = {found.groups[i].name: np.flatnonzero(gone[found.groups[i].channels]) for i in free}
        self._begun = min((int(array_of(one.iterations)) for one in optimizers), default=0)

    def snapshot(self) -> Snapshot:
        """Returns the selected channels, and the optimizer's updates before the selection."""
        arrays = {str(place): chosen for place, chosen in enumerate(self.selected.values())}
        return Snapshot({"groups": list(self.selected), "begun": self._begun}, arrays)

    def resume(self, snapshot: Snapshot) -> None:
        """Restores what `snapshot` returned, before the resumed training begins."""
        names = snapshot.values["groups"]
        self.selected = {name: np.array(snapshot.arrays[str(place)]) for place, name in enumerate(names)}
        self._begun = int(snapshot.values["begun"])

    def factors(self, weights: ChannelWeights, norms: Any, rate: Any, updates: Any) -> Any:
        """Returns 1 / (1 + rate * penalty) for the selected channels."""
        chosen = np.zeros(weights.sizes.size, "float32")
        for name, places in weights.groups.items():
            chosen[places[self.selected[name]]] = 1.0
        increases = 1 + (updates - self._begun - 1) // self.frequency
        penalty = ops.minimum(self.increase * ops.cast(increases, "float32"), self.ceiling)
        return 1.0 / (1.0 + rate * penalty * ops.convert_to_tensor(chosen))


class ChannelWeights:
    """The weights that compute each removable channel of a model.

    Args:
        model: A built Keras model.
        include, exclude: As for `ChannelPenalty`.

    Attributes:
        model: The model.
        channels: All channels of the model.
        free: Indices of the groups whose channels may be removed.
        groups: {name of a group: places of its channels in `sizes`}.
        sizes: Number of weight entries of each channel, shape (channels,).

    Raises:
        ValueError: No channel can be removed.
    """

    def __init__(self, model: Any, include: Sequence[str] | str = (), exclude: Sequence[str] | str = ()) -> None:
        if not model.trainable_variables:
            raise ValueError(
                f"A penalty acts on weights that are trained. Received: {model.name!r}, whose weights are all frozen "
                "(trainable=False)."
            )
        self.model, self.channels = model, find_channels(model)
        found = self.channels
        self.free = [i for i, why in enumerate(reasons_to_stay(found, include, exclude, training=True)) if not why]
        places = np.full(found.channel_of.size, -1)
        self.groups: dict[str, np.ndarray] = {}
        total = 0
        for i in self.free:
            group = found.groups[i]
            self.groups[group.name] = np.arange(total, total + group.channels.size)
            places[group.channels] = self.groups[group.name]
            total += group.channels.size
        self._rows = [(v, axis, np.where(at < 0, total, at)) for v, axis, at in _producing(found, self.free, places)]
        sizes = np.zeros(total + 1)
        for variable, axis, at in self._rows:
            np.add.at(sizes, at, np.prod(variable.shape) / variable.shape[axis])
        self.sizes = sizes[:-1]

    def norms(self) -> Any:
        """Returns the Euclidean norm of the weights of each channel, float32 tensor of shape (channels,)."""
        squares = []
        for variable, axis, _ in self._rows:
            value = ops.cast(backend.value_now(variable), "float32")
            squares.append(ops.sum(ops.square(value), [other for other in range(len(value.shape)) if other != axis]))
        index = np.concatenate([at for *_, at in self._rows]).astype("int32")
        sums = ops.segment_sum(ops.concatenate(squares), ops.convert_to_tensor(index), self.sizes.size + 1)
        return ops.sqrt(sums[:-1])

    def scale(self, factors: Any, variables: Sequence[Any]) -> None:
        """Multiplies the weights of each channel by its factor.

        Args:
            factors: Tensor of shape (channels,).
            variables: The variables that may be written; others stay.
        """
        written = {id(backend.native(one)) for one in variables}
        padded = ops.concatenate([factors, ops.ones((1,), "float32")])
        for variable, axis, at in self._rows:
            if id(backend.native(variable)) in written:
                shape = [1] * len(variable.shape)
                shape[axis] = -1
                factor = ops.reshape(ops.take(padded, ops.convert_to_tensor(at.astype("int32"))), shape)
                variable.assign(backend.value_now(variable) * ops.cast(factor, variable.dtype))


def _producing(found: Channels, free: Sequence[int], places: np.ndarray) -> Iterator[tuple[Any, int, np.ndarray]]:
    """Yields (variable, axis, place of each index) for the trainable weights that compute free channels."""
    trained = {id(variable) for variable in found.model.trainable_variables}
    weights = {one.name: one for one in weights_in(found.model) if id(one.variable) in trained}
    met: dict[tuple[str, int], np.ndarray] = {}
    for i in free:
        for member in found.groups[i].members:
            weight = weights.get(member.weight)
            if weight is not None and member.channels.ndim == 1 and _computes(weight.spec, member.axis):
                met[member.weight, member.axis] = places[member.channels]
    for (name, axis), at in met.items():
        yield weights[name].variable, axis, at


def _computes(spec: Any, axis: int) -> bool:
    """Returns True if an axis of a weight numbers outputs; biases and normalizations have no other axes."""
    return axis in spec.out_axes or spec.role in ("bias", "normalization")
