"""The families, and which one a folder or a run belongs to."""

from collections.abc import Mapping
from typing import Any

from checkpoints_tools.mappings import llama, lt2, ouro
from checkpoints_tools.mappings.family import Family
from megatron_lt2.config.schema import RunConfig

FAMILIES: Mapping[str, Family] = {
    family.name: family for family in (lt2.FAMILY, ouro.FAMILY, llama.FAMILY)
}
PREFERRED = ("ouro", "llama", "lt2")
"""For an export, the first that fits: what other programs know comes before what only ours do."""


def family_of_config(config: Mapping[str, Any], where: object) -> Family:
    """The family that a config.json names.

    Raises:
        ValueError: it names none that we know.
    """
    kind = str(config.get("model_type"))
    if kind not in FAMILIES:
        raise ValueError(
            f"{where}: model_type is {kind!r}; there is a conversion for "
            f"{', '.join(sorted(FAMILIES))} only"
        )
    return FAMILIES[kind]


def family_of_run(config: RunConfig, name: str | None = None) -> Family:
    """The family to export a run as: `name`, else the first that has such a model.

    Raises:
        ValueError: the family named has no such model; the setting that says so is named.
    """
    if name is None:
        name = next(n for n in PREFERRED if n == "lt2" or FAMILIES[n].fits(config))
    family = FAMILIES[name]
    family.values(config)  # refuses with its reason
    return family
