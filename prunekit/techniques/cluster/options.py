"""Options of clustering after training, shared by `pk.cluster`, the recipe step and the command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, TypedDict, get_args

from prunekit.sparsity.arguments import whole
from prunekit.sparsity.shorthands import (
    Assignment,
    CentroidGradients,
    Centroids,
    Clustering,
    Granularity,
    Misfits,
)
from prunekit.suggestions import did_you_mean

METHODS = get_args(Clustering)
GRANULARITIES = get_args(Granularity)
# Clusters of all weights, or by patterns.
Clusters = int | Mapping[str, int | Literal["float"]]
FLOAT = "float"
# First and last temperature of a soft assignment, and the share of a training after which it is over.
_TEMPERATURES, _COLD_AT = (0.5, 0.02), 0.8
# Values that indices of 8 bits tell apart.
_VALUES = 256


class ClusterTrainingKeywords(TypedDict, total=False):
    """Types of the keyword options of `pk.ClusterCallback`; see `ClusterOptions`."""

    granularity: Granularity | int
    centroids: Centroids
    include: Sequence[str] | str
    exclude: Sequence[str] | str
    misfits: Misfits


class ClusterKeywords(ClusterTrainingKeywords, total=False):
    """Types of the keyword options of `pk.cluster`; see `ClusterOptions`."""

    method: Clustering
    correct_biases: bool | None


@dataclass(frozen=True)
class ClusterOptions:
    """How many values weights may have, and how these are chosen.

    Args:
        clusters: Largest number of different values in a codebook, 2 to 256; a weight's zeros are one of them. Or
            clusters by patterns of layers and weights, {"head": 64, "block_*": "float"}: "float" leaves them as they
            are, and 16 hold for the others.
        granularity: Which entries of a weight share a codebook: "tensor": all; "channel": those of an output channel; a
            number: those of so many neighbouring channels.
        method: "kmeans": the nearest centroids of k-means, on data counted by the energy of each weight's input.
            "gptq": one input after another, the weights of the others make up for the error, and centroids are fitted
            to the layer's outputs; reads data. "auto": "gptq" with data or synthetic inputs, else "kmeans".
        centroids: How k-means begins: "auto": at the optimum for runs of the values; "quantile": at quantiles;
            "optimum": it is the optimum for all values, by dynamic programming, which takes seconds for a million.
        correct_biases: True corrects biases by the mean error of each output; None: wherever data are read.
        include: Names, globs or `re:` patterns of layers and weights to cluster; empty = all kernels and tables.
        exclude: Patterns of those that stay as they are; overrides `include`.
        misfits: Weights with too few entries for their codebooks: "skip" leaves them as they are, and the report names
            them; "error" refuses the model.

    Raises:
        ValueError: An option has a value that is not listed here.
        TypeError: An option is of another type.
    """

    clusters: Clusters = 16
    granularity: str | int = "tensor"
    method: str = "auto"
    centroids: str = "auto"
    correct_biases: bool | None = None
    include: Sequence[str] | str = ()
    exclude: Sequence[str] | str = ()
    misfits: str = "skip"

    def __post_init__(self) -> None:
        if isinstance(self.clusters, Mapping):
            if not self.clusters or not all(isinstance(pattern, str) for pattern in self.clusters):
                raise ValueError(
                    "`clusters` by patterns names layers or weights with their clusters, {'head': 64}. Received: "
                    f"{self.clusters!r}."
                )
            for pattern, number in self.clusters.items():
                if number != FLOAT:
                    _check_clusters(number, f"`clusters[{pattern!r}]`", ', or "float"')
            object.__setattr__(self, "clusters", dict(self.clusters))
        else:
            _check_clusters(self.clusters, "`clusters`", ", or clusters by patterns, {'head': 64, 'block_*': 'float'}")
            object.__setattr__(self, "clusters", int(self.clusters))
        if isinstance(self.granularity, Integral) and not isinstance(self.granularity, bool):
            object.__setattr__(self, "granularity", whole("granularity", self.granularity, 1))
        elif self.granularity not in GRANULARITIES:
            raise ValueError(
                '`granularity` is "tensor", "channel" or a number of channels. Received: '
                f"{self.granularity!r}.{did_you_mean(str(self.granularity), GRANULARITIES)}"
            )
        _check_words(self, method=METHODS, centroids=get_args(Centroids), misfits=get_args(Misfits))
        if not (self.correct_biases is None or isinstance(self.correct_biases, bool)):
            raise ValueError(f"`correct_biases` is True, False or None. Received: {self.correct_biases!r}.")

    @property
    def patterns(self) -> Mapping[str, int | None]:
        """Clusters by patterns of layers and weights, None = as they are; other weights have `default_clusters`."""
        given = self.clusters if isinstance(self.clusters, Mapping) else {}
        return {pattern: None if number == FLOAT else int(number) for pattern, number in given.items()}

    @property
    def default_clusters(self) -> int:
        """Clusters of the weights that no pattern matches."""
        return 16 if isinstance(self.clusters, Mapping) else self.clusters

    @property
    def run(self) -> int | None:
        """Number of channels that share a codebook; None = all."""
        if isinstance(self.granularity, int):
            return self.granularity
        return 1 if self.granularity == "channel" else None

    @property
    def may_stand_in(self) -> bool:
        """True if synthetic inputs are read where no data were given."""
        return self.method == "auto" and self.correct_biases is not False

    def with_data(self, data: Any) -> tuple[str, bool]:
        """Returns (method, whether biases are corrected) for these calibration data.

        Raises:
            ValueError: There are no data, and an option needs some.
        """
        method = ("kmeans" if data is None else "gptq") if self.method == "auto" else self.method
        corrects = data is not None if self.correct_biases is None else self.correct_biases
        if data is None and (method == "gptq" or corrects):
            needs = 'method="gptq"' if method == "gptq" else "correct_biases=True"
            raise ValueError(
                f"Clustering with {needs} reads calibration data. Received: data=None. Pass some hundred examples of "
                "the training data as `data`."
            )
        return method, corrects


@dataclass(frozen=True)
class ClusterTrainingOptions:
    """How weights and centroids are trained.

    Args:
        assignment: "nearest": each entry has the value of its nearest centroid. "soft": a value between its nearest
            two, and the nearer one the more it counts the longer the training lasts; "nearest" in its last fifth.
        gradients: What a centroid receives of the gradients of its entries: "average", as far as these move
            themselves; or their "sum", as in tensorflow-model-optimization.

    Raises:
        ValueError: An option has a value that is not listed here.
    """

    assignment: Assignment = "nearest"
    gradients: CentroidGradients = "average"

    def __post_init__(self) -> None:
        _check_words(self, assignment=get_args(Assignment), gradients=get_args(CentroidGradients))

    def temperature_at(self, share: float) -> float:
        """Returns the temperature when a share of the training is done, 0 to 1; 0 = each entry has its nearest."""
        if self.assignment == "nearest" or share >= _COLD_AT:
            return 0.0
        first, last = _TEMPERATURES
        return float(first * (last / first) ** (share / _COLD_AT))


def _check_words(options: Any, **known: tuple[str, ...]) -> None:
    for name, words in known.items():
        if getattr(options, name) not in words:
            raise ValueError(
                f"`{name}` is one of {', '.join(words)}. Received: {getattr(options, name)!r}."
                f"{did_you_mean(str(getattr(options, name)), words)}"
            )


def _check_clusters(number: Any, name: str, others: str) -> None:
    known = isinstance(number, Integral) and not isinstance(number, bool)
    if not known or not 2 <= number <= _VALUES:
        raise (ValueError if known else TypeError)(
            f"{name} is the number of values of a codebook, an int from 2 to {_VALUES}{others}. Received: {number!r}."
        )
