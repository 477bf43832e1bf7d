"""Configuration of LT2 models (looped hybrids of linear and softmax attention, arXiv 2605.20670).

Two names differ from what readers of other configurations expect. `mixers` names the mixer of every
layer; transformers reserves `layer_types` for its own names and checks its length against its own
caches. `loops` says how often the whole stack runs: `num_hidden_layers` counts stored layers, not
layers visited.
"""

from typing import Any

from transformers import PretrainedConfig

from ..recurrent.names import RECURRENT

ATTENTION = ("full", "window")
SPARSE = ("nsa", "dsa")
MIXERS = (*ATTENTION, *SPARSE, *RECURRENT)

PAPER_GDN: dict[str, Any] = {
    "num_heads": 16,
    "head_k_dim": 96,
    "head_v_dim": 192,
    "norm_eps": 1e-5,
    "conv_size": 4,
    "allow_neg_eigval": False,
    "a_init_max": 16.0,
    "dt_min": 1e-3,
    "dt_max": 1e-1,
}
"""Settings of the paper's Gated DeltaNet layers."""


class LT2Config(PretrainedConfig):
    """Every architectural number of an LT2 model; the defaults are the paper's 1.3B hybrid.

    Args:
        vocab_size: token ids the model knows.
        hidden_size: width d of the residual stream.
        intermediate_size: inner width of the SwiGLU.
        num_hidden_layers: stored layers N.
        mixers: mixer of each layer: "full" (softmax attention), "window" (the same, looking back a
            window only), sparse attention or a linear mixer (`MIXERS`); by default every fifth
            layer is "full" and the others "gdn".
        mixer_settings: of each linear or sparse mixer in `mixers`, its settings by name: heads,
            channels, initial values and what else its file asks for. Default: `PAPER_GDN` for "gdn"
            if `mixers` is left out too.
        num_attention_heads: heads of attention layers.
        num_key_value_heads: their key/value heads; default: num_attention_heads.
        head_dim: channels of such a head; default: hidden_size / num_attention_heads.
        attention_output_gate: multiply the attention output by sigmoid(x W_g).
        loops: T, how often the whole stack runs with the same weights.
        loop_residual: "per_channel" adds rho_t * (input of loop t) to the output of loop t, or
            "none".
        norm_mode: "pre" has a norm before mixer and SwiGLU, "sandwich" one behind them too.
        inter_loop_norm: the final norm ends every loop, not the last only.
        exit_gate: there is a gate that says how likely a token leaves after each loop.
        exit_threshold: take for each token the first loop by which it has left with this
            probability; default: the last loop.
        exit_step: take this loop (from 1) for every token and run no later one.
        window_size: tokens that a token of a "window" layer sees, itself included.
        loop_windows: window of every layer in every loop [loops][layers], null for all tokens, if
            "full" and "window" layers change between loops.
        rope_theta: base of the rotary frequencies of attention layers.
        rope_interleaved: rotate neighbouring channels instead of the two halves of a head.
        rms_norm_eps: epsilon of the block norms and the final norm.
        max_position_embeddings: tokens a training sequence had.
        tie_word_embeddings: the embedding matrix is the output head.
        use_cache: keep states between calls (ignored while training).

    Raises:
        ValueError: numbers that do not fit together.
    """

    model_type = "lt2"
    keys_to_ignore_at_inference = ["cache", "past_key_values"]

    def __init__(
        self,
        vocab_size: int = 128256,
        hidden_size: int = 2048,
        intermediate_size: int = 5632,
        num_hidden_layers: int = 21,
        mixers: list[str] | None = None,
        mixer_settings: dict[str, dict[str, Any]] | None = None,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        attention_output_gate: bool = True,
        window_size: int = 2048,
        loop_windows: list[list[int | None]] | None = None,
        loops: int = 4,
        loop_residual: str = "per_channel",
        norm_mode: str = "pre",
        inter_loop_norm: bool = False,
        exit_gate: bool = False,
        exit_threshold: float | None = None,
        exit_step: int | None = None,
        rope_theta: float = 10000.0,
        rope_interleaved: bool = False,
        rms_norm_eps: float = 1e-6,
        max_position_embeddings: int = 4096,
        tie_word_embeddings: bool = True,
        bos_token_id: int | None = None,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        use_cache: bool = True,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        if mixer_settings is None:
            mixer_settings = {"gdn": PAPER_GDN} if mixers is None else {}
        self.mixer_settings = {name: dict(values) for name, values in mixer_settings.items()}
        self.mixers = (
            list(mixers)
            if mixers is not None
            else ["full" if i % 5 == 4 else "gdn" for i in range(num_hidden_layers)]
        )
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads or num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.attention_output_gate = attention_output_gate
        self.window_size = window_size
        self.loop_windows = loop_windows
        self.loops = loops
        self.loop_residual = loop_residual
        self.norm_mode = norm_mode
        self.inter_loop_norm = inter_loop_norm
        self.exit_gate = exit_gate
        self.exit_threshold = exit_threshold
        self.exit_step = exit_step
        self.rope_theta = rope_theta
        self.rope_interleaved = rope_interleaved
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        self._check()
        super().__init__(
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **kwargs,
        )

    def _check(self) -> None:
        if len(self.mixers) != self.num_hidden_layers:
            raise ValueError(
                f"mixers names {len(self.mixers)} layers, "
                f"num_hidden_layers is {self.num_hidden_layers}"
            )
        unknown = sorted(set(self.mixers) - set(MIXERS))
        if unknown:
            raise ValueError(f"mixers: unknown {unknown}; known are {list(MIXERS)}")
        known = [*SPARSE, *RECURRENT]
        unknown = sorted(set(self.mixer_settings) - set(known))
        if unknown:
            raise ValueError(f"mixer_settings: unknown {unknown}; known are {known}")
        missing = sorted(set(self.mixers) - set(ATTENTION) - set(self.mixer_settings))
        if missing:
            raise ValueError(f"mixer_settings says nothing about {missing}, which mixers names")
        if self.window_size < 1:
            raise ValueError(f"window_size must be at least 1, got {self.window_size}")
        windows = self.loop_windows
        if windows is not None:
            counts = {len(row) for row in windows}
            if len(windows) != self.loops or counts != {self.num_hidden_layers}:
                raise ValueError(
                    f"loop_windows has {len(windows)} rows of {sorted(counts)} windows for "
                    f"{self.loops} loops of {self.num_hidden_layers} layers"
                )
            if any(size is not None and size < 1 for row in windows for size in row):
                raise ValueError("loop_windows: a window must be at least 1")
        if self.loops < 1:
            raise ValueError(f"loops must be at least 1, got {self.loops}")
        if self.loop_residual not in ("per_channel", "none"):
            raise ValueError(
                f"loop_residual must be 'per_channel' or 'none', got {self.loop_residual!r}"
            )
        if self.norm_mode not in ("pre", "sandwich"):
            raise ValueError(f"norm_mode must be 'pre' or 'sandwich', got {self.norm_mode!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if set(self.mixers) & set(ATTENTION) and self.head_dim % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {self.head_dim}")

    def window_of(self, loop: int, layer: int) -> int | None:
        """Tokens that an attention layer sees in a loop; None: all so far."""
        if self.loop_windows is not None:
            return self.loop_windows[loop][layer]
        return self.window_size if self.mixers[layer] == "window" else None

    def attention_windows(self) -> set[int | None]:
        """All that "full" and "window" layers have."""
        return {
            self.window_of(loop, layer)
            for loop in range(self.loops)
            for layer, mixer in enumerate(self.mixers)
            if mixer in ATTENTION
        }
