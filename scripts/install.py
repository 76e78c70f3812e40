"""Create `.venv` and install the project into it when what it installs from has changed.

Needs the standard library only: it runs under the system's Python, before anything is installed.
Called by the Makefile with what is to be installed. That is recorded in a stamp file, so that a second
call neither runs pip nor touches the network.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
WHEELHOUSE = VENV / "wheelhouse"
GENERATED = ROOT / "client" / "experience_buffer" / "v1" / "service_pb2.py"
DEVICES = Path("/dev")
WSL_DRIVER = Path("/usr/lib/wsl/lib/libcuda.so.1")
MINIMUM_PYTHON = (3, 11)
PROFILES = {
    "server": "the server, without torch: half a minute and 550 MB",
    "gpu": "the server, and torch for the GPU: minutes and gigabytes",
    "demo": "the server, torch, which its model learns with, and matplotlib: a minute or two",
    "dev": "the server, torch, and what the tests need: a few minutes",
}
"""What is installed, in words. Ordered: each profile is an extra that contains the ones before it."""
RUN = "run"
"""In place of a profile: what `make run` needs on this machine."""


def digest() -> str:
    """Fingerprint of everything that decides what gets installed, and where."""
    inputs = [ROOT / name for name in ("pyproject.toml", "constraints.txt", "hatch_build.py")]
    inputs += sorted((ROOT / "proto").rglob("*.proto"))
    # An editable install and its venv hold absolute paths: a moved folder is another one.
    result = hashlib.sha256(f"{ROOT}\0{sys.version}\0{platform.machine()}\0".encode())
    for path in (*inputs, Path(__file__)):
        content = path.read_bytes()
        result.update(f"{path.relative_to(ROOT)}\0{len(content)}\0".encode() + content)
    return result.hexdigest()


def stamp(profile: str) -> Path:
    """The file that records the digest of the last complete installation of `profile`."""
    return VENV / f".installed-{profile}"


def is_installed(profile: str, wanted: str) -> bool:
    """True if `profile`, or one that contains it, is installed as `wanted` says."""
    names = list(PROFILES)
    candidates = [stamp(name) for name in names[names.index(profile) :]]
    return GENERATED.exists() and any(
        path.exists() and path.read_text(encoding="utf-8") == wanted for path in candidates
    )


def run_profile() -> str:
    """What the server needs here: torch where there is an NVIDIA GPU to compute advantages on."""
    return "gpu" if has_nvidia_gpu() else "server"


def has_nvidia_gpu() -> bool:
    """Whether there is the device file of one, or the driver that Windows lends to its Linux."""
    return any(DEVICES.glob("nvidia[0-9]*")) or WSL_DRIVER.exists()


def install(profile: str, wanted: str) -> None:
    """Run pip in `.venv`, made anew when it doesn't run here.

    Raises:
        subprocess.CalledProcessError: venv or pip failed; their output says why.
    """
    python = VENV / "bin" / "python"
    for name in PROFILES:
        stamp(name).unlink(missing_ok=True)
    if not _runs([str(python), "-m", "pip", "--version"]):
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(VENV)], check=True)
    # -c and not PIP_CONSTRAINT, which would reach the isolated build environment as well: the code
    # generator there needs an older protobuf than the one pinned for running.
    pip = [str(python), "-m", "pip", "install", "-c", "constraints.txt"]
    pip += ["--disable-pip-version-check"]
    subprocess.run([*pip, "-e", f".[{profile}]"], check=True, cwd=ROOT)
    if profile == "dev":
        # The tests read one module of it; its own dependencies (ray, vllm, ...) aren't needed, nor is
        # what they ask of Python: that module runs with 3.13 and newer, too.
        trinity = ["--no-deps", "--ignore-requires-python", "trinity-rft"]
        subprocess.run([*pip, *trinity], check=True, cwd=ROOT)
        fill_wheelhouse(python)
    stamp(profile).write_text(wanted, encoding="utf-8")


def fill_wheelhouse(python: Path) -> None:
    """Keep the wheels from which the image's test builds and installs the server offline.

    Raises:
        subprocess.CalledProcessError: pip failed; its output says why.
    """
    import tomllib  # Not in the Pythons that `main` refuses with a clear message.

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = settings["project"]["optional-dependencies"]
    server = settings["project"]["dependencies"] + extras["server"]
    pip = [str(python), "-m", "pip", "download", "--disable-pip-version-check", "-q"]
    pip += ["-d", str(WHEELHOUSE)]
    subprocess.run([*pip, "-c", "constraints.txt", *server], check=True, cwd=ROOT)
    # Without the constraints, for the same reason as above.
    subprocess.run([*pip, *settings["build-system"]["requires"]], check=True, cwd=ROOT)


def _runs(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def main(arguments: list[str]) -> int:
    """Install one profile; return the exit status."""
    if sys.version_info < MINIMUM_PYTHON:
        found, needed = platform.python_version(), ".".join(map(str, MINIMUM_PYTHON))
        sys.stderr.write(
            f"{sys.executable} is Python {found}; {needed} or newer is needed. "
            "Name another one with: make PYTHON=/path/to/python3 ...\n"
        )
        return 1
    if len(arguments) != 1 or arguments[0] not in (RUN, *PROFILES):
        sys.stderr.write(f"usage: install.py {'|'.join((RUN, *PROFILES))}\n")
        return 2
    profile = run_profile() if arguments[0] == RUN else arguments[0]
    wanted = digest()
    if is_installed(profile, wanted):
        return 0
    sys.stdout.write(f"Installing into {VENV.name}, once: {PROFILES[profile]}.\n")
    if arguments[0] == RUN and profile == "gpu":
        sys.stdout.write(
            "torch is for the NVIDIA GPU of this machine; make run PROFILE=server leaves it out.\n"
        )
    sys.stdout.flush()
    try:
        install(profile, wanted)
    except subprocess.CalledProcessError as error:
        return error.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
