"""Results of a run: records, derived figures and the JSON file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .._atomic import atomic_file
from .registry import OURS

Status = Literal["ok", "recorded", "wrong", "failed"]


@dataclass(frozen=True)
class Measurement:
    """The measurement of one implementation of one case.

    `status` is "ok" (measured now), "recorded" (measured earlier on the same kind of device), "wrong" (results disagree
    with the reference: no time) or "failed" (`error` says how). `gpu_microseconds` is the time on the GPU alone, with
    the host's work hidden. `worst_error` is the largest error of any element as a multiple of its tolerance.
    """

    implementation: str
    status: Status
    microseconds: float | None = None
    host_microseconds: float | None = None
    gpu_microseconds: float | None = None
    worst_error: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class CaseResult:
    """A case, its floor and every implementation's measurement; times in microseconds, bandwidth in GB/s."""

    name: str
    family: str
    timing: str
    bytes_moved: int
    copy_bandwidth: float
    measurements: dict[str, Measurement]
    note: str | None = None

    @property
    def floor(self) -> float:
        """Return the microseconds that the bytes take at the bandwidth of a copy."""
        return self.bytes_moved / self.copy_bandwidth / 1e3

    def microseconds(self, implementation: str) -> float | None:
        measurement = self.measurements.get(implementation)
        return None if measurement is None else measurement.microseconds

    def bandwidth(self, implementation: str) -> float | None:
        """Return the implementation's bandwidth in GB/s."""
        time = self.microseconds(implementation)
        return None if time is None else self.bytes_moved / time / 1e3

    def percent_of_copy(self, implementation: str) -> float | None:
        bandwidth = self.bandwidth(implementation)
        return None if bandwidth is None else 100 * bandwidth / self.copy_bandwidth

    @property
    def best_peer(self) -> str | None:
        """Return the name of the fastest implementation that is not ours."""
        times = {n: m.microseconds for n, m in self.measurements.items() if n != OURS and m.microseconds is not None}
        return min(times, key=lambda name: times[name]) if times else None

    @property
    def ratio(self) -> float | None:
        """Return our time over the best peer's: below 1, ours is faster."""
        ours, peer = self.microseconds(OURS), self.best_peer
        best = None if peer is None else self.microseconds(peer)
        return None if ours is None or best is None else ours / best

    @property
    def ours_is_sound(self) -> bool:
        return OURS not in self.measurements or self.measurements[OURS].status == "ok"

    def as_json(self) -> dict[str, Any]:
        """Return the record for the JSON file."""
        implementations = []
        for name, measurement in self.measurements.items():
            row = {key: value for key, value in asdict(measurement).items() if value is not None}
            if measurement.microseconds is not None:
                row["gbs"] = self.bandwidth(name)
                row["percent_of_copy"] = self.percent_of_copy(name)
            implementations.append(row)
        return {
            "case": self.name,
            "family": self.family,
            "timing": self.timing,
            **({} if self.note is None else {"note": self.note}),
            "bytes": self.bytes_moved,
            "floor_microseconds": self.floor,
            "best_peer": self.best_peer,
            "ratio_to_best_peer": self.ratio,
            "implementations": implementations,
        }


@dataclass
class Report:
    """All results of one run."""

    environment: dict[str, Any]
    copy_bandwidth: float
    quick: bool = False
    interrupted: bool = False
    cases: list[CaseResult] = field(default_factory=list)

    def implementations(self) -> list[str]:
        """Return every implementation's name, in the order of first appearance."""
        return list(dict.fromkeys(name for case in self.cases for name in case.measurements))

    def as_json(self) -> dict[str, Any]:
        return {
            **self.environment,
            "quick": self.quick,
            "interrupted": self.interrupted,
            "copy_gbs": self.copy_bandwidth,
            "cases": [case.as_json() for case in self.cases],
        }


def write_json(report: Report, path: Path) -> None:
    """Write the report to a temporary file beside `path` and rename it, so that `path` is never half written."""
    text = json.dumps(report.as_json(), indent=1, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, "w") as file:
        file.write(text)
