"""How far a run is: documents, how many slices are durable, and what each input gave."""

from dataclasses import dataclass, field
from typing import Any

from data_prep.inputs import Source
from data_prep.journal import Journal
from megatron_lt2.data.manifest import InputFacts


@dataclass
class Tally:
    """Counts for each input, and those since the last slice."""

    sources: list[Source]
    documents: dict[int, int] = field(default_factory=dict)
    notes: dict[int, dict[str, int]] = field(default_factory=dict)
    _slice: dict[int, dict[str, Any]] = field(default_factory=dict)
    _hashed: int = 0
    """Sources whose checksum stands in the journal."""

    def add(self, source: int, documents: int, notes: dict[str, int]) -> None:
        """Count what a batch gave."""
        self.documents[source] = self.documents.get(source, 0) + documents
        add_notes(self.notes.setdefault(source, {}), notes)
        entry = self._slice.setdefault(source, {"documents": 0, "notes": {}})
        entry["documents"] += documents
        add_notes(entry["notes"], notes)

    def total(self) -> dict[str, int]:
        """Notes of all inputs together."""
        total: dict[str, int] = {}
        for notes in self.notes.values():
            add_notes(total, notes)
        return total

    def take_slice(self, finished: int) -> dict[str, Any]:
        """What to write into the journal: counts since the last time, new checksums.

        Args:
            finished: sources before this one have been read to their end.
        """
        counts = {str(index): entry for index, entry in self._slice.items()}
        hashes = {str(i): self.sources[i].sha256 for i in range(self._hashed, finished)}
        self._slice, self._hashed = {}, max(self._hashed, finished)
        return {"counts": counts, "sha256": hashes}

    def restore(self, taken: dict[str, Any]) -> None:
        """Count a slice of an earlier run."""
        for index, entry in taken["counts"].items():
            self.add(int(index), entry["documents"], entry["notes"])
        for index, sha256 in taken["sha256"].items():
            self.sources[int(index)].sha256 = sha256
            self._hashed = max(self._hashed, int(index) + 1)
        self._slice = {}

    def inputs(self) -> list[InputFacts]:
        """What the manifest says of the inputs."""
        out: list[InputFacts] = []
        for index, source in enumerate(self.sources):
            notes = self.notes.get(index, {})
            facts: InputFacts = {
                "path": source.path,
                "bytes": source.size,
                "mtime_ns": source.mtime_ns,
                "sha256": source.sha256,
                "documents": self.documents.get(index, 0),
                "skipped_empty": notes.get("empty", 0),
                "notes": dict(sorted(notes.items())),
            }
            if source.span is not None:
                facts["span"] = list(source.span)
            out.append(facts)
        return out


def add_notes(into: dict[str, int], notes: dict[str, int]) -> None:
    """Add counts to counts."""
    for kind, count in notes.items():
        into[kind] = into.get(kind, 0) + count


def usable_slices(
    journal: Journal, key: dict[str, Any], sources: list[Source]
) -> list[dict[str, Any]]:
    """The finished slices of an earlier run that count for this one.

    Those before the first input that is another one now, if tokenizer and options are the same.
    The journal is cut back to them; its first line says what they belong to.
    """
    now = [[source.path, source.size, source.mtime_ns, *(source.span or ())] for source in sources]
    lines = journal.lines
    kept: list[dict[str, Any]] = []
    if lines and lines[0].get("key") == key:
        before = lines[0]["inputs"]
        same = 0
        while same < min(len(before), len(now)) and before[same] == now[same]:
            same += 1
        kept = [line for line in lines[1:] if line["next"][0] < same]
        if before == now:
            kept = lines[1:]
    if not lines or len(kept) != len(lines) - 1 or lines[0].get("inputs") != now:
        journal.rewrite([{"key": key, "inputs": now}, *kept])
    return kept
