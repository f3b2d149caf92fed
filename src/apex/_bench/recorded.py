"""Recorded times of NVIDIA apex per device, which has our import name and cannot be loaded beside us."""

from __future__ import annotations

import json
from pathlib import Path

from .results import Measurement

_HERE = Path(__file__).resolve()
# A wheel holds the recordings inside the package, a source tree beside `src`.
DIRECTORIES = (_HERE.parent / "peers", _HERE.parents[3] / "benchmarks" / "peers")

HOST = " host"  # suffix of a case's name if the host's time was recorded


def recorded_measurements(
    device_stem: str, directories: tuple[Path, ...] = DIRECTORIES
) -> dict[str, dict[str, Measurement]]:
    """Return the measurements recorded on a device: case name -> implementation ("nvidia apex", ...) -> measurement.

    `device_stem` is the normalised device name, such as "nvidia_h200". Without a recording the result is empty.
    """
    path = next((p for d in directories if (p := d / f"{device_stem}.json").is_file()), None)
    if path is None:
        return {}
    rows = [row for row in json.loads(path.read_text()) if row["impl"].startswith("apex")]
    host = {
        (row["case"].removesuffix(HOST), row["impl"]): 1e3 * row["ms"] for row in rows if row["case"].endswith(HOST)
    }
    measurements: dict[str, dict[str, Measurement]] = {}
    for row in rows:
        if row["case"].endswith(HOST):
            continue
        name = f"nvidia {row['impl']}"
        if "ms" in row:
            busy = host.get((row["case"], row["impl"]))
            measurement = Measurement(name, "recorded", microseconds=1e3 * row["ms"], host_microseconds=busy)
        else:
            measurement = Measurement(name, "failed", error=row.get("err", "no time was recorded"))
        measurements.setdefault(row["case"], {})[name] = measurement
    return measurements
