"""`python -m tests.fuzz.install`: atheris for this Python, where there is a wheel of it.

Without one, fuzzing goes on without regard to coverage, which is said; any other failure ends it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

ROOT: Final = Path(__file__).parents[2]
_NO_WHEEL: Final = "No matching distribution found"
_NO_ANSWER: Final = re.compile(r"Retrying|connection|timed out|SSL|HTTP error", re.IGNORECASE)
"""pip finds no distribution either where it reaches no index; before that it says why."""


def install(package: str, *options: str) -> Literal["installed", "no wheel"]:
    """Install a package, if it isn't, from a wheel; nothing is compiled.

    Args:
        package: Its name; the version is the one in `constraints.txt`.
        options: More for pip.

    Raises:
        RuntimeError: pip failed for another reason than that no wheel fits; it has pip's words.
    """
    command = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    command += ["--only-binary", package, "-c", str(ROOT / "constraints.txt"), *options, package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if not done.returncode:
        return "installed"
    said = (done.stdout + done.stderr).strip()
    if _NO_WHEEL in said and not _NO_ANSWER.search(said):
        return "no wheel"
    raise RuntimeError(f"{package} can't be installed:\n{said}")


def main(arguments: Sequence[str]) -> int:
    """Install atheris; 1 with pip's words where that failed."""
    try:
        came = install("atheris", *arguments)
    except RuntimeError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if came == "no wheel":
        sys.stderr.write(
            "*** NO COVERAGE: atheris has no wheel for this platform; inputs are mutated blindly ***\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
