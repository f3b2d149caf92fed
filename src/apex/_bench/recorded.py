"""Times of NVIDIA apex, recorded per device: it has our import name and cannot be loaded beside us."""

from __future__ import annotations

import json
from pathlib import Path

from .results import Measurement

_HERE = Path(__file__).resolve()
# In a wheel the recordings lie inside the package, in a source tree beside `src`.
DIRECTORIES = (_HERE.parent / "peers", _HERE.parents[3] / "benchmarks" / "peers")

HOST = " host"  # the end of a case's name where the time of the host was recorded


def recorded_measurements(
    device_stem: str, directories: tuple[Path, ...] = DIRECTORIES
) -> dict[str, dict[str, Measurement]]:
    """Case name -> implementation ("nvidia apex", "nvidia apex_fast", ...) -> what was recorded on that device.

    `device_stem` is the normalised device name, such as "nvidia_h200"; without a recording the mapping is empty.
    """
    path = next((p for d in directories if (p := d / f"{device_stem}.json").is_file()), None)
    if path is None:
        return {}
    rows = [row for row in json.loads(path.read_text()) if row["impl"].startswith("apex")]
    host = {
        (row["case"].removesuffix(HOST), row["impl"]): 1e3 * row["ms"] for row in rows if row["case"].endswith(HOST)
    }
    found: dict[str, dict[str, Measurement]] = {}
    for row in rows:
        if row["case"].endswith(HOST):
            continue
        name = f"nvidia {row['impl']}"
        if "ms" in row:
            busy = host.get((row["case"], row["impl"]))
            measurement = Measurement(name, "recorded", microseconds=1e3 * row["ms"], host_microseconds=busy)
        else:
            measurement = Measurement(name, "failed", error=row.get("err", "no time was recorded"))
        found.setdefault(row["case"], {})[name] = measurement
    return found
