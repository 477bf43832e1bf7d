"""The model's mathematics in plain PyTorch: right on every device, fast enough to train on a CPU.

These modules import nothing but torch and each other, by relative import, because they are copied
as they are into exported models. GPU kernels with the same signatures are in
`megatron_lt2.kernels`.

Shape suffixes used here: B batch, T time, H heads, K key channels, V value channels, D channels, W
convolution taps, N documents (N = B without `cu_seqlens`), C tokens a chunk, M chunks.
"""
