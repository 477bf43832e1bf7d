"""Distillation: a full-attention teacher becomes a student with linear mixers, in stages.

`python -m megatron_lt2.distill --config FILE`; docs/distillation.md.
"""
