"""The model on the device: checkpoints, families, caches, draft, verify, accept.

Start at `engine.plan` for the contract and `engine.load` for the way in. Importing this package
imports no MLX.
"""
