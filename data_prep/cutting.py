"""The part of the input that one of many jobs takes, and what was read once all are merged.

Parts are runs of neighbouring files. Files are kept whole, but for plain files of JSON lines that
are larger than one job's share of all bytes: those are cut where a line ends. A compressed file
cannot be entered in the middle, and a parquet file, a tar, a .txt (one document) and a .json
(perhaps one array) are not made of lines.
"""

from dataclasses import replace

from data_prep.inputs import InputError, Source
from data_prep.progress import add_notes
from megatron_lt2.data.manifest import InputFacts, PieceFacts

LINES = (".jsonl", ".ndjson")
CHUNK = 1 << 16


def part_of(sources: list[Source], part: tuple[int, int]) -> list[Source]:
    """The i-th of n runs of neighbouring files and pieces of files, as even in bytes as they allow.

    Every part has at least one, and the parts in their order are the whole input in its order,
    which depends on nothing but the files and n.

    Raises:
        InputError: there are fewer of them than parts, or a file cannot be read.
    """
    number, count = part
    pieces = _pieces(sources, count)
    if count > len(pieces):
        raise InputError(
            f"--slice {number}/{count}: there are {len(sources)} input files, which make "
            f"{len(pieces)} pieces (only plain .jsonl and .ndjson files are cut); use at most so "
            "many slices"
        )
    total, done, first = sum(piece.to_read for piece in pieces), 0, 0
    for index in range(number + 1):
        first_of_part = first
        goal = total * (index + 1) / count
        last = len(pieces) - (count - index - 1)  # a piece for each part that follows
        while first < last and (first == first_of_part or done < goal):
            done += pieces[first].to_read
            first += 1
    return _joined(pieces[first_of_part : first if number < count - 1 else None])


def _pieces(sources: list[Source], count: int) -> list[Source]:
    """Files, and pieces no larger than an n-th of all bytes of those that can be cut."""
    share = sum(source.size for source in sources) / count
    pieces = []
    for source in sources:
        if not source.path.endswith(LINES) or source.size <= share:
            pieces.append(source)
            continue
        number = -int(-source.size // share)
        goals = [source.size * index // number for index in range(1, number)]
        cuts = sorted({0, source.size, *_line_starts(source, goals)})
        pieces += [replace(source, span=span) for span in zip(cuts, cuts[1:], strict=False)]
    return pieces


def _line_starts(source: Source, goals: list[int]) -> list[int]:
    """For each place in a file the first line that begins there or later; else the file's end."""
    found = []
    try:
        with open(source.path, "rb") as stream:
            for goal in goals:
                place = goal - 1  # a newline just before: the line begins at the goal itself
                stream.seek(place)
                while data := stream.read(CHUNK):
                    end = data.find(b"\n")
                    if end >= 0:
                        found.append(place + end + 1)
                        break
                    place += len(data)
                else:
                    found.append(source.size)
    except OSError as error:
        raise InputError(f"{source.path}: cannot be read: {error.strerror}") from None
    return found


def _joined(pieces: list[Source]) -> list[Source]:
    """Neighbouring pieces of one file as one."""
    out: list[Source] = []
    for piece in pieces:
        if out and piece.span and out[-1].path == piece.path and out[-1].span:
            out[-1] = replace(piece, span=(out[-1].span[0], piece.span[1]))
        else:
            out.append(piece)
    return [replace(s, span=None) if s.span == (0, s.size) else s for s in out]


def join_inputs(inputs: list[InputFacts]) -> list[InputFacts]:
    """The inputs of all parts in their order, with neighbouring pieces of one file as one.

    Raises:
        ValueError: a file was of another size for another part.
    """
    out: list[InputFacts] = []
    for entry in inputs:
        if "span" not in entry:
            out.append(entry)
            continue
        piece: PieceFacts = {"span": entry["span"], "sha256": entry["sha256"]}
        last = out[-1] if out and out[-1]["path"] == entry["path"] else None
        if last is not None and last["bytes"] != entry["bytes"]:
            raise ValueError(
                f"{entry['path']}: had {last['bytes']} bytes for one slice, {entry['bytes']} for "
                "the next; tokenize its slices again"
            )
        if last is None or "span" not in last or last["span"][1] != entry["span"][0]:
            out.append({**entry, "sha256": "", "pieces": [piece]})
            continue
        notes = dict(last.get("notes", {}))
        add_notes(notes, entry.get("notes", {}))
        last["notes"] = dict(sorted(notes.items()))
        last["documents"] += entry["documents"]
        last["skipped_empty"] += entry["skipped_empty"]
        last["span"] = [last["span"][0], entry["span"][1]]
        last["pieces"].append(piece)
    for entry in out:
        if entry.get("span") == [0, entry["bytes"]]:
            del entry["span"]
    return out
