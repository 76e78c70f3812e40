"""`make bench-setup`: make the environments of the systems that are compared, under `.peers`.

Each has its own, because they need other versions of the same packages than this project does.
What is there already stays. redis-server itself comes from the system's packages.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from benchmarks.compare.adapters import ENVIRONMENTS
from benchmarks.compare.processes import PEERS

REQUIREMENTS: Mapping[str, Sequence[Sequence[str]]] = {
    "redis": (("redis[hiredis]==8.1.0", "numpy>=2", "safetensors>=0.5"),),
    "reverb": (("dm-reverb==0.14.0", "tensorflow-cpu==2.15.1"),),
    # torch first: asked for plainly, it brings gigabytes of CUDA packages.
    "transferqueue": (("torch==2.13.0",), ("TransferQueue==0.1.11",)),
}


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=REQUIREMENTS, nargs="+", default=list(REQUIREMENTS))
    options = parser.parse_args()
    if sys.version_info[:2] != (3, 11):
        sys.exit("Reverb's and TensorFlow 2.15's wheels need Python 3.11: run this with it")
    for name in options.only:
        _make(name)
    if shutil.which("redis-server") is None:
        print("redis-server is missing: install it with your system's package manager")


def _make(name: str) -> None:
    assert name in ENVIRONMENTS.values()
    folder = PEERS / name
    done = folder / "done"
    if done.exists():
        print(f"{name}: is there")
        return
    print(f"{name}: installing", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    for packages in REQUIREMENTS[name]:
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
        subprocess.run(pip, check=True)
    done.touch()


if __name__ == "__main__":
    main()
