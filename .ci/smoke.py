"""Is the installed package whole? Run by the Python of an environment that has it: python -I smoke.py KERNELS SOURCE

KERNELS is "native", or "torch" where it was installed without a compiler; SOURCE is the source tree, of which every
file must have arrived.
"""

import json
import os
import subprocess
import sys
import sysconfig
import warnings
from importlib import metadata
from pathlib import Path

KERNELS, SOURCE = sys.argv[1], Path(sys.argv[2]).resolve()
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def command(*words: str) -> str:
    """What the installed command prints."""
    program = Path(sysconfig.get_path("scripts")) / "gtp-vit"
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False, env=ENVIRONMENT)
    assert done.returncode == 0, f"gtp-vit {' '.join(words)}: {done.stderr}"
    return done.stdout


def files(folder: Path) -> set[str]:
    """All but what is compiled or read by a compiler only."""
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {str(path) for path in found if path.suffix not in (".pyc", ".so", ".h", ".cpp")}


def main() -> None:
    import torch

    import gtp_vit
    from gtp_vit import kernels

    package = Path(gtp_vit.__file__).resolve().parent
    assert package.is_relative_to(Path(sys.prefix).resolve()), f"{package} is not of this environment"
    assert not package.is_relative_to(SOURCE / "src"), f"{package} is the source tree"
    assert metadata.version("gtp-vit") == gtp_vit.__version__
    missing = files(SOURCE / "src" / "gtp_vit") - files(package)
    assert not missing, f"not installed: {sorted(missing)}"

    status = kernels.status()
    assert status.startswith({"native": "native", "torch": "torch operators"}[KERNELS]), (
        f"{KERNELS} kernels wanted, found: {status}"
    )

    with warnings.catch_warnings(record=True) as caught, torch.inference_mode():
        warnings.simplefilter("always")
        model = gtp_vit.create_model("fashion_vit")
        gtp_vit.patch(model)(torch.zeros(1, 1, 28, 28))
    slower = [warning for warning in caught if "slower" in str(warning.message)]
    assert bool(slower) == (KERNELS == "torch"), [str(warning.message) for warning in caught]

    assert gtp_vit.__version__ in command("--version")
    assert "deit_tiny" in command("macs", "deit_tiny_patch16_224", "--method", "deit_tiny_patch16_224-0.65")
    row = json.loads(command("evaluate", "--limit", "100", "--json"))["rows"][0]
    assert row["model"] == "fashion_vit"
    assert row["top1"] > 80, row
    print(f"{package}: {status}; top-1 of the small model {row['top1']} %")


assert sys.flags.isolated, "run it with python -I, so that only the environment supplies modules"
main()
