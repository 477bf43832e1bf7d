"""Token mixers: one file each, all sitting in megatron-core's self_attention slot. See registry.py."""
