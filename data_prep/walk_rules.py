"""What must hold for ids and keys of any token file."""

import numpy as np

from megatron_lt2.data.manifest import Manifest


class Keys:
    """Keys of samples: numbers that only grow need no memory; others are kept."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._others: set[str] = set()

    def repeats(self, key: str) -> bool:
        """Whether a key came before."""
        group, _, number = key.rpartition("_")
        if number.isdigit() and len(number) == 12 and int(number) > self._last.get(group, -1):
            self._last[group] = int(number)
            return False
        if number.isdigit() and len(number) == 12:
            return True
        if key in self._others:
            return True
        self._others.add(key)
        return False


class Ids:
    """What must hold for the ids of a document."""

    def __init__(self, manifest: Manifest) -> None:
        tokenizer, options = manifest["tokenizer"], manifest.get("options")
        self.vocab_size = tokenizer["vocab_size"]
        self.eos = tokenizer["eos_id"] if manifest["append_eod"] else None
        self.bos = tokenizer["bos_id"] if options and options["prepend_bos"] else None

    def fault(self, ids: np.ndarray, first: int, lengths: np.ndarray) -> str:
        """The first fault of consecutive documents, or an empty text."""
        ends = np.cumsum(lengths)
        bad = (ids >= self.vocab_size) | (ids < 0)
        if bad.any():
            place = int(bad.argmax())
            document = first + int(np.searchsorted(ends, place, side="right"))
            return (
                f"document {document}: id {ids[place]} is outside the vocabulary of "
                f"{self.vocab_size}"
            )
        if (lengths < 1).any():
            return f"document {first + int((lengths < 1).argmax())}: has no tokens"
        for token, places, what in (
            (self.eos, ends - 1, "does not end with EOS"),
            (self.bos, ends - lengths, "does not begin with BOS"),
        ):
            if token is not None and (wrong := ids[places] != token).any():
                return f"document {first + int(wrong.argmax())}: {what} {token}"
        return ""
