"""Which mixers exist.

Linear mixers are listed in `megatron_lt2/recurrent/names.py`: their files describe a recurrence,
and `linear.py` makes a layer of it. `ATTENTION` names the layers that are not recurrent; such a
file defines MIXER. Modules are imported when a mixer is asked for, so that names can be checked
without torch and megatron-core.
"""

import importlib

from megatron_lt2.mixers.entry import MixerEntry
from megatron_lt2.recurrent.names import RECURRENT, recurrent_mixer

ATTENTION = {
    "full": "megatron_lt2.mixers.attention",
    "window": "megatron_lt2.mixers.window",
    "nsa": "megatron_lt2.mixers.nsa",
    "dsa": "megatron_lt2.mixers.dsa",
}

MIXER_NAMES = (*ATTENTION, *RECURRENT)


def get_mixer(name: str) -> MixerEntry:
    """The entry of the mixer that layer patterns call `name`."""
    if name in RECURRENT:
        from megatron_lt2.mixers.linear_entry import linear_entry

        return linear_entry(name, recurrent_mixer(name))
    return importlib.import_module(ATTENTION[name]).MIXER
