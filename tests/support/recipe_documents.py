"""Recipes as mappings, of which a test writes only what it is about."""

import copy

BASE = {
    "version": 1,
    "name": "test",
    "model": {"builtin": "digits-cnn"},
    "data": {"builtin": "digits"},
    "compile": {"optimizer": "adam"},
    "steps": [{"train": {"epochs": 2}}],
}
END = {"end": {"epochs": 3}}
SCHEDULES = {
    "polynomial_decay": {"type": "polynomial_decay", "final_sparsity": 0.5, **END},
    "linear": {"type": "linear", "final_sparsity": 0.5, **END},
    "cosine": {"type": "cosine", "final_sparsity": 0.5, **END},
    "exponential": {"type": "exponential", "final_sparsity": 0.5, **END},
    "constant": {"type": "constant", "target_sparsity": 0.5},
    "one_shot": {"type": "one_shot", "sparsity": 0.5, "at": {"epochs": 3}},
    "multi_step": {
        "type": "multi_step",
        "sparsities": [{"at": {"epochs": 1}, "sparsity": 0.2}, {"at": {"epochs": 3}, "sparsity": 0.5}],
    },
}


def recipe(*steps, **changes):
    """BASE with these steps and top-level keys; None takes a key away."""
    document = copy.deepcopy(BASE) | {"steps": list(steps) or BASE["steps"]} | changes
    return {key: value for key, value in document.items() if value is not None}


def prune(schedule=None, **settings):
    return {"prune": {"epochs": 4, "schedule": schedule or SCHEDULES["polynomial_decay"], **settings}}


def one_shot(sparsity=0.5, **settings):
    return {"prune": {"sparsity": sparsity, **settings}}


def export(*formats, **settings):
    return {"export": {"formats": list(formats), **settings}}
