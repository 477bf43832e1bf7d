"""Pieces of a table that several families share: attention, SwiGLU, vocabulary matrices."""

from checkpoints_tools.mappings.base import CutRows, SplitGroups, SplitRows, TensorMapping
from megatron_lt2.config.schema import ModelConfig


def renamed(source: str, target: str, *shape: int) -> TensorMapping:
    """A tensor that is the same on both sides."""
    return TensorMapping(source, (target,), shape)


def attention(model: ModelConfig, source: str, target: str) -> list[TensorMapping]:
    """Softmax attention: the fused input projection, a block a key/value head, and the output."""
    d, heads, groups = model.hidden_size, model.num_heads, model.kv_heads
    head_dim = model.attention_head_dim
    queries = heads // groups * head_dim
    gated = model.attention.output_gate
    parts = {"q_proj": queries, **({"g_proj": queries} if gated else {})}
    parts |= {"k_proj": head_dim, "v_proj": head_dim}
    return [
        SplitGroups(
            f"{source}.linear_qkv.weight",
            tuple(f"{target}.{name}.weight" for name in parts),
            (groups * sum(parts.values()), d),
            groups=groups,
            rows_per_group=tuple(parts.values()),
        ),
        renamed(f"{source}.linear_proj.weight", f"{target}.o_proj.weight", d, heads * head_dim),
    ]


def swiglu(model: ModelConfig, source: str, target: str) -> list[TensorMapping]:
    """The MLP: gate on top of up, then down."""
    d, ffn = model.hidden_size, model.ffn_width
    return [
        SplitRows(
            f"{source}.linear_fc1.weight",
            (f"{target}.gate_proj.weight", f"{target}.up_proj.weight"),
            (2 * ffn, d),
            rows=(ffn, ffn),
        ),
        renamed(f"{source}.linear_fc2.weight", f"{target}.down_proj.weight", d, ffn),
    ]


def embedding(model: ModelConfig) -> TensorMapping:
    """The embedding matrix."""
    assert model.vocab_size is not None
    return CutRows(
        "embedding.word_embeddings.weight",
        ("model.embed_tokens.weight",),
        (model.vocab_size, model.hidden_size),
    )


def head(model: ModelConfig) -> list[TensorMapping]:
    """The final norm and, if it is not the embedding, the output matrix."""
    assert model.vocab_size is not None
    d = model.hidden_size
    table = [renamed("decoder.final_layernorm.weight", "model.norm.weight", d)]
    if not model.tie_embeddings:
        shape = (model.vocab_size, d)
        table.append(CutRows("output_layer.weight", ("lm_head.weight",), shape))
    return table


def plain_decoder(model: ModelConfig, *, sandwich: bool = False) -> list[TensorMapping]:
    """Embedding, layers of attention and SwiGLU, final norm and head, named as Llama's are.

    sandwich: with the norms after mixer and MLP that Ouro has.
    """
    d = model.hidden_size
    table: list[TensorMapping] = [embedding(model)]
    for i in range(model.num_layers):
        source, target = f"decoder.layers.{i}", f"model.layers.{i}"
        norms = {"input_layernorm": "input_layernorm"}
        if sandwich:
            norms["post_mixer_layernorm"] = "input_layernorm_2"
        norms["pre_mlp_layernorm"] = "post_attention_layernorm"
        if sandwich:
            norms["post_mlp_layernorm"] = "post_attention_layernorm_2"
        table += attention(model, f"{source}.self_attention", f"{target}.self_attn")
        table += swiglu(model, f"{source}.mlp", f"{target}.mlp")
        table += [
            renamed(f"{source}.{ours}.weight", f"{target}.{theirs}.weight", d)
            for ours, theirs in norms.items()
        ]
    return [*table, *head(model)]
