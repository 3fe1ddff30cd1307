"""Pages of the documentation that are made from other files: a hook of MkDocs (mkdocs.yml).

The lists of public names come from `__all__` of the public modules, the texts from the docstrings. Only static analysis
reads the modules: neither Keras nor TensorFlow is imported.
"""

import importlib
import re
from pathlib import Path, PurePosixPath

import click
import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

import prunekit
from prunekit.cli import cli

ROOT = Path(__file__).parent.parent.parent
# Files beside docs/ -> pages.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
}
# Their `__all__` is made when they are imported, which imports nothing else.
LAZY = ("gradients", "loops", "interop.tfmot")
EXTENSION_POINTS = [
    "prunekit.sparsity.scores.Criterion",
    "prunekit.core.statistics.statistics.DataCollector",
    "prunekit.core.statistics.statistics.TrainingCollector",
    "prunekit.sparsity.allocation.Allocation",
    "prunekit.techniques.pruning.masks.policy.MaskPolicy",
    "prunekit.recipe.settings.step_base.StepSettings",
    "prunekit.recipe.steps.step_handler.StepHandler",
    "prunekit.recipe.settings.schema.register_step",
    "prunekit.sparsity.shorthands",
]
LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)\s]+)(\))")


def public_names() -> dict[str, list[str]]:
    """Public module -> its public names, without the modules among them."""
    package = griffe.load("prunekit", search_paths=[str(ROOT)])
    modules = [name for name in prunekit.__all__ if package[name].is_module]
    found = {"prunekit": [name for name in prunekit.__all__ if name not in modules]}
    for name in [*modules, "interop.tfmot"]:
        module = importlib.import_module(package[name].canonical_path) if name in LAZY else None
        found[f"prunekit.{name}"] = [str(one) for one in (module.__all__ if module else package[name].exports)]
    return found


def reference_pages() -> dict[str, str]:
    """Path -> text of the reference: a page per public module, the extension points, and the command line."""
    pages = {
        "reference/command-line.md": command_line(),
        "reference/extension-points.md": page(
            "Extension points", "[Extending prunekit](../extending.md) shows them in use.", {"Names": EXTENSION_POINTS}
        ),
    }
    for module, names in public_names().items():
        paths = [f"{module}.{name}" for name in names]
        sections = {"Names": paths}
        if module == "prunekit":
            is_class = [name[0].isupper() for name in names]
            sections = {
                "Functions": [path for path, given in zip(paths, is_class, strict=True) if not given],
                "Classes": [path for path, given in zip(paths, is_class, strict=True) if given],
            }
        # The docstring of the module, without its members.
        text = f"::: {module}\n    options: {{show_root_heading: false, members: false}}"
        pages[f"reference/{module.rpartition('.')[2]}.md"] = page(f"`{module}`", text, sections)
    return pages


def page(title: str, text: str, sections: dict[str, list[str]]) -> str:
    """Markdown of a page that describes names, section by section."""
    parts = [f"# {title}", text]
    for heading, names in sections.items():
        parts += [f"## {heading}", *(f"::: {name}" for name in names)]
    return "\n\n".join(parts) + "\n"


def command_line() -> str:
    """The help texts of `prunekit` and its commands, one section each."""
    top = click.Context(cli, info_name="prunekit")
    sections = ["# Command line\n\n[Recipes](../recipes.md) and [reports](../reports.md) show the commands in use."]
    for name in ["", *cli.list_commands(top)]:
        command = cli.get_command(top, name) if name else cli
        context = click.Context(command, info_name=name, parent=top) if name else top
        sections.append(f"## `{context.command_path}`\n\n```text\n{command.get_help(context)}\n```")
    return "\n\n".join(sections) + "\n"


def notebook_pages(files: Files, config: MkDocsConfig) -> None:
    """Replaces each notebook by a page with its text, code and stored outputs. Nothing is run."""
    notebooks = [file for file in files if file.src_uri.endswith(".ipynb")]
    if not notebooks:
        return
    from nbconvert import MarkdownExporter

    for file in notebooks:
        text, resources = MarkdownExporter().from_filename(file.abs_src_path)
        folder = PurePosixPath(file.src_uri).parent
        files.remove(file)
        for name, content in resources["outputs"].items():
            files.append(File.generated(config, str(folder / name), content=content))
        files.append(File.generated(config, str(PurePosixPath(file.src_uri).with_suffix(".md")), content=text))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the generated pages."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, text in reference_pages().items():
        files.append(File.generated(config, page, content=text))
    notebook_pages(files, config)
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Links to files beside docs/, from these files to docs/, and to notebooks, as links between pages."""

    def moved(found: re.Match[str]) -> str:
        start, target, end = found.groups()
        path, hash_, anchor = target.partition("#")
        if page.file.src_uri in PAGES.values():
            path = path.removeprefix("docs/")
        name = path.rpartition("../")[2] if path.startswith("../") else path
        if path.endswith(".ipynb"):
            path = path.removesuffix(".ipynb") + ".md"
        if (path.startswith("../") or page.file.src_uri in PAGES.values()) and name in PAGES:
            path = path[: -len(name)].replace("../", "", 1) + PAGES[name]
        return f"{start}{path}{hash_}{anchor}{end}"

    return LINK.sub(moved, markdown)
