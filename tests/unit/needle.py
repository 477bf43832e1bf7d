"""A toy in which the key that a query needs is known: recall of a value by its name.

A row holds NAMES tokens, each a name with a value (in random order, every name once), and then
QUESTIONS tokens that each ask for one name; the label is the value. Attention has one key that it
needs, and an indexer that learned to follow attention selects it. There are many values: of a few,
a model can leave one out and take it for the answer where it finds no other. Embeddings begin as
the sum of a name's and a value's code, so that a small test suffices.
"""

from typing import Any

import torch

from megatron_lt2.config.mixers import DSAConfig
from megatron_lt2.config.schema import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)
from megatron_lt2.data.batch import make_batch

NAMES, VALUES, QUESTIONS, ROWS = 16, 32, 8, 16
LENGTH = NAMES + QUESTIONS
TOP_K, DENSE_STEPS, STEPS = 2, 120, 150


def needle_config(**dsa: Any) -> RunConfig:
    """One layer of `dsa` and one loop; rows that are not packed."""
    settings = {
        **{"latent_dim": 32, "rope_dim": 4, "top_k": TOP_K, "dense_steps": DENSE_STEPS},
        **{"index_heads": 4, "index_dim": 16, "index_rope_dim": 0},
    }
    return RunConfig(
        model=ModelConfig(
            num_layers=1,
            hidden_size=64,
            num_heads=1,
            ffn_hidden_size=64,
            vocab_size=1 + VALUES + NAMES * VALUES + NAMES,
            pattern="dsa",
            loops=1,
            loop_residual="none",
            dsa=DSAConfig(**(settings | dsa)),
        ),
        data=DataConfig(path="unused", sequence_length=LENGTH, isolate_documents=False),
        training=TrainingConfig(
            steps=STEPS, global_batch_size=ROWS, micro_batch_size=ROWS, eval_batches=0
        ),
        optimizer=OptimizerConfig(lr=5e-3, schedule="linear", weight_decay=0.0),
        parallel=ParallelConfig(distributed_optimizer=False),
    )


def needle_batch(seed: int) -> tuple[Any, torch.Tensor]:
    """A micro-batch, and the place of the key that each question needs, [ROWS, QUESTIONS]."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(ROWS, NAMES, generator=generator).argsort(-1)
    value = torch.randint(VALUES, (ROWS, NAMES), generator=generator)
    place = torch.randint(NAMES, (ROWS, QUESTIONS), generator=generator)
    named = 1 + VALUES + order * VALUES + value
    asked = 1 + VALUES + NAMES * VALUES + order.gather(1, place)
    tokens = torch.cat([named, asked], 1)
    labels = torch.cat([torch.zeros_like(named), 1 + value.gather(1, place)], 1)
    mask = torch.cat([torch.zeros(ROWS, NAMES), torch.ones(ROWS, QUESTIONS)], 1)
    batch = make_batch(tokens, labels, mask, eod=0, isolate_documents=False, rank=0, size=1)
    return batch, place


@torch.no_grad()
def embed_codes(parts: Any) -> None:
    """Give name-value tokens the sum of two codes, questions the name's, answers the value's."""
    table = parts.model.embedding.word_embeddings.weight
    generator = torch.Generator().manual_seed(0)
    name, value = (
        torch.randn(count, table.shape[1], generator=generator) / table.shape[1] ** 0.5
        for count in (NAMES, VALUES)
    )
    first = 1 + VALUES
    table[1:first] = value
    table[first : first + NAMES * VALUES] = (name[:, None] + value).flatten(0, 1)
    table[first + NAMES * VALUES :][:NAMES] = name
    parts.optimizer.reload_model_params()


def train_needle(rank: int, world: int, config: RunConfig, steps: int) -> dict[str, Any]:
    """Recall of the true key before and after training, and what the loss came to."""
    from megatron_lt2.parallel.start import start_ranks
    from megatron_lt2.training.indexers import indexer_means
    from megatron_lt2.training.setup import build_parts
    from megatron_lt2.training.steps import train_step

    start_ranks(config.parallel, 1)
    parts = build_parts(config)
    embed_codes(parts)
    before = recall(parts.model)
    losses = []
    parts.ddp.train()
    for step in range(steps):
        batch, _ = needle_batch(step)
        result = train_step(config, parts, iter([batch]), 1)
        losses.append(float(result.loss_sum / result.tokens))
    return {
        "before": before,
        "after": recall(parts.model),
        "loss": sum(losses[-10:]) / 10,
        "means": indexer_means(config, parts.model),
    }


@torch.no_grad()
def recall(model: Any, batches: int = 4) -> float:
    """How often the key that a question needs is among the selected ones."""
    from megatron_lt2.mixers import dsa_layer

    layer = model.decoder.layers[0].self_attention
    dense, layer.dense = layer.dense, False
    seen: list[torch.Tensor] = []
    select = dsa_layer.select_keys

    def remember(*args: Any, **options: Any) -> torch.Tensor:
        seen.append(select(*args, **options))
        return seen[-1]

    dsa_layer.select_keys = remember
    hits = []
    try:
        model.eval()
        for seed in range(batches):
            batch, place = needle_batch(10_000 + seed)
            model(batch.tokens, batch.positions)
            chosen = seen.pop()[:, NAMES:]
            hits.append((chosen == place.unsqueeze(-1)).any(-1).float().mean())
    finally:
        dsa_layer.select_keys = select
        layer.dense = dense
        model.train()
    return float(torch.stack(hits).mean())
