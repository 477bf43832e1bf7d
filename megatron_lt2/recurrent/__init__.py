"""The linear mixers without anything that knows a process group: one file a mixer.

A file says which projections the mixer has, which parameters of its own, how gates become decays,
and which kernel runs. `megatron_lt2.mixers.linear` makes a tensor-parallel layer of it for
training, `megatron_lt2.hf` a plain one for exports, which carry copies of these files.
"""
