"""The registry of step kinds: plain rows that schema and run-time code read; imports neither Keras nor NumPy.

A row holds everything about a kind that is visible in a recipe alone, and the place of its handler, which is imported
when a run is prepared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prunekit.delivery.reports.rows import INTEGER_FORMAT
from prunekit.recipe.settings.fields import Settings, refusal
from prunekit.recipe.settings.quantize_settings import Quantize
from prunekit.recipe.settings.rounds_settings import Rounds
from prunekit.recipe.settings.shrink_settings import RemoveBlocks, Shrink, Simplify
from prunekit.recipe.settings.step_settings import Expect, Export, Prune, Train, parse_pattern
from prunekit.registry import Registry, Row


class EarlierStep(Protocol):
    """A step of the same recipe that runs before the checked step."""

    @property
    def kind(self) -> str:
        """Name of the step's kind."""

    @property
    def settings(self) -> Any:
        """Settings of the step."""


def _no(settings: Any) -> bool:
    return False


def _yes(settings: Any) -> bool:
    return True


def _accept(settings: Any, earlier: Sequence[EarlierStep]) -> None:
    """Refuses nothing."""


def _nothing(settings: Any) -> tuple[str, ...]:
    return ()


def _check_grids(settings: Any, earlier: Sequence[EarlierStep]) -> None:
    """Refuses a step that changes weights which an earlier step put on integer grids."""
    if any(STEP_KINDS[step.kind].leaves_grids for step in earlier):
        raise refusal(
            "an earlier quantize step put the weights on integer grids and wrote their file, and this step changes "
            "them. Write the quantize step after this one."
        )


@dataclass(frozen=True)
class StepKind(Row):
    """One kind of step: a row of `STEP_KINDS`.

    `factory` is a subclass of `StepHandler`, or its place as "package.module:Handler".

    Attributes:
        settings: Class of the step's settings, a frozen pydantic model.
        text: Returns the settings as one line of text, for terminal and plan.
        check: Refuses settings that contradict the earlier steps, by raising `fields.refusal(message, *path)`; the path
            begins at the settings.
        trains: Returns True if the step runs the optimizer, so that it needs data and compile settings.
        reads_data: Returns True if the step needs data for another reason than training.
        metrics: Returns the names of the metrics that the step compares with bounds, so that it needs data.
        changes_weights: Returns True if the step may change weights: the model is evaluated after it, unless the
            step returns metrics, and `verify` repeats it.
        formats: Returns the formats of exported files that the step writes.
        returns_new_model: True if the step may replace the model by another object.
        leaves_grids: True if the step leaves the weights on integer grids, which no later step may change.
        checkpointed: True if a checkpoint follows the step. False suits steps that cost next to nothing to repeat.
    """

    settings: type[Settings]
    text: Callable[[Any], str]
    check: Callable[[Any, Sequence[EarlierStep]], None] = _accept
    trains: Callable[[Any], bool] = _no
    reads_data: Callable[[Any], bool] = _no
    metrics: Callable[[Any], tuple[str, ...]] = _nothing
    changes_weights: Callable[[Any], bool] = _no
    formats: Callable[[Any], tuple[str, ...]] = _nothing
    returns_new_model: bool = False
    leaves_grids: bool = False
    checkpointed: bool = True


# ---- train and finetune ----------------------------------------------------------------------------------------------


def _train_text(train: Train) -> str:
    rate = "" if train.learning_rate is None else f", learning rate {train.learning_rate:g}"
    zeros = "" if train.keep_zeros else ", zeros that the model came with may grow back"
    penalty = "" if train.group_lasso is None else f", group lasso {train.group_lasso:g}"
    if train.growing_regularization is not None:
        penalty = f", growing regularization of all but {train.growing_regularization.channels:g} of the channels"
    return f"{train.epochs} epoch{'s' if train.epochs > 1 else ''}{rate}{penalty}{zeros}"


# ---- prune -----------------------------------------------------------------------------------------------------------


def _prune_text(prune: Prune) -> str:
    if prune.schedule is None:
        parts = [f"to {prune.final_sparsity:g} at once"]
    else:
        moments = [f"{path[-1]} {moment}" for path, moment in prune.schedule.moments().items()]
        parts = [f"{prune.epochs} epochs", f"{prune.schedule.type} to {prune.final_sparsity:g}", *moments]
    if prune.learning_rate is not None:
        parts.append(f"learning rate {prune.learning_rate:g}")
    parts += [str(prune.criterion), prune.pattern, str(prune.allocation)]
    if prune.policy != "gradual":
        parts.append(f"policy {prune.policy}")
    parts += _texts_of_weights(prune)
    return ", ".join(parts)


def _texts_of_patterns(step: Prune | Rounds | Shrink | RemoveBlocks | Quantize) -> list[str]:
    patterns = {"include": step.include, "exclude": step.exclude}
    return [f"{name} {' '.join(given)}" for name, given in patterns.items() if given]


def _texts_of_weights(step: Prune | Rounds) -> list[str]:
    """Returns what a step says of single weights: which are pruned, and how much of them."""
    texts = _texts_of_patterns(step)
    texts += [f"{pattern} to {share:g}" for pattern, share in step.overrides.items()]
    for pattern, bounds in step.bounds.items():
        given = bounds.model_dump(exclude_none=True)
        texts.append(f"{pattern} at " + " and ".join(f"{side}. {value:g}" for side, value in given.items()))
    return texts


def _check_prune(prune: Prune, earlier: Sequence[EarlierStep]) -> None:
    _check_grids(prune, earlier)
    _check_widths(prune, earlier)
    for step in reversed(earlier):
        before = step.settings
        # Compare only steps with equal include and exclude: without the model the targets are not known.
        if isinstance(before, Prune | Rounds) and (before.include, before.exclude) == (prune.include, prune.exclude):
            if prune.final_sparsity < before.final_sparsity:
                raise refusal(
                    "pruned weights do not come back: an earlier step already prunes the same weights to "
                    f"{before.final_sparsity:g}. Received: {prune.final_sparsity:g}.",
                    *prune.final_at(),
                )
            return


def _check_widths(prune: Prune, earlier: Sequence[EarlierStep]) -> None:
    """Refuses an N:M pattern that may not fit the layers that an earlier shrink step leaves."""
    parsed = parse_pattern(prune.pattern)
    if parsed.kind != "nm" or prune.misfits == "skip":
        return
    group = parsed.numbers[1]
    for step in earlier:
        before = step.settings
        if isinstance(before, Shrink) and not before.plans_widths and before.multiple % group:
            if before.nonzero:
                cause = "channels: nonzero"
            elif before.allocation not in ("uniform", "auto"):
                cause = f"allocation: {before.allocation}"
            else:
                cause = f"a target in {before.measure}"
            raise refusal(
                f"{prune.pattern} needs input axes whose lengths are multiples of {group}, and with {cause} "
                f"the earlier shrink step may leave any number of channels. Write multiple: "
                f"{group} in the shrink step, or misfits: skip here.",
                "pattern",
            )


def _prune_trains(prune: Prune) -> bool:
    return not prune.one_shot


def _prune_reads_data(prune: Prune) -> bool:
    return prune.reads_data


# ---- rounds ----------------------------------------------------------------------------------------------------------


def _rounds_text(rounds: Rounds) -> str:
    rewind = "no rewinding" if rounds.rewind == "none" else f"rewinding {rounds.rewind}"
    parts = [f"{rounds.rounds} rounds to {rounds.sparsity:g}, {rounds.epochs_per_round} epochs each", rewind]
    if rounds.learning_rate is not None:
        parts.append(f"learning rate {rounds.learning_rate:g}")
    parts += [str(rounds.criterion), rounds.pattern, str(rounds.allocation)]
    return ", ".join(parts + _texts_of_weights(rounds))


def _check_rounds(rounds: Rounds, earlier: Sequence[EarlierStep]) -> None:
    _check_grids(rounds, earlier)
    if any(isinstance(step.settings, Prune | Rounds) for step in earlier):
        raise refusal("rounds start from a model that no step has pruned. Remove the pruning steps before this one.")


# ---- shrink ----------------------------------------------------------------------------------------------------------


def _shrink_text(shrink: Shrink) -> str:
    parts = ["channels that are not zero"] if shrink.nonzero else [f"{shrink.measure} to {shrink.share:g}"]
    if shrink.rounds > 1:
        parts.append(f"in {shrink.rounds} rounds")
    if shrink.epochs_per_round:
        epochs = f"{shrink.epochs_per_round} epoch{'s' if shrink.epochs_per_round > 1 else ''}"
        parts.append(f"{epochs} {'each' if shrink.rounds > 1 else 'after the removal'}")
    if shrink.learning_rate is not None:
        parts.append(f"learning rate {shrink.learning_rate:g}")
    parts += [] if shrink.nonzero else [str(shrink.criterion), shrink.allocation]
    parts += [f"{name} {value}" for name in ("minimum", "multiple") if (value := getattr(shrink, name)) > 1]
    if shrink.repair is not None:
        parts.append(f"repair {shrink.repair}")
    if shrink.approximate:
        parts.append(f"approximate {' '.join(shrink.approximate)}")
    return ", ".join(parts + _texts_of_patterns(shrink))


def _shrink_trains(shrink: Shrink) -> bool:
    return shrink.epochs_per_round > 0


def _shrink_reads_data(shrink: Shrink) -> bool:
    return shrink.reads_data


# ---- remove_blocks and simplify --------------------------------------------------------------------------------------


def _blocks_text(blocks: RemoveBlocks) -> str:
    return ", ".join([f"{blocks.blocks} block{'s' if blocks.blocks > 1 else ''}", *_texts_of_patterns(blocks)])


def _simplify_text(simplify: Simplify) -> str:
    return "what inference does not need"


# ---- quantize --------------------------------------------------------------------------------------------------------


def _quantize_text(quantize: Quantize) -> str:
    activations = "float" if quantize.activation_bits == "float" else f"{quantize.activation_bits}-bit"
    zeros = "" if quantize.sparsity is None else f" with {quantize.sparsity:g} zeros ({quantize.pattern})"
    groups = "" if quantize.group_size is None else f" in groups of {quantize.group_size}"
    parts = [f"{quantize.bits_text}{groups}{zeros}, {activations} activations"]
    if quantize.epochs is None:
        parts += [f"method {quantize.method}", *(["equalized"] if quantize.equalize else [])]
    else:
        parts.append(f"{quantize.epochs} epoch{'s' if quantize.epochs > 1 else ''}")
        parts += [f"on integers after {quantize.begin_epoch}"] if quantize.begin_epoch else []
        parts += [] if quantize.learning_rate is None else [f"learning rate {quantize.learning_rate:g}"]
    parts += ["full integer"] if quantize.full_integer else []
    return ", ".join([*parts, *_texts_of_patterns(quantize), f"as {quantize.file!r}"])


def _quantize_trains(quantize: Quantize) -> bool:
    return quantize.epochs is not None


def _quantize_formats(quantize: Quantize) -> tuple[str, ...]:
    return (INTEGER_FORMAT,)


# ---- export ----------------------------------------------------------------------------------------------------------


def _export_text(export: Export) -> str:
    return f"{', '.join(export.formats)} as {export.name!r}"


def _check_export(export: Export, earlier: Sequence[EarlierStep]) -> None:
    if any(isinstance(step.settings, Export) and step.settings.name == export.name for step in earlier):
        raise refusal(
            f"an earlier export step already writes files named {export.name!r}: give this one another 'name'.",
            "name",
        )


def _export_formats(export: Export) -> tuple[str, ...]:
    return export.formats


# ---- expect ----------------------------------------------------------------------------------------------------------


def _expect_text(expect: Expect) -> str:
    bounds = expect.model_dump(exclude_none=True)
    drop, sizes = bounds.pop("drop", {}), bounds.pop("bytes", {})
    bounds |= bounds.pop("metrics", {})
    relative = "relative " if drop.pop("relative", False) else ""
    bounds |= {f"{relative}drop of {name}": {"max": most} for name, most in drop.items()}
    bounds |= {f"bytes of {name}": bound for name, bound in sizes.items()}
    words = {"min": "at least", "max": "at most", "gzip_max": "compressed at most"}
    return ", ".join(
        f"{what.replace('_', ' ')} {' and '.join(f'{words[k]} {v:.15g}' for k, v in bound.items())}"
        for what, bound in bounds.items()
    )


def _check_expect(expect: Expect, earlier: Sequence[EarlierStep]) -> None:
    if not any(isinstance(step.settings, Prune | Rounds) for step in earlier):
        for name in expect.given("sparsity"):
            raise refusal(f"{name!r} can be measured only after a prune step.", name)
        changed = any(STEP_KINDS[one.kind].returns_new_model or STEP_KINDS[one.kind].leaves_grids for one in earlier)
        for name in [] if changed else expect.given("drop"):
            raise refusal(
                f"{name!r} can be measured only after a prune step, a step that makes the model smaller, or a quantize "
                "step.",
                name,
            )
    wanted = expect.bytes or {}
    if not wanted:
        return
    exported = list(dict.fromkeys(name for step in earlier for name in STEP_KINDS[step.kind].formats(step.settings)))
    for name in wanted:
        if name not in exported:
            already = f"exported so far: {', '.join(exported)}" if exported else "no export step comes before"
            raise refusal(
                f"{name!r} has no size to check: it is not exported before this step ({already}).", "bytes", name
            )


def _expect_metrics(expect: Expect) -> tuple[str, ...]:
    return expect.bounded_metrics


# ---- the rows --------------------------------------------------------------------------------------------------------

_TRAIN_STEP = "prunekit.recipe.steps.train_step:TrainStep"
STEP_KINDS: Registry[StepKind] = Registry(
    "step kind",
    [
        StepKind("train", _TRAIN_STEP, Train, _train_text, check=_check_grids, trains=_yes, changes_weights=_yes),
        StepKind(
            "prune",
            "prunekit.recipe.steps.prune_step:PruneStep",
            Prune,
            _prune_text,
            check=_check_prune,
            trains=_prune_trains,
            reads_data=_prune_reads_data,
            changes_weights=_yes,
        ),
        StepKind("finetune", _TRAIN_STEP, Train, _train_text, check=_check_grids, trains=_yes, changes_weights=_yes),
        StepKind(
            "export",
            "prunekit.recipe.steps.export_step:ExportStep",
            Export,
            _export_text,
            check=_check_export,
            formats=_export_formats,
        ),
        StepKind(
            "expect",
            "prunekit.recipe.steps.expect_step:ExpectStep",
            Expect,
            _expect_text,
            check=_check_expect,
            metrics=_expect_metrics,
            checkpointed=False,
        ),
        StepKind(
            "rounds",
            "prunekit.recipe.steps.rounds_step:RoundsStep",
            Rounds,
            _rounds_text,
            check=_check_rounds,
            trains=_yes,
            changes_weights=_yes,
        ),
        StepKind(
            "shrink",
            "prunekit.recipe.steps.shrink_step:ShrinkStep",
            Shrink,
            _shrink_text,
            check=_check_grids,
            trains=_shrink_trains,
            reads_data=_shrink_reads_data,
            changes_weights=_yes,
            returns_new_model=True,
        ),
        StepKind(
            "remove_blocks",
            "prunekit.recipe.steps.layer_steps:RemoveBlocksStep",
            RemoveBlocks,
            _blocks_text,
            check=_check_grids,
            reads_data=_yes,
            changes_weights=_yes,
            returns_new_model=True,
        ),
        StepKind(
            "simplify",
            "prunekit.recipe.steps.layer_steps:SimplifyStep",
            Simplify,
            _simplify_text,
            check=_check_grids,
            changes_weights=_yes,
            returns_new_model=True,
        ),
        StepKind(
            "quantize",
            "prunekit.recipe.steps.quantize_step:QuantizeStep",
            Quantize,
            _quantize_text,
            check=_check_grids,
            trains=_quantize_trains,
            reads_data=_yes,
            changes_weights=_yes,
            formats=_quantize_formats,
            leaves_grids=True,
        ),
    ],
)
