"""The model as a Hugging Face folder carries it: configuration, modeling and cache files.

`checkpoints_tools/convert.py export` copies these files, and the plain recurrences of
`megatron_lt2/ops` beside them, into an export. They import torch and transformers only, so an
export needs nothing of ours.
"""
