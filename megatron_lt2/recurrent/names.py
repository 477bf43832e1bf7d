"""Names of the linear mixers and the file of each, for training and for exported models.

Files are imported when a mixer is asked for: names can be checked without torch, and an export
carries the files of its own mixers only. The import goes by this module's own name, because in an
export the files lie flat: `recurrent.gdn` is to `recurrent.names` what `recurrent_gdn` is to
`recurrent_names`.

This file imports no other one, not even for type checkers: an export's configuration file needs
it, and earlier transformers copy what that file imports itself, but look for the rest.
"""

import importlib
from typing import Any

RECURRENT = {
    "gdn": "gdn",
    "kda": "kda",
    "deltanet": "deltanet",
    "mamba2": "mamba2",
    "retnet": "retnet",
    "gla": "gla",
    "linear": "linear",
    "mlstm": "mlstm",
    "hgrn2": "hgrn2",
}
"""Name of a mixer in layer patterns, and its file."""


def recurrent_mixer(name: str) -> Any:
    """The class of the linear mixer that layer patterns call `name`, a `base.RecurrentMixer`."""
    return importlib.import_module(__name__.removesuffix("names") + RECURRENT[name]).MIXER
