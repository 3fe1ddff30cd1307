"""Field types of a recipe, with validation: fractions, names, paths, plain arguments."""

import math
import os
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError

from prunekit.registry import Registry
from prunekit.sparsity.arguments import number_of_bytes
from prunekit.sparsity.shorthands import PathOption
from prunekit.suggestions import did_you_mean

NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", re.ASCII)
LONGEST_SHOWN = 60
# Limit on names compared for a suggestion: a document may hold thousands of names, and comparing is slow.
MOST_NEAREST = 50
LONGEST_TEXT = 2_000
LONGEST_PATTERN = 2_000
# Limit on all weight patterns of a recipe together; repeated patterns count each time.
MOST_EXPRESSIONS = 8_000
MOST_WIDE_RANGES = 8
DEEPEST_ARGUMENT = 16
# (former key, present one) of all settings.
FORMER_KEYS: set[tuple[str, str]] = set()
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]|\\[uUN]")


def refusal(message: str, *at: str | int) -> PydanticCustomError:
    """Returns the error for a validator to raise; `at` is the path from the validated object to the wrong part."""
    return PydanticCustomError("recipe", "{message}", {"message": message, "at": at})


def with_path(error: PydanticCustomError, *at: str | int) -> PydanticCustomError:
    """Returns the error of a `refusal` with the path `at` put in front of the error's own path."""
    context = dict(error.context or {})
    return PydanticCustomError(error.type, error.message_template, {**context, "at": (*at, *context.get("at", ()))})


def unknown(kind: str, word: object, valid: Iterable[str], *at: str | int) -> PydanticCustomError:
    """Returns the error for an unknown name; the nearest valid name is searched when the message is built.

    A document may hold thousands of wrong names, but only one error is reported.
    """
    context = {"unknown": kind, "word": word, "valid": tuple(valid), "at": at}
    return PydanticCustomError("unknown_key" if kind == "key" else "unknown", "unknown {unknown}", context)


def shown(value: object) -> str:
    """Returns the value as one short line for an error message."""
    if isinstance(value, Mapping):
        return "a mapping" if value else "an empty mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return "true" if value else "false"
    # Python refuses the repr of a number with many thousand digits.
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of about {int(value.bit_length() * 0.30103)} digits"
    if isinstance(value, float):
        return f"{value:.15g}"
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return shortened(text)


def shortened(text: str) -> str:
    """Returns the text, cut to the length that an error message permits."""
    return text if len(text) <= LONGEST_SHOWN else f"{text[: LONGEST_SHOWN - 3]}..."


def nearest(word: str, valid: Iterable[str]) -> str:
    """ " Did you mean 'x'?" if a valid word is close to `word`, followed by the list of valid words."""
    known = list(valid)
    words = known[:MOST_NEAREST]
    listed = ", ".join(shortened(key) for key in words) + (" and others" if len(known) > len(words) else "")
    hint = did_you_mean(word, words, write=shown)
    return f"{hint} Valid here: {listed}." if words else " Nothing is valid here."


def is_number(text: str) -> bool:
    """Returns True if `float` reads the text."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def first_text(words: Sequence[str]) -> str:
    """Returns the first word that is not written as a number; the first word if all are."""
    return next((word for word in words if not is_number(word)), words[0])


def _warn_of(kind: str, former: str, present: str) -> None:
    # Not a DeprecationWarning, which Python shows to authors of code alone.
    warnings.warn(f"The {kind} {former!r} of a recipe is now {present!r}.", FutureWarning, stacklevel=2)


def formerly(former: str, present: str) -> BeforeValidator:
    """Returns a validator that reads the former value of a field as the present one, with a warning."""

    def check(value: Any) -> Any:
        if value != former:
            return value
        _warn_of("value", former, present)
        return present

    return BeforeValidator(check)


class Settings(BaseModel):
    """Base class of the parts of a recipe: frozen, no unknown keys, no conversion between value types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    example: ClassVar[str] = ""
    # Former name of a field -> present name: still read, with a warning.
    former: ClassVar[Mapping[str, str]] = {}
    # Former keys that are not read any more -> how a recipe writes the same now.
    gone: ClassVar[Mapping[str, str]] = {}

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        FORMER_KEYS.update(cls.former.items())

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, value: Any) -> Any:
        """Checks the keys first, so that a misspelt key is not also reported as missing."""
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            such_as = f", such as {cls.example}" if cls.example else ""
            raise refusal(f"expected a mapping{such_as}. Received: {shown(value)}.")
        found = {}
        for key, item in value.items():
            if key in cls.gone:
                raise refusal(f"{key!r} is a key no longer: write {cls.gone[key]}.", key)
            name = cls.former.get(key, key)
            if name not in cls.model_fields:
                raise unknown("key", key, cls.model_fields, key)
            if name != key and name in value:
                raise refusal(f"{key!r} is the former name of {name!r}, which is here, too. Remove one of them.", key)
            if name != key:
                _warn_of("key", key, name)
            found[name] = item
        return found

    def given(self, *names: str) -> list[str]:
        """Returns those of the fields `names` that are not None."""
        return [name for name in names if getattr(self, name) is not None]

    def exactly_one(self, *names: str) -> Self:
        """Checks that exactly one of the fields `names` is given."""
        found = self.given(*names)
        if not found:
            raise refusal(f"expected one of {', '.join(names)}. Received: none of them.")
        if len(found) > 1:
            raise refusal(f"expected only one of {', '.join(names)}. Received: {' and '.join(found)}.", found[1])
        return self

    def at_least_one(self, *names: str) -> Self:
        """Checks that at least one of the fields `names` is given."""
        if not self.given(*names):
            raise refusal(f"expected at least one of {', '.join(names)}. Received: none of them.")
        return self

    def only_with(self, owner: str, *names: str) -> None:
        """Refuses non-default fields `names` if the field `owner` is not given."""
        for name in names:
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if getattr(self, owner) is None and getattr(self, name) != default:
                raise refusal(f"{name!r} needs {owner!r}, which is missing here.", name)


def unit_interval(value: float, closed: bool, *at: str) -> float:
    """Returns the value; refuses values outside [0, 1), or [0, 1] if `closed`, at the path `at`."""
    # Written so that NaN is refused as well.
    if 0.0 <= value < 1.0 or (closed and value == 1.0):
        return value
    hint = f" Write {value / 100:g} for {value:g} %." if 1.0 < value <= 100.0 and (closed or value < 100.0) else ""
    raise refusal(f"expected a fraction in [0, 1{']' if closed else ')'}. Received: {shown(value)}.{hint}", *at)


def share(expected: str, closed: bool) -> Callable[[Any], Any]:
    """Returns a validator of shares above 0 and below 1, or 1 itself if `closed`.

    Args:
        expected: What is expected, for the message.
        closed: True also accepts 1.
    """

    def check(value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int | float) or 0 < value < 1 or (closed and value == 1):
            return value
        hint = f" Write {value / 100:g} for {value:g} %." if 1 < value < 100 or (closed and value == 100) else ""
        raise refusal(f"expected {expected}. Received: {shown(value)}.{hint}")

    return check


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _words(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _as_tuple(value)


def _memory(value: Any) -> float:
    try:
        return number_of_bytes("memory", value)
    except (TypeError, ValueError) as error:
        raise refusal(str(error)) from None


def _whole_name(value: str) -> str:
    if not re.fullmatch(NAME, value, re.ASCII):
        raise refusal(
            "expected a name that can be a file name: letters, digits, '.', '_' and '-', at most 100, "
            f"the first a letter or digit. Received: {shown(value)}."
        )
    return value


def resolved_path(value: str, info: ValidationInfo) -> str:
    """Returns the path, made absolute relative to the folder of the recipe file if there is a file."""
    if not value.strip():
        raise refusal(f"expected a path. Received: {shown(value)}.")
    base = (info.context or {}).get("base")
    value = os.path.expanduser(value)
    return os.path.normpath(os.path.join(base, value)) if base else value


def path_example(example: str, what: str, options: str) -> BeforeValidator:
    """Returns a validator that accepts text only, and names in its error how the path of `what` is written.

    Args:
        example: Key and path, such as "npz: arrays.npz".
        what: "a file" or "a folder".
        options: Options that belong beside the key.
    """

    def check(value: Any) -> Any:
        if value is None or isinstance(value, str):
            return value
        raise refusal(
            f"expected the path of {what}, such as data: {{{example}}}; options stand beside it, as in "
            f"data: {{{example}, {options}}}. Received: {shown(value)}."
        )

    return BeforeValidator(check)


def _factory(value: str) -> str:
    if not FACTORY.fullmatch(value):
        raise refusal(f"expected 'package.module:function'. Received: {shown(value)}.")
    return value


class PatternBudget:
    """Remaining budget of one recipe for compiling weight patterns as regular expressions."""

    def __init__(self) -> None:
        self._characters = self._ranges = 0

    def take(self, pattern: str) -> None:
        """Subtracts the pattern from the budget; refuses a pattern that exceeds the budget."""
        if pattern.startswith("re:"):
            self._characters += len(pattern)
        # Python visits every character of a range: [!-\uffef] with ignored case takes as long as a whole recipe.
        if _BEYOND_ASCII.search(pattern):
            self._ranges += pattern.count("-")
        if self._characters > MOST_EXPRESSIONS:
            raise refusal(f"expected at most {MOST_EXPRESSIONS:,} characters of regular expressions in a recipe.")
        if self._ranges > MOST_WIDE_RANGES:
            raise refusal(
                f"expected at most {MOST_WIDE_RANGES} '-' in a recipe's patterns with characters beyond ASCII: each "
                "may be a range of many thousand characters. Write '?' or '.' where any character will do."
            )


def _weight_pattern(value: str, info: ValidationInfo) -> str:
    if not value or value == "re:":
        raise refusal("expected a glob such as 'conv_*' or 're:' and a regular expression. Received: an empty pattern.")
    if len(value) > LONGEST_PATTERN:
        raise refusal(f"expected a pattern of at most {LONGEST_PATTERN:,} characters. Received: {len(value):,}.")
    budget = (info.context or {}).get("patterns")
    if budget is not None:
        budget.take(value)
    if value.startswith("re:"):
        try:
            # Refuse patterns that Python warns about, such as [[a]: their meaning may change.
            with warnings.catch_warnings(action="error"):
                re.compile(value[3:])
        except (re.error, OverflowError, RecursionError, Warning) as error:
            raise refusal(f"{shown(value)} is not a regular expression: {error}.") from None
    return value


def _plain(value: Any, depth: int = 0) -> Any:
    """Returns the value rebuilt from plain YAML types, so that a recipe can be written and read again."""
    if depth > DEEPEST_ARGUMENT:
        raise refusal(f"expected at most {DEEPEST_ARGUMENT} levels of lists and mappings.")
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return value
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, list | tuple):
        return [_plain(item, depth + 1) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(item, depth + 1) for key, item in value.items()}
    raise refusal(f"expected text, finite numbers, true, false, null, lists and mappings. Received: {shown(value)}.")


def _identifiers(value: dict[str, Any]) -> dict[str, Any]:
    for key in value:
        if not key.isidentifier():
            raise refusal(f"expected the name of a keyword argument. Received: {shown(key)}.", key)
    return value


class Configured(BaseModel):
    """A registered extension with options: `{type: NAME, OPTION: value}`."""

    model_config = ConfigDict(frozen=True, extra="allow", strict=True)

    type: str

    def __str__(self) -> str:
        given = ", ".join(f"{name} {value}" for name, value in (self.model_extra or {}).items())
        return f"{self.type} ({given})"


def name_of(extension: "str | Configured") -> str:
    """Returns the name of an extension that a recipe names, with or without options."""
    return extension if isinstance(extension, str) else extension.type


def make(registry: Registry[Any], extension: "str | Configured", seed: int) -> Any:
    """Returns the run-time object of an extension; an option "seed" that is not given is `seed`."""
    row = registry.named(name_of(extension))
    options = {name: default for name, (_, default) in row.options.items()}
    if "seed" in options and options["seed"] is None:
        options["seed"] = seed
    if isinstance(extension, Configured):
        options |= {name: value for name, value in (extension.model_extra or {}).items() if value is not None}
    return row.load()(**options)


def registered(registry: Registry[Any]) -> BeforeValidator:
    """Returns a validator that accepts the name of a row of `registry`, or a mapping with its name and its options."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, Configured):
            return value
        name = value.get("type") if isinstance(value, Mapping) else value
        if not isinstance(name, str):
            raise refusal(
                f"expected the name of a {registry.kind}, or {{type: NAME}} with its options. Received: {shown(value)}."
            )
        if name not in registry:
            raise unknown("value", name, registry, *([] if isinstance(value, str) else ["type"]))
        if isinstance(value, str):
            return value
        return Configured(type=name, **_options(registry[name].options, value, info))

    return BeforeValidator(check)


def _options(known: Mapping[str, tuple[Any, Any]], given: Mapping[str, Any], info: ValidationInfo) -> dict[str, Any]:
    found = {}
    for key, value in given.items():
        if key == "type":
            continue
        if key not in known:
            raise unknown("key", key, ["type", *known], key)
        kind = known[key][0]
        try:
            found[key] = TypeAdapter(str if kind is PathOption else kind).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise refusal(f"{reason[:1].lower()}{reason[1:]}. Received: {shown(value)}.", key) from None
        if kind is PathOption:
            found[key] = resolved_path(found[key], info)
    return found


def one_of(kind: str, names: Iterable[str]) -> AfterValidator:
    """Returns a validator that accepts only `names`, and suggests the nearest name in its error."""
    valid = tuple(names)

    def check(value: str) -> str:
        if value not in valid:
            raise unknown(kind, value, valid)
        return value

    return AfterValidator(check)


def _check(function: Callable[..., Any], *arguments: Any) -> AfterValidator:
    return AfterValidator(lambda value: function(value, *arguments))


Sparsity = Annotated[float, _check(unit_interval, False)]
Fraction = Annotated[float, _check(unit_interval, True)]
Positive = Annotated[float, Field(gt=0.0)]
# Bytes of activations that are kept; as in Python.
Memory = Annotated[float, BeforeValidator(_memory)]
# Training examples that an operation reads, unless `examples` is given.
EXAMPLES = 1024
Epochs = Annotated[int, Field(ge=1, le=1_000_000)]
Count = Annotated[int, Field(ge=1, le=2**53)]
Size = Annotated[int, Field(ge=1, le=2**31 - 1)]
Name = Annotated[str, AfterValidator(_whole_name)]
Text = Annotated[str, StringConstraints(max_length=LONGEST_TEXT)]
FilePath = Annotated[str, AfterValidator(resolved_path)]
Factory = Annotated[str, AfterValidator(_factory)]
Plain = Annotated[Any, AfterValidator(_plain)]
Arguments = Annotated[dict[str, Plain], AfterValidator(_identifiers)]
Listed = BeforeValidator(_as_tuple)
# A word alone, or a list of words.
Words = BeforeValidator(_words)
WeightPattern = Annotated[str, AfterValidator(_weight_pattern)]
WeightPatterns = Annotated[tuple[WeightPattern, ...], Words]
