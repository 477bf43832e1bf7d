"""Which mixers exist. A new one is one file that defines MIXER, and one line here.

Modules are imported when a mixer is asked for, so that names can be checked without megatron-core.
"""

import importlib

from megatron_lt2.mixers.entry import MixerEntry

MIXER_MODULES = {
    "full": "megatron_lt2.mixers.attention",
    "gdn": "megatron_lt2.mixers.gdn",
}

MIXER_NAMES = tuple(MIXER_MODULES)


def get_mixer(name: str) -> MixerEntry:
    """The entry of the mixer that layer patterns call `name`."""
    return importlib.import_module(MIXER_MODULES[name]).MIXER
