"""CPU ranks for megatron-core, and the start of the ranks with their process groups."""
