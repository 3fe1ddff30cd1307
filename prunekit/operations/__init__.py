"""One file for each thing that a user asks for: its signature, its checks, its parts in order.

- `export`: `pk.export`
- `simplify`: `pk.simplify`
- `remove_blocks`: `pk.remove_blocks`
- `shrink`: `pk.shrink`
- `prune`: `pk.prune`
- `prune_in_rounds`: `pk.prune_in_rounds`
- `quantize`: `pk.quantize`
- `quantization_training`: `pk.Quantizer`, in loops of your own
- `quantization_callback`: `pk.QuantizationCallback`, in `fit`
- `choose_bits`: `pk.choose_bits`
- `sensitivity`: `pk.sensitivity`
"""
