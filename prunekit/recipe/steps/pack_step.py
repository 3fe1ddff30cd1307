"""The handler of the step kind pack."""

from dataclasses import replace
from typing import Any

from prunekit.anatomy.records.sections import Column, Section, Value
from prunekit.operations.pack import pack
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.step_handler import PreparedStep, StepHandler, StepResult


class PackStep(StepHandler[PreparedStep]):
    """Packs exported files, beside them."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedStep:
        """Returns the step."""
        return PreparedStep(settings)

    def run(self, prepared: PreparedStep, workspace: Workspace) -> StepResult:
        """Writes NAME.pack for each exported file NAME of the formats."""
        formats = prepared.settings.formats
        # Of several exports with one name, the last one is on disk.
        exports = workspace.state.exports
        files = {
            row.file: place for place, row in enumerate(exports) if row.file and (not formats or row.format in formats)
        }
        rows: list[tuple[Value, ...]] = []
        texts = []
        for i, (name, place) in enumerate(files.items()):
            workspace.report_progress(i / len(files), f"packing {name}")
            report = pack(workspace.exports / name, workspace.exports / f"{name}.pack")
            rows.append((report.file, report.bytes_before, report.bytes, *(one.bytes for one in report.others)))
            texts.append(f"{report.file} {report.bytes:,} bytes")
            exports[place] = replace(exports[place], packed_bytes=report.bytes)
        titles = ("Before", "Packed", "gzip -9")
        columns = (Column("File", "name"), *(Column(title, "bytes") for title in titles))
        section = Section("Packed files", columns, tuple(rows), notes=() if rows else ("No file was exported.",))
        return StepResult(sections=[section], text=", ".join(texts) or "no file was exported")
