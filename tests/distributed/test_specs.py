"""LT2 layers in a model that is not ours: megatron-core's own GPTModel takes the layer specs."""

import numpy as np

from tests.ranks import run_ranks
from tests.tiny_run import random_batch, tiny_config


def _stock_model_loss(rank, world, names):
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    from megatron_lt2.mixers.norm import RMSNorm
    from megatron_lt2.model.core_config import transformer_config
    from megatron_lt2.model.specs import layer_spec
    from megatron_lt2.parallel.start import start_ranks

    config = tiny_config()
    config.model.num_layers = len(names)
    start_ranks(config.parallel, 1)
    model = GPTModel(
        config=transformer_config(config, on_gpu=False),
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer_spec(name, config.model) for name in names], layer_norm=RMSNorm
        ),
        vocab_size=64,
        max_sequence_length=config.data.sequence_length,
        position_embedding_type="rope",
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = 0.2 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + spread if "norm" in name else spread)
    batch = random_batch(config, 0)
    positions = torch.arange(batch["tokens"].shape[1]).expand_as(batch["tokens"])
    loss = model(batch["tokens"], positions, None, labels=batch["labels"]).mean()
    loss.backward()
    gradients = {n: float(p.grad.abs().max()) for n, p in model.named_parameters()}
    return float(loss.detach()), gradients


def test_stock_gpt_model_takes_lt2_layers():
    loss, gradients = run_ranks(1, _stock_model_loss, ["gdn", "full", "gdn"])[0]
    assert 3 < loss < 12
    assert any("A_log" in name for name in gradients)
    assert any("linear_qkv" in name for name in gradients)
    silent = [name for name, largest in gradients.items() if not largest > 0]
    assert silent == []


def test_order_of_layers_counts():
    one = run_ranks(1, _stock_model_loss, ["gdn", "full", "gdn"])[0][0]
    other = run_ranks(1, _stock_model_loss, ["full", "gdn", "gdn"])[0][0]
    assert not np.isclose(one, other, rtol=1e-4)
