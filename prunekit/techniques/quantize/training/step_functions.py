"""The functions that run the batches of a `fit` on integers, and go on to the next `fit` of the same model.

Scales are variables, so a trace that contains them serves any scales of the same tensors and weights. Only what is
certainly the same is traced once: see `ScopedFunction.keep`.
"""

from __future__ import annotations

import contextlib

from prunekit.core.training.train_function import ScopedFunction, kept
from prunekit.techniques.quantize.training.training import QuantizationTraining


class StepFunctions:
    """The train and test functions of one training on integers.

    Args:
        work: The training, begun. Functions that a former training left are taken over with the variables that they
            contain.
    """

    def __init__(self, work: QuantizationTraining):
        self._work = work
        self._functions: dict[tuple[str, bool], ScopedFunction] = {}
        for kind, frozen in (("train", False), ("train", True), ("test", False)):
            function, traced = kept(work.model, _name(frozen), kind)
            if function is not None and work.take_over(traced):
                function.use(work.updating if kind == "train" else work.testing)
                self._functions[kind, frozen] = function
        self._traced = work.in_traces()

    def training(self) -> ScopedFunction:
        """Returns the train function, with frozen batch normalizations if the training has frozen them."""
        key = ("train", self._work.frozen)
        if key not in self._functions:
            self._functions[key] = ScopedFunction(self._work.model, self._work.updating)
        return self._functions[key]

    def testing(self) -> ScopedFunction:
        """Returns the test function."""
        key = ("test", False)
        if key not in self._functions:
            self._functions[key] = ScopedFunction(self._work.model, self._work.testing, "test")
        return self._functions[key]

    def keep(self) -> None:
        """Keeps the functions with the model's own for the next training, after the last batch of this one."""
        for (_, frozen), function in self._functions.items():
            function.keep(contextlib.nullcontext, self._traced, _name(frozen))


def _name(frozen: bool) -> str:
    return "integers, frozen" if frozen else "integers"
