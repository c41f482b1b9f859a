"""How far log-probabilities that were recorded are from those that are computed again, judged as `samebits score` does.

    found = samebits.mismatch(recorded, recomputed, mask, gate="nemo-rl")
    assert found.ok, found

In a test of pytest the fixture `samebits_mismatch` takes the same and fails with the lines; in a run of TRL `samebits.trl` stops.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Sequence

from . import _native


@dataclass(frozen=True)
class Mismatch:
    """What was found. As a text: the lines of `samebits score`."""

    ok: bool
    """Whether every gate holds."""
    metrics: dict[str, Any]
    """What `samebits score --json` prints: metrics by name, `by_place` and `by_length`, `gates` with their thresholds and sources."""
    text: str = field(repr=False)

    def __str__(self) -> str:
        return self.text


def mismatch(
    recorded: Any,
    recomputed: Any,
    mask: Any = None,
    *,
    gate: str | Sequence[str] = "bitwise",
    dtype: str = "bf16",
    thresholds: str | None = None,
    flips: tuple[int, int] | None = None,
) -> Mismatch:
    """Compares log-probabilities by sequence: lists, arrays or tensors `[B,T]`, of which those count whose `mask[B,T]` is 1 (all
    without it). Both are rounded to f32. `gate` names what must hold, one or several: "bitwise", "nemo-rl", "ws1", or those of
    `thresholds`, the text of a table like contract/mismatch.toml. `dtype` is that of the models. `flips`, where experts were recorded:
    how many choices of routers are others, and of how many, as `Engine.flips` and `CausalLM.flips` have them.
    """
    old, new, keep = (None if rows is None else _rows(rows) for rows in (recorded, recomputed, mask))
    assert old is not None and new is not None
    for name, rows in (("recomputed", new), ("mask", keep)):
        if rows is not None and [len(row) for row in rows] != [len(row) for row in old]:
            raise ValueError(f"{name}: its sequences have the lengths {[len(row) for row in rows]}, those recorded {[len(row) for row in old]}")
    if keep is not None and any(counts not in (0, 1) for row in keep for counts in row):
        raise ValueError("mask: holds more than 0 and 1; 1 is for tokens that were sampled")
    texts = []
    for b, row in enumerate(old):
        there = [t for t in range(len(row)) if keep is None or keep[b][t] == 1]
        texts.append(([float(row[t]) for t in there], [float(new[b][t]) for t in there]))
    if not any(row for row, _ in texts):
        raise ValueError("recorded: there is no token; nothing can be compared")
    gates = [gate] if isinstance(gate, str) else list(gate)
    text, found, ok = _native.mismatch(texts, gates, dtype, thresholds, flips)
    return Mismatch(ok, json.loads(found), text)


def _rows(rows: Any) -> list[list[float]]:
    if hasattr(rows, "detach"):
        rows = rows.detach().float().cpu()
    return [row.tolist() if hasattr(row, "tolist") else list(row) for row in rows]
