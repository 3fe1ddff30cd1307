"""Models, schedules and checkpoints of other toolkits.

- `tfmot`: tensorflow-model-optimization

Design

The config of a legacy file is not trusted (`interop/tfmot/`): it is rebuilt from an allowlist before tf_keras reads it.
The live graph is replayed node by node without the pruning wrappers, and both models are compared on the same inputs.

`interop/tfmot/policy.py` and `interop/tfmot/arithmetic.py` implement tensorflow-model-optimization's rules as a policy,
bit-equal to its compiled step.
"""
