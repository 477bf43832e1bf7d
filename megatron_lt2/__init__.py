"""Pretrain, distil, convert and run looped linear-time transformers on megatron-core."""

__version__ = "0.1.0"
