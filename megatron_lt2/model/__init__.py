"""The LT2 model on megatron-core: layer specs, the looped block, initial weights and costs."""
