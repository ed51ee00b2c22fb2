"""The target server: owns the real model; verifies trees, samples, commits.

`engine` is the one thread that runs steps, `servicer` the gateway's stream, `runner` the interface
of whatever computes (`model_runner` with torch, a fake in tests). Only `model_runner`, `kv_cache`
and `sampler` import torch.
"""
