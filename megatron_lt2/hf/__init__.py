"""The model as a Hugging Face folder carries it: configuration, modeling and cache files.

`checkpoints_tools/convert.py export` copies these files, and beside them what they need of
`megatron_lt2.recurrent`, `kernels` and `ops`, into an export. All of it imports torch and
transformers only (FLA, if it is there, when a kernel is called), so an export needs nothing of
ours.
"""
