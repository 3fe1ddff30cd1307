"""Quantization: integer weights and activations."""
