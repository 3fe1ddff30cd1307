"""Everything that knows tensorflow-model-optimization: its files, its schedules, and its rules of pruning.

- `arithmetic`: its schedules, counts and patterns, to the bit
- `schedule_adoption`: its schedules, recognised by name
- `policy`: `policy="tfmot"`, leaks included
- `legacy`: imports tf_keras and the package at first use
- `layers`: tf_keras layer -> Keras 3 layer
- `config`: configs from known classes
- `files`: loads files without running code in them
- `wrappers`: layers, masks and ranges in wrappers
- `graph`: tf_keras model -> Keras 3 model
- `training_state`: optimizer and loss
- `comparison`: outputs of both models
- `conversion`: models with their training state

The public names are loaded on first use (PEP 562): a module of this folder is imported without the others.
"""

from typing import TYPE_CHECKING

from prunekit.lazy_names import lazy_names

if TYPE_CHECKING:
    from prunekit.interop.tfmot.conversion import Converted as Converted, convert as convert, read_model as read_model


_HOME = dict.fromkeys(("Converted", "convert", "read_model"), f"{__name__}.conversion")
__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
