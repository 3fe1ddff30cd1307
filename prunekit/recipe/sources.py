"""Defines the recipe fields for the source of the model."""

from typing import ClassVar, Literal, Self

from pydantic import model_validator

from prunekit.recipe.fields import (
    Arguments,
    Factory,
    FilePath,
    Settings,
    refusal,
    shown,
)


class ModelSource(Settings):
    """Source of the model: a `.keras` file, a built-in model, or a Python function."""

    example: ClassVar[str] = "{builtin: digits-cnn}"
    file: FilePath | None = None
    builtin: Literal["digits-cnn", "fashion-mlp", "fashion-cnn", "diabetes-mlp"] | None = None
    factory: Factory | None = None
    arguments: Arguments = {}

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.exactly_one("file", "builtin", "factory")
        self.only_with("factory", "arguments")
        if self.file is not None and not self.file.endswith(".keras"):
            raise refusal(f"only .keras files are read (in safe mode). Received: {shown(self.file)}.", "file")
        return self

    @property
    def kind(self) -> str:
        """Kind of the source: file, builtin or factory."""
        return self.given("file", "builtin", "factory")[0]
