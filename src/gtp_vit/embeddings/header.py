"""The header of a shard, in the metadata of its file: its run, and its images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

VERSION = 2  # of shards and of the manifest; files of version 1 proved their vectors only
KEYS = {"version", "shard", "first", "images", "embedded", "unreadable", "not_finite", "run", "fingerprint"}


@dataclass(frozen=True)
class ShardHeader:
    """A shard without its images."""

    shard: int  # its number
    first: int  # place of the first image
    images: int  # how many it covers
    embedded: int  # how many of them have an embedding
    unreadable: Mapping[int, str]  # place -> name of the image and why
    not_finite: Mapping[int, str]  # place -> name of the image and what the model returned for it
    run: Mapping[str, object]  # the identity of the run
    fingerprint: str = ""  # of all that the file holds

    def to_dict(self) -> dict[str, object]:
        """As it is stored."""
        return {
            "version": VERSION,
            "shard": self.shard,
            "first": self.first,
            "images": self.images,
            "embedded": self.embedded,
            "unreadable": {str(place): text for place, text in self.unreadable.items()},
            "not_finite": {str(place): text for place, text in self.not_finite.items()},
            "run": self.run,
            "fingerprint": self.fingerprint,
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, object]) -> ShardHeader | None:
        """As it was stored; None if something is missing, of another type, or not ours."""
        numbers = [stored.get(name) for name in ("shard", "first", "images", "embedded")]
        shard, first, images, embedded = (number if type(number) is int else -1 for number in numbers)
        unreadable, not_finite = _texts(stored.get("unreadable")), _texts(stored.get("not_finite"))
        run, fingerprint = stored.get("run"), stored.get("fingerprint")
        if stored.keys() != KEYS or min(shard, first, images, embedded) < 0 or unreadable is None or not_finite is None:
            return None
        if not isinstance(run, dict) or not isinstance(fingerprint, str):
            return None
        return cls(shard, first, images, embedded, unreadable, not_finite, run, fingerprint)


def _texts(stored: object) -> dict[int, str] | None:
    """A text for each place; None if it is something else."""
    if not isinstance(stored, dict):
        return None
    if not all(key.isdecimal() and isinstance(text, str) for key, text in stored.items()):
        return None
    return {int(place): text for place, text in stored.items()}
