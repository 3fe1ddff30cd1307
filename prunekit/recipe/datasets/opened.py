"""Opened: what a source of data holds, before a split and before preprocessing."""

from dataclasses import dataclass

from prunekit.recipe.datasets.parts import Part


@dataclass(frozen=True, eq=False)
class Opened:
    """The examples of a source.

    Attributes:
        name: Readable name, such as "digits".
        train: Training examples, from which validation and test examples may be held out.
        validation: Validation examples; None if the source has none.
        test: Test examples; None if the source has none.
        class_names: Names of the classes, in the order of their numbers; empty if the source has no names.
        notes: Facts for the plan and the report, such as the names of the arrays that were read.
    """

    name: str
    train: Part
    validation: Part | None = None
    test: Part | None = None
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
