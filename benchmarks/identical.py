"""Are all outputs what they were? For changes that are not meant to change a result.

    python benchmarks/identical.py before.json    # in the old tree: records
    python benchmarks/identical.py before.json    # in the new tree: compares, and names what differs
    python benchmarks/identical.py before.json GTPPlus    # only the cases that have this in their name

Every method and option of the conformance battery on every small model, with native kernels and with torch operators:
output, all tokens, gradients and the trace, bit for bit, and MACs as torch and as the paper count them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from gtp_vit import GTPError, macs, patch, trace
from gtp_vit.testing import cases, families
from support.settings import DEFAULTS, OPTIONS

warnings.filterwarnings("ignore")
torch.set_num_threads(1)


def digest(*tensors: torch.Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def outputs(family: str, method: Any) -> dict[str, str]:
    """What one method gives on one model."""
    model, images = families.make(family), families.images(family)
    found: dict[str, str] = {}
    for kernels in ("native", "torch"):
        fast: Any = patch(model, method, kernels=kernels)
        with torch.inference_mode():
            found[f"{kernels} output"] = digest(families.output(fast, images))
            if hasattr(fast, "forward_features"):
                found[f"{kernels} tokens"] = digest(fast.forward_features(images))
            layers = trace(fast, images[:1]).layers
            found[f"{kernels} trace"] = digest(*(part for layer in layers for part in (layer.kept, layer.removed)))
    fast.zero_grad()
    families.output(fast, images).square().sum().backward()
    gradients = [p.grad for p in fast.parameters() if p.grad is not None]
    found["gradients"] = digest(*gradients)
    for convention in ("torch", "torchprofile"):
        try:
            found[f"macs {convention}"] = str(int(macs(fast, convention=convention)))
        except GTPError:  # depends on the images
            found[f"macs {convention}"] = str(int(macs(fast, convention=convention, images=images)))
    return found


def models(names: list[str]) -> dict[str, Any]:
    return {name: families.factory_of(name) for name in names}


def main() -> int:
    path, wanted = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    every = [*cases(DEFAULTS, models(families.THOROUGH)), *cases(OPTIONS, models(families.DIVERSE))]
    pairs = [(case.family, case.method) for case in every if wanted in f"{case.family} {case.method}"]
    found = {f"{family} {method}": outputs(family, method) for family, method in pairs}
    if not path.exists():
        path.write_text(json.dumps(found, indent=0))
        print(f"recorded {len(found)} cases in {path}")
        return 0
    before = {case: entry for case, entry in json.loads(path.read_text()).items() if wanted in case}
    wrong = [
        f"{case}: {key}"
        for case in {**before, **found}
        for key in {**before.get(case, {}), **found.get(case, {})}
        if before.get(case, {}).get(key) != found.get(case, {}).get(key)
    ]
    print("\n".join(wrong) or f"all {len(found)} cases are what they were")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
