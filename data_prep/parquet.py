"""Rows of a parquet file; pyarrow checks the footer, and each page as it is read."""

from collections.abc import Iterator
from typing import Any, BinaryIO

from data_prep.inputs import InputError, Source
from data_prep.readers import Batch, Batches, Fields

ROWS = 256
"""Rows decoded at a time; small, because a row may be a long document."""


def parquet_batches(
    source: Source, index: int, stream: BinaryIO, fields: Fields
) -> Iterator[Batch]:
    """Texts (and names) as bytes: undecoded, so that bad UTF-8 is found with its row.

    A dotted key goes into structs, unless a column has that very name.

    Raises:
        InputError: the file is broken, or has no such column of strings.
    """
    import pyarrow
    import pyarrow.parquet

    out = Batches(source, index, "plain", ids=fields.id_key is not None)
    try:
        table = pyarrow.parquet.ParquetFile(stream)
        text = _column(source, table.schema_arrow, fields.text_key, text=True)
        name = None
        if fields.id_key is not None:
            name = _column(source, table.schema_arrow, fields.id_key, text=False)
        wanted = [path[0] for path in (text, name) if path is not None]
        rows = table.metadata.num_rows
        for part in table.iter_batches(batch_size=ROWS, columns=list(dict.fromkeys(wanted))):
            records = _values(part, text).cast(pyarrow.large_binary()).to_pylist()
            names = [""] * len(records)
            if name is not None:
                names = ["" if n is None else str(n) for n in _values(part, name).to_pylist()]
            for record, said in zip(records, names, strict=True):
                yield from out.add(record, said)
            source.bytes_read = out.number * source.size // max(1, rows + 1)
        yield from out.flush()
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{source.path}: broken parquet file near row {out.number}: {reason}"
        ) from None


def _column(source: Source, schema: Any, key: str, *, text: bool) -> list[str]:
    """The way to a column: its name, and the names of the fields inside it."""
    import pyarrow

    names = schema.names
    path = [key] if key in names else key.split(".")
    option = "--text-key" if text else "--id-key"
    missing = InputError(
        f"{source.path}: no column {key!r} (it has {', '.join(names)}); see {option}",
        "missing_key",
    )
    if path[0] not in names:
        raise missing
    kind = schema.field(path[0]).type
    for part in path[1:]:
        if not pyarrow.types.is_struct(kind) or kind.get_field_index(part) < 0:
            raise missing
        kind = kind.field(part).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    strings = pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)
    if text and not strings:
        raise InputError(f"{source.path}: column {key!r} holds {kind}, not strings", "wrong_type")
    return path


def _values(part: Any, path: list[str]) -> Any:
    import pyarrow.compute

    column = part.column(part.schema.get_field_index(path[0]))
    for name in path[1:]:
        column = pyarrow.compute.struct_field(column, name)
    return column
