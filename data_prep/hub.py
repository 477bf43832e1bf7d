"""Data sets of the `datasets` package: hf:NAME, hf:NAME@SPLIT or hf:FOLDER."""

import hashlib
import json
from collections.abc import Iterator

from data_prep.inputs import HUB, InputError, Source
from data_prep.readers import Batch, Batches


def hub_batches(source: Source, index: int) -> Iterator[Batch]:
    """One JSON record a row, streamed; the split is `train` unless named.

    Raises:
        InputError: `datasets` cannot load it.
    """
    import datasets

    name, _, split = source.path.removeprefix(HUB).partition("@")
    out, digest = Batches(source, index, "json"), hashlib.sha256()
    try:
        for row in datasets.load_dataset(name, split=split or "train", streaming=True):
            record = json.dumps(row, default=str).encode()
            digest.update(record + b"\n")
            source.bytes_read += len(record)
            yield from out.add(record)
    except Exception as error:  # the package raises what its readers raise
        reason = " ".join(str(error).split())
        raise InputError(f"{source.path}: row {out.number}: {reason}") from None
    yield from out.flush()
    source.sha256 = digest.hexdigest()
    source.size = source.bytes_read
