"""Token mixers: one file each, all in megatron-core's self_attention slot. See registry.py."""
