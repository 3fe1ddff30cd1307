"""Description of one weight of a layer type: its role, its axes, and whether it is pruned."""

from __future__ import annotations

from dataclasses import dataclass, replace

from prunekit.anatomy.layers.counting import Shape

ROLES = (
    "kernel",
    "recurrent_kernel",
    "embedding",
    "depthwise_kernel",
    "bias",
    "normalization",
    "other",
    "unknown",
)


@dataclass(frozen=True)
class WeightSpec:
    """The role, the axes and the prunability of one weight of a layer type.

    Attributes:
        role: One of `ROLES`; "unknown" for a weight without a row in the table.
        in_axes: Reduction (input) axes; negative axes count from the end.
        out_axes: Axes that number the output units. All other axes are spatial or batch axes.
        prunable: Whether the weight is pruned by default.
        refused: The reason why the weight can never be pruned; "" if `include` can select the weight by name.
        parallel_axes: Axes without a sum, because they number both input and output units: the channels of a depthwise
            kernel, the rows of an embedding. An axis in `in_axes` or `out_axes` may also be a parallel axis.
        groups: Number of groups of output units (grouped convolution); each group has separate input units.
    """

    role: str = "kernel"
    in_axes: tuple[int, ...] = (-2,)
    out_axes: tuple[int, ...] = (-1,)
    prunable: bool = True
    refused: str = ""
    parallel_axes: tuple[int, ...] = ()
    groups: int = 1

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"A weight's role is one of {', '.join(ROLES)}. Received: role={self.role!r}.")
        axes = (*self.in_axes, *self.out_axes)
        if len(set(axes)) != len(axes):
            raise ValueError(
                "Input and output axes must all be different. "
                f"Received: in_axes={self.in_axes}, out_axes={self.out_axes}."
            )
        if self.groups < 1:
            raise ValueError(f"A weight has at least one group of output units. Received: groups={self.groups}.")
        if self.prunable and self.refused:
            raise ValueError(f"A weight that is refused cannot be prunable. Received: refused={self.refused!r}.")

    def at(self, shape: Shape, where: str) -> WeightSpec:
        """A copy with axes counted from the start of `shape`; `where` names the weight in errors."""
        rank = len(shape)
        axes = (*self.in_axes, *self.out_axes, *self.parallel_axes)
        wrong = [axis for axis in axes if not -rank <= axis < rank]
        if wrong:
            raise ValueError(
                f"The axes registered for {where} do not exist in it. Received: axes {wrong} for shape {shape}. "
                "Correct the WeightSpec given to register_layer."
            )
        in_axes = tuple(axis % rank for axis in self.in_axes)
        out_axes = tuple(axis % rank for axis in self.out_axes)
        if set(in_axes) & set(out_axes):
            raise ValueError(
                f"An axis of {where} is registered both as input and as output. Received: in_axes={self.in_axes}, "
                f"out_axes={self.out_axes} for shape {shape}. Correct the WeightSpec given to register_layer."
            )
        parallel_axes = tuple(axis % rank for axis in self.parallel_axes)
        if self.groups > 1 and (not out_axes or shape[out_axes[-1]] % self.groups):
            raise ValueError(
                f"The output units of {where} do not fall into {self.groups} equal groups. Received: "
                f"out_axes={self.out_axes} for shape {shape}. Correct the WeightSpec given to register_layer."
            )
        return replace(self, in_axes=in_axes, out_axes=out_axes, parallel_axes=parallel_axes)
