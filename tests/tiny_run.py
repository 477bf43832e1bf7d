"""A tiny run for tests of the Megatron side: odd sizes, random parameters, global gradients."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from megatron_lt2.config.mixers import (
    DSAConfig,
    GDNConfig,
    GLAConfig,
    KDAConfig,
    Mamba2Config,
    NSAConfig,
    WindowConfig,
)
from megatron_lt2.config.schema import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
)

EOD = 0


def tiny_config(**changes: Any) -> RunConfig:
    """Three layers, two loops, grouped queries, a vocabulary that no rank count divides."""
    config = RunConfig(
        model=ModelConfig(
            num_layers=3,
            hidden_size=32,
            num_heads=4,
            num_kv_heads=2,
            ffn_hidden_size=48,
            vocab_size=61,
            pattern="gdn+full",
            loops=2,
            window=WindowConfig(size=5),
            nsa=NSAConfig(num_kv_heads=2, block_size=2, selected_blocks=4, window=4),
            dsa=DSAConfig(
                **{"latent_dim": 10, "rope_dim": 6, "top_k": 4, "dense_steps": 0},
                **{"index_heads": 3, "index_dim": 4, "index_rope_dim": 2},
            ),
            gdn=GDNConfig(head_k_dim=6),
            kda=KDAConfig(head_v_dim=10, rank=6),
            mamba2=Mamba2Config(head_k_dim=6, groups=2),
            gla=GLAConfig(rank=6),
        ),
        data=DataConfig(path="unused", sequence_length=24),
        training=TrainingConfig(steps=10, global_batch_size=4, micro_batch_size=1, eval_batches=0),
        optimizer=OptimizerConfig(lr=1e-2, schedule="constant", clip_grad=1.0),
        parallel=ParallelConfig(distributed_optimizer=False),
    )
    return replace(config, **changes)


def random_batch(config: RunConfig, step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step: [global_batch, sequence] tokens with EODs, and labels."""
    generator = torch.Generator().manual_seed(1000 + step)
    shape = (config.training.global_batch_size, config.data.sequence_length + 1)
    tokens = torch.randint(1, config.model.vocab_size, shape, generator=generator)
    tokens[torch.rand(shape, generator=generator) < 0.1] = EOD
    return {
        "tokens": tokens[:, :-1],
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(shape[0], shape[1] - 1),
    }


def make_random(parts: Any, config: RunConfig, seed: int = 5, rounded: bool = False) -> None:
    """Give every parameter random values, the same at any layout: at init nearly any bug passes.

    rounded: to values that bf16 holds, so that an fp32 and a bf16 model have the same weights.
    """
    from megatron_lt2.model.init import initialise

    centres = {
        "norm": (1.0, 0.3),
        "A_log": (0.0, 1.0),
        "dt_bias": (-2.0, 1.0),
        "residual": (0, 0.3),
    }
    for name, parameter in parts.model.named_parameters():
        centre, spread = next((v for k, v in centres.items() if k in name), (0.0, None))

        def draw(  # type: ignore[no-untyped-def]
            shape, generator, name=name, centre=centre, spread=spread
        ):
            # Drawn on the CPU: a GPU's generator gives other numbers.
            twin = torch.Generator().manual_seed(generator.initial_seed())
            # Branches at half size keep the residual stream, and so rounding, from growing much.
            half = (
                0.5
                if ("proj.weight" in name and "in_proj" not in name) or "linear_fc2" in name
                else 1.0
            )
            width = half * shape[-1] ** -0.5 if spread is None else spread
            values = centre + width * torch.randn(shape, generator=twin)
            return (values.bfloat16().float() if rounded else values).to(generator.device)

        if "word_embeddings" in name or "output_layer" in name:
            vocabulary = (config.model.vocab_size, config.model.hidden_size)
            parameter.lt2_init = lambda shape, generator, draw=draw, v=vocabulary: draw(
                v, generator
            )
            continue
        parameter.lt2_init = draw
    initialise(parts.model, config.model, seed)
    parts.optimizer.reload_model_params()


def build(config: RunConfig, rounded: bool = False, restart: bool = False) -> Any:
    """The training parts of this rank with random parameters.

    restart: allow a model that this process built before; its groups are given up.
    """
    from megatron.core import parallel_state

    from megatron_lt2.parallel.start import start_ranks
    from megatron_lt2.training.setup import build_parts

    if restart and parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    start_ranks(config.parallel, config.training.seed)
    parts = build_parts(config)
    make_random(parts, config, rounded=rounded)
    return parts


def feed_of(config: RunConfig, steps: range) -> Any:
    """This rank's micro-batches of the global batches of `steps`."""
    from megatron.core import parallel_state

    from megatron_lt2.data.datasets import sample_ids
    from megatron_lt2.training.steps import DataFeed

    size = config.training.global_batch_size

    def source():  # type: ignore[no-untyped-def]
        for step in steps:
            batch = random_batch(config, step)
            for ids in sample_ids(
                0,
                global_batch=size,
                micro_batch=config.training.micro_batch_size,
                rank=parallel_state.get_data_parallel_rank(),
                replicas=parallel_state.get_data_parallel_world_size(),
            ):
                yield {name: value[ids] for name, value in batch.items()}

    return DataFeed(source(), config, EOD)


def micro_batch_count(config: RunConfig) -> int:
    """Micro-batches a rank and step."""
    from megatron.core import parallel_state

    replicas = parallel_state.get_data_parallel_world_size()
    return config.training.global_batch_size // (config.training.micro_batch_size * replicas)


def global_tensors(
    parts: Any, config: RunConfig, local_of: Any, keep_dtype: bool = False
) -> dict[str, np.ndarray]:
    """`local_of(parameter)` of every parameter, put together over tensor and pipeline ranks.

    Names are those of the whole model. Of a tied embedding, the copies on the first and the last
    stage must agree.
    """
    import torch.distributed as dist

    from megatron_lt2.model.init import global_names, shards_of

    group = parts.model.pg_collection.tp
    whole = hasattr(parts.model, "decoder")  # else one layer of it
    names = global_names(parts.model) if whole else {}
    result: dict[str, np.ndarray] = {}
    for name, parameter in parts.model.named_parameters():
        local = local_of(parameter).detach().clone()
        local = local if keep_dtype else local.float()
        cut = shards_of(name, parameter, group.size(), config.model)
        if cut.axis is None or group.size() == 1:
            full = local
        else:
            pieces = [torch.empty_like(local) for _ in range(group.size())]
            dist.all_gather(pieces, local, group=group)
            sections = cut.sections.sections if cut.sections else None
            if sections:
                local_rows = [rows // group.size() for rows in sections]
                split = [torch.split(piece, local_rows) for piece in pieces]
                full = torch.cat([torch.cat(part) for part in zip(*split, strict=True)])
            else:
                full = torch.cat(pieces, dim=cut.axis)
        if "word_embeddings" in name or "output_layer" in name:
            full = full[: config.model.vocab_size]
        result[names.get(name, name)] = full.cpu().numpy()
    if not whole or parts.pipeline is None:
        return result
    stages = parts.model.pg_collection.pp
    per_stage: list[Any] = [None] * stages.size()
    dist.all_gather_object(per_stage, result, group=stages)
    merged: dict[str, np.ndarray] = {}
    for tensors in per_stage:
        for name, value in tensors.items():
            if name in merged:
                assert "word_embeddings" in name, f"{name} lies on two stages"
                np.testing.assert_array_equal(merged[name], value, err_msg="tied embeddings")
            merged[name] = value
    return merged
