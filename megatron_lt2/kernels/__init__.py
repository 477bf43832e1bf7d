"""The operations of `megatron_lt2.ops` with a choice of implementation.

`backend="torch"` calls the plain PyTorch twin, `backend="fla"` the Triton kernels of
flash-linear-attention. FLA and Triton are imported when a kernel is first called, never before:
without them everything else works.
"""
