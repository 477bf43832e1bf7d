"""The MixerEntry of a linear mixer, worked out from its layout."""

from typing import TYPE_CHECKING

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.entry import MixerEntry
from megatron_lt2.recurrent.base import RecurrentMixer

if TYPE_CHECKING:
    from megatron.core.transformer.spec_utils import ModuleSpec


def linear_entry(name: str, recurrent: type[RecurrentMixer]) -> MixerEntry:
    """What the rest of the project wants to know about the linear mixer `name`."""

    def mixer(model: ModelConfig) -> RecurrentMixer:
        return recurrent(model.mixer_settings(name))

    def spec(model: ModelConfig, kernels: str) -> "ModuleSpec":
        from megatron.core.transformer.spec_utils import ModuleSpec

        from megatron_lt2.mixers.linear import LinearMixer

        settings = model.mixer_settings(name)
        return ModuleSpec(
            module=LinearMixer,
            params={"recurrent": recurrent, "settings": settings, "kernels": kernels},
        )

    def heads(model: ModelConfig) -> dict[str, int]:
        layout = mixer(model).layout
        shared = {
            f"the shared channels of model.{name} {section}": layout.rows(section)
            for section in layout.gathered_names
        }
        return {f"model.{name}.num_heads": layout.heads, **shared}

    def token_flops(model: ModelConfig, length: int) -> float:
        layout = mixer(model).layout
        conv = 2 * layout.conv_size * sum(map(layout.rows, layout.conv_names))
        return conv + mixer(model).flops()

    return MixerEntry(
        spec=spec,
        heads=heads,
        parameters=lambda model: mixer(model).layout.parameters(model.hidden_size),
        matrix_parameters=lambda model: mixer(model).layout.matrix_parameters(model.hidden_size),
        token_flops=token_flops,
    )
