"""Small models of many architectures, for tests that remove channels and layers."""

import image_architectures
import other_architectures
from architecture_parts import ARCHITECTURES, inputs_of, randomize, stack

__all__ = ["ARCHITECTURES", "image_architectures", "inputs_of", "other_architectures", "randomize", "stack"]
