"""What a model costs without some channels, calculated from the axes of its weights."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channel_axes import resolved
from prunekit.anatomy.channels.channels import Channels
from prunekit.anatomy.graph.tracing import forward_trace


class SizeModel:
    """Parameters and multiply-accumulates of a model as functions of the removed channels.

    Args:
        channels: The channels of the model.
        inputs: Example inputs of the model, or their shapes, for models without declared inputs.

    Attributes:
        parameters: Number of parameters of the whole model.
    """

    def __init__(self, channels: Channels, inputs: Any = None):
        self._channels = channels
        self._inputs = inputs
        self.parameters = sum(math.prod(one.shape) for one in channels.model.weights)
        self._sizes = channels.sizes(np.ones(channels.channel_of.size, bool))
        self._uses: dict[int, int] | None = None
        self._products: dict[int, int] = {}

    def parameters_without(self, removed: np.ndarray) -> int:
        """Returns the number of parameters without some channels."""
        sizes = self._channels.sizes(self._channels.kept_numbers(removed))
        return self.parameters - sum(self._sizes[key] - size for key, size in sizes.items())

    def macs_without(self, removed: np.ndarray) -> int:
        """Returns the multiply-accumulates of one example without some channels.

        Raises:
            ValueError: The multiply-accumulates of a layer are not known.
        """
        uses = self._traced()
        kept = self._channels.kept_numbers(removed)
        sizes = self._channels.sizes(kept)
        weights = {id(one): math.prod(one.shape) for one in self._channels.model.weights}
        total = sum(count * sizes.get(key, weights.get(key, 0)) for key, count in uses.items())
        return total + sum(round(macs * self._share(key, kept)) for key, macs in self._products.items())

    def macs(self, removed: np.ndarray) -> int | None:
        """Returns the multiply-accumulates as `macs_without`; None where those of a layer are not known."""
        try:
            return self.macs_without(removed)
        except ValueError:
            return None

    def _traced(self) -> dict[int, int]:
        if self._uses is None:
            trace = forward_trace(self._channels.model, 1, self._inputs)
            if trace.unknown:
                raise ValueError(
                    "A target in multiply-accumulates needs those of each layer. Received: "
                    f"{'; '.join(dict.fromkeys(trace.unknown.values()))}. Use `parameters` or `channels`."
                )
            self._uses, self._products = trace.uses, trace.products
        return self._uses

    def _share(self, layer: int, kept: np.ndarray) -> float:
        """Returns the share of an attention layer's products that is left: heads times widths."""
        asked = self._channels.links.resized.get(layer, {})
        now, before = resolved(asked, kept), resolved(asked, np.ones_like(kept))
        heads = "num_heads" if "num_heads" in asked else "num_query_heads"
        if heads not in asked:
            return 1.0

        def products(sizes: dict[str, int]) -> int:
            widths = [sizes[name] for name in ("key_dim", "value_dim", "head_dim") if name in sizes]
            return int(sizes[heads] * sum(widths))

        return products(now) / products(before)
