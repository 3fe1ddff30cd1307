"""A recipe in which tests make mistakes, and how a mistake is located."""

import re

TEXT = """\
version: 1
name: sample
seed: 7
variables: {final: 0.9, epochs: 12}
model: {builtin: digits-cnn}
data: {builtin: digits}
compile: {optimizer: {name: adam, learning_rate: 1e-3}, batch_size: 64}
steps:
  - train: {epochs: 10}
  - prune:
      epochs: $epochs
      schedule:
        type: polynomial_decay
        final_sparsity: $final
        end: {epochs: 9}
      exclude: ["*logits*"]
  - export:
      formats:
        - keras
        - litert
  - expect: {metrics: {accuracy: {min: 0.96}}}
"""
LOCATED = re.compile(r"[^\n]*?:(\d+):(\d+): [^\n]+")
