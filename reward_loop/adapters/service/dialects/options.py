"""How texts and fields of other trainers become the parts of a sample."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["DialectOptions"]


@dataclass(frozen=True, slots=True)
class DialectOptions:
    """Options of the dialects."""

    strip: tuple[str, ...] = ()
    """Texts that are removed from the end of responses: end-of-text tokens, which some trainers send."""
    field_paths: Mapping[str, str] = field(default_factory=dict)
    """For NeMo-Gym: the field of a task that contains a part of the sample, as in ``reward-loop score --field``."""

    def without_end(self, text: str) -> str:
        """Return a response without the texts of `strip` at its end."""
        while ends := [end for end in self.strip if text.endswith(end)]:
            text = text.removesuffix(ends[0])
        return text
