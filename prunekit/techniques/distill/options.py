"""Options of distillation, shared by `pk.DistillationCallback`, `pk.distilling` and the recipe steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypedDict, get_args

from prunekit.sparsity.arguments import MEMORY, number_of_bytes, positive
from prunekit.sparsity.shorthands import DistillationLoss
from prunekit.suggestions import did_you_mean

LOSSES = get_args(DistillationLoss)


class DistillationKeywords(TypedDict, total=False):
    """Types of the keyword options of `pk.DistillationCallback` and `pk.distilling`; see `DistillationOptions`."""

    loss: DistillationLoss
    weight: float
    temperature: float
    features: Mapping[str, str] | Sequence[str] | str
    feature_weight: float
    cache: bool
    memory: float | str


@dataclass(frozen=True)
class DistillationOptions:
    """What a student learns from its teacher, and how much.

    The loss of a training step is (1 - weight) * compiled loss + weight * distillation loss + feature_weight * feature
    loss + regularization losses.

    Args:
        loss: For outputs that tell classes apart: "kl": Kullback-Leibler divergence of softened probabilities; "dist":
            correlations within an example and within a class; "dkd": divergence in the true class and among the other
            classes apart, reads the labels; "mse": mean squared error of the logits. "auto": "dist"; for two classes
            "kl". Yes-no outputs (sigmoid) have "kl" or "mse"; all others the mean squared error of their values.
        weight: Share of the distillation loss, from 0 to 1; at 1 the labels do not count.
        temperature: Divisor of the logits in "kl", "dist" and "dkd", above 0.
        features: Names of layers whose outputs the student learns, too; or {layer of the student: layer of the
            teacher}. Maps are compared after a division by their root mean square. Where the numbers of channels
            differ, a trained 1x1 projection lies between them, which is dropped at the end.
        feature_weight: Factor of the mean error of these layers, above 0.
        cache: Whether the teacher's outputs are kept from the first epoch on, where the same examples come back. They
            are found by a fingerprint of 128 bits of the inputs, so augmented examples are computed anew.
        memory: Largest number of bytes of the kept outputs.

    Raises:
        ValueError: An option has a value that is not listed here.
        TypeError: An option is of another type.
    """

    loss: DistillationLoss = "auto"
    weight: float = 0.5
    temperature: float = 4.0
    features: Mapping[str, str] | Sequence[str] | str = ()
    feature_weight: float = 1.0
    cache: bool = True
    memory: float | str = MEMORY

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ValueError(
                f"`loss` is one of {', '.join(LOSSES)}. Received: {self.loss!r}.{did_you_mean(str(self.loss), LOSSES)}"
            )
        self._set(
            weight=_share(self.weight),
            temperature=float(positive("temperature", self.temperature)),
            features=_pairs(self.features),
            feature_weight=float(positive("feature_weight", self.feature_weight)),
            memory=number_of_bytes("memory", self.memory),
        )
        if not isinstance(self.cache, bool):
            raise TypeError(f"`cache` is True or False. Received: {self.cache!r}.")

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def layers(self) -> Mapping[str, str]:
        """{layer of the student: layer of the teacher}."""
        return self.features  # type: ignore[return-value]


def _share(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"`weight` is a number from 0 to 1. Received: {value!r}.")
    if not 0.0 <= value <= 1.0:
        hint = f" For {value:g} %, pass {value / 100:g}." if 1.0 < value <= 100.0 else ""
        raise ValueError(f"`weight` is the share of the distillation loss, from 0 to 1. Received: {value!r}.{hint}")
    return float(value)


def _pairs(features: Any) -> Mapping[str, str]:
    names = [features] if isinstance(features, str) else features
    found = names if isinstance(names, Mapping) else {name: name for name in _listed(names)}
    wrong = next((one for pair in found.items() for one in pair if not isinstance(one, str) or not one), None)
    if wrong is not None:
        raise TypeError(f"`features` names layers. Received: {wrong!r}. Pass their `name`.")
    return MappingProxyType(dict(found))


def _listed(names: Any) -> list[Any]:
    if not isinstance(names, Sequence):
        raise TypeError(
            "`features` is a list of names of layers, or {layer of the student: layer of the teacher}. Received: "
            f"{names!r}."
        )
    return list(names)
