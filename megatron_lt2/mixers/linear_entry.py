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
        found = {f"model.{name}.num_heads": layout.heads}
        for section in layout.gathered_names:
            # What all heads share: a bottleneck's width, or the groups' channels.
            setting = f"model.{name}.rank"
            if layout.sections[section].rank is None:
                setting = f"model.{name}.groups x model.{name}.head_k_dim"
            found[setting] = layout.rows(section)
        return found

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
