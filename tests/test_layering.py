"""The folders are the data's way through the program: a module imports only from what stands above it."""

import ast
from pathlib import Path

import pytest

import prunekit

PACKAGE = Path(prunekit.__file__).parent

# In order; inside a folder a module imports only from files before it. A new module is a new name here. "" is the
# package's own folder: what all may import stands first, and what the command line is made of last.
ORDER = (
    ("", "version missing_packages lazy_names suggestions registry"),
    (
        "sparsity",
        "arguments shorthands schedules array_ops selection sums scores gradient_scores channel_scores patterns "
        "detection lamp allocation automatic bounds convex_shares sensitivity_table sensitivity_allocation "
        "reconstruction",
    ),
    (
        "anatomy",
        "display sections tables keras_metrics damage reports counting weight_spec layer_rows keras_hub_layers layers "
        "raw_variables name_patterns model_weights model_graph targets layer_names fans watching "
        "flow example_inputs recorded_graph tracing cost inspection "
        "archives keras_hub_files model_files "
        "channel_axes channel_links channel_calls channel_kernels channel_normalization channel_recurrent "
        "channel_attention channel_layers channel_blocks channel_operations keras_hub_calls recorded_calls graph_calls "
        "graph_reader linear_kinds channels weight_entries channel_order",
    ),
    (
        "core",
        "partial_files backend arguments compilation patching layer_precision variable_values kept_grids optimizers "
        "environment jax_state step_state train_function batch_parts moving_statistics synthetic_inputs calibration "
        "model_building distribution layer_observer layer_calls update_observer losses differentiation snapshot "
        "joined_variables output_error output_metrics "
        "graph_steps model_function suffix_runs weight_scan baseline statistics channel_statistics "
        "layer_products layer_inputs input_statistics input_scale calibration_walk inner_inputs layer_fit layerwise "
        "trials channel_importance random_state step_counter backup_sync last_callback",
    ),
    ("initialization", "signal_report sampling lsuv initializers"),
    (
        "gradients",
        "layer_capture statistics interception zeroth_order black_box_loss gradient_factors layer_formulas "
        "per_example_pass per_example_gradients score_statistics example_statistics jacobian_products "
        "repeated_run rematerialization partitioned_backward custom_gradients diagnosis",
    ),
    (
        "techniques/pruning",
        "mask_store dense_store policy options movement mask_maker unit_exchange mask_calculator sparsegpt layer_error "
        "gradual choices channel_groups structure_decay regrow alternating straight_through enforcement_check "
        "mask_updater pruner_state pruning_notes held_masks targeting attached_pruners pruner trace_reuse layer_solver "
        "one_shot rounds saved_files callbacks keep_zeros once_sparse "
        "sensitivity_scan",
    ),
    (
        "techniques/shrink",
        "options channel_penalties zero_channels measured_size budget layer_copies simplify_report "
        "layer_graph graph_builder linear_layers folding adjustments constants kept_statistics rebuild repair "
        "selection trials verification optimizer_state shrink_report groups_report shrinking identities dead_branches "
        "duplicates simplifying blocks block_report block_removal",
    ),
    (
        "techniques/quantize",
        "text_inputs grids fake_quantization ranges histogram gptq bit_allocation rules form_operations "
        "recurrent_forms integer_forms units placement subpixels spans stored_bytes channel_scaling rescaling "
        "gamma_migration equalization awq activation_scaling rounding linear_units lstm_units simulation calibration "
        "options targeting weight_rounding report_pictures quantization_report quantized_model fit_watch preparation "
        "after_training bit_scan bit_choice bit_search learned_ranges training step_functions",
    ),
    (
        "loops",
        "weight_changes gradient_accumulator levenberg_marquardt activation_cache graph_split cached_prefix tape_loop",
    ),
    (
        "delivery",
        "formatting metrics rows gzip_size probe tensor_probe stopwatch litert_model xnnpack litert litert_writing "
        "sparse_encoding litert_graph litert_reshapes litert_folding litert_merging integer_weights integer_kernels "
        "integer_units integer_io integer_tensors integer_constants integer_lstm integer_file integer_sparsity "
        "integer_products integer_export advice isolated_run integer_comparison integer_report latency model_measures "
        "shrinking export_reference integer_writing keras_file export keras_integers quantizing quantization_training "
        "quantization_callback "
        "stages run_report plot_data plots channels_plot plot_labels stage_plot quantization_plot bits_plot "
        "pictures signal_plot overview_plot model_sections report_sections markup html_report terminal_report "
        "sweeps sweep_plot comparison "
        "sensitivity sensitivity_plot notebook",
    ),
    (
        "interop/tfmot",
        "arithmetic schedule_adoption policy legacy layers config files wrappers graph training_state comparison "
        "conversion",
    ),
    (
        "recipe",
        "fields applications compile_fields data_source sources timing step_settings rounds_settings shrink_settings "
        "quantize_settings step_kinds schema yaml_reader loader presence factories idx npy",
    ),
    (
        "recipe/datasets",
        "batches parts opened fingerprint arrays builtin_files builtin images disk csv_files saved preprocessing",
    ),
    (
        "recipe",
        "data models summary progress replica_state interruption replicas compile_settings run_inputs run_state "
        "directory read_report checkpoint export_samples stages workspace step_handler "
        "train_step planned_counts prune_step rounds_step "
        "shrink_step layer_steps export_step quantize_step expectations expect_step preparation plan starting_steps "
        "starting_recipe execution build_report runner grid sweep_process workers sweep sensitivity named_scan "
        "named_evaluation named_export",
    ),
    ("", "doctor options terminal"),
    ("commands", "output files start runs results scan evaluation models removals quantizing exporting"),
    ("", "cli __main__"),
)
NAMES = [f"{folder}/{module}".strip("/") for folder, modules in ORDER for module in modules.split()]
RANKS = {name: rank for rank, name in enumerate(NAMES)}
# Their `__init__` holds public names, loaded on first use: `pk.Pruner`, `pk.gradients.hvp`, `pk.loops.TapeLoop`. It is
# for users: no module of prunekit imports from it. All other folders' are empty.
FACADES = {"": "__main__", "gradients": "diagnosis", "loops": "tape_loop", "interop/tfmot": "conversion"}
FILES = sorted(path.relative_to(PACKAGE).with_suffix("").as_posix() for path in PACKAGE.rglob("*.py"))


def imports_of(nodes):
    """What of prunekit is imported: modules as in `NAMES`, and folders whose own names are."""
    for node in nodes:
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (_module(name.split(".")[1:]) for name in found if name.split(".")[0] == "prunekit")


def _module(parts):
    """The module, or the folder, in which the name is: the longest part of it that is one."""
    while parts and "/".join(parts) not in RANKS and not (PACKAGE / Path(*parts)).is_dir():
        parts = parts[:-1]
    return "/".join(parts)


def parsed(name):
    return ast.parse((PACKAGE / f"{name}.py").read_text(encoding="utf-8"))


def test_every_file_has_a_place():
    modules = [name for name in FILES if not name.endswith("__init__")]
    assert sorted(modules) == sorted(NAMES), "place each module in ORDER"


@pytest.mark.parametrize("name", NAMES)
def test_a_module_imports_only_from_above(name):
    for target in imports_of(ast.walk(parsed(name))):
        assert target in RANKS, f"{name} imports the folder '{target}': import from the module that defines the name"
        assert RANKS[target] < RANKS[name], f"{name} imports {target}, which comes after it"


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith("__init__")])
def test_a_folder_re_exports_nothing_but_lazily(name):
    folder, tree = name.removesuffix("__init__").strip("/"), parsed(name)
    if folder not in FACADES:
        assert not list(imports_of(ast.walk(tree))), "folders re-export nothing"
        return
    block = next(node for node in tree.body if isinstance(node, ast.If))
    assert ast.unparse(block.test) == "TYPE_CHECKING"
    outside = [node for node in tree.body if node is not block]
    assert set(imports_of(outside)) <= {"lazy_names", "version"}, "public names are loaded on first use"
    last = RANKS[f"{folder}/{FACADES[folder]}".strip("/")]
    for target in imports_of(block.body):
        assert target in FACADES or RANKS[target] <= last
        assert target.startswith(folder), f"{name} offers {target}, which is another folder's"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import prunekit", [""]),
        ("import prunekit as pk", [""]),
        ("from prunekit import Pruner", [""]),
        ("from prunekit import doctor, cli", ["doctor", "cli"]),
        ("from prunekit import gradients", ["gradients"]),
        ("from prunekit.gradients import hvp", ["gradients"]),
        ("def f():\n    from prunekit.core import backend, compilation", ["core/backend", "core/compilation"]),
        ("import prunekit.techniques.pruning.pruner", ["techniques/pruning/pruner"]),
        ("from prunekit.techniques.pruning.pruner import Pruner", ["techniques/pruning/pruner"]),
        ("from prunekit.version import __version__", ["version"]),
        ("import prunekitchen, keras\nfrom keras import ops", []),
    ],
)
def test_every_kind_of_import_is_seen(text, found):
    assert list(imports_of(ast.walk(ast.parse(text)))) == found
