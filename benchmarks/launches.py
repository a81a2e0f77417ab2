"""How many launches does a reduced layer take on a GPU? Counted without one, on fake CUDA tensors; no times.

    python benchmarks/launches.py                     # counts again, and rewrites docs/results/launches.json
    python benchmarks/launches.py --families          # also the most of any small family, for tests: some minutes
    python docs/make_devices.py                       # then the tables of the page

`before` in the file is what was counted before the operators for accelerators were written, with torch 2.15; it stays.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import timm
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from gtp_vit import GTP, Method, ToMe, patch
from gtp_vit.methods import known_methods
from gtp_vit.methods.gtp_plus.calibration import Calibration
from gtp_vit.methods.gtp_plus.method import GTPPlus
from gtp_vit.methods.identity import Identity
from gtp_vit.patching import tower_of
from gtp_vit.profiling.launches import WaitsError, count_launches
from gtp_vit.profiling.slicing import slicing_like
from gtp_vit.testing import cases, families
from support.settings import DEFAULTS, OPTIONS

FILE = Path(__file__).parent.parent / "docs/results/launches.json"
MODEL = "deit_small_patch16_224"


def settings() -> dict[str, Method]:
    """The rows of the table, by their names."""
    model = timm.create_model(MODEL).eval()
    sliced = slicing_like(tower_of(patch(model, ToMe(r=8))).reducer)
    assert sliced is not None
    learned, with_registers = (Calibration(torch.zeros(12, 384), (14, 14), at, torch.zeros(0)) for at in ((), (0, 5)))
    rows: dict[str, Method] = {
        "unreduced": Identity(),
        "slicing": sliced,
        "ToMe": ToMe(r=8),
        "GTP": GTP(propagate=8),
        "GTP, select=class": GTP(propagate=8, select="class"),
        "GTP+": GTPPlus(remove=8),
        "GTP+, calibrated": GTPPlus(remove=8, calibration=learned.to_text()),
        "GTP+, calibrated, registers": GTPPlus(remove=8, calibration=with_registers.to_text()),
    }
    taken = {type(method).__name__ for method in rows.values()}
    return rows | {kind.__name__: kind() for kind in known_methods().values() if kind.__name__ not in taken}


def count(method: Method, depth: int = 12) -> dict[str, Any] | None:
    """Launches of a layer and of the whole model without its head, and maps; None if it waits for the device."""
    fast: Any = patch(timm.create_model(MODEL, depth=depth).eval(), method, kernels="torch", quiet=True)
    try:
        found = count_launches(fast)
    except WaitsError:
        return None
    return {"layer": found.per_layer, "model": found.total, "maps": len(found.maps), "problems": len(found.problems)}


def most_of_families() -> dict[str, int]:
    """For each method of the battery the launches of a layer above the unreduced model's, the most of all families."""
    most: dict[str, int] = {}
    for family in families.NAMES:
        factory = {family: families.factory_of(family)}
        plain = count_launches(patch(families.make(family), Identity())).per_layer
        methods = [*DEFAULTS, *(OPTIONS if family in families.DIVERSE else [])]
        for case in cases(methods, factory):
            try:
                found = count_launches(patch(case.original.model, case.method, kernels="torch", quiet=True))
            except WaitsError:
                continue
            most[str(case.method)] = max(most.get(str(case.method), 0), found.per_layer - plain)
        print(f"{family}: {plain}", flush=True)
    return most


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    stored = json.loads(FILE.read_text()) if FILE.exists() else {"before": {}, "families": {}}
    stored |= {"model": MODEL, "dtype": "float16", "torch": torch.__version__}
    stored["now"] = {name: count(method) for name, method in settings().items()}
    if "--families" in sys.argv:
        stored["families"] = most_of_families()
    FILE.write_text(json.dumps(stored, indent=1) + "\n")
    for name, found in stored["now"].items():
        print(name, found)


if __name__ == "__main__":
    main()
