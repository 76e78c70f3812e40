"""Carries out a Dockerfile's steps in folders of this machine, without a container engine.

Each stage gets a folder that stands for its file system and a fresh virtual environment that stands
for its base image's Python. Absolute paths are mapped into the folder; accounts aren't created and
owners not changed, since that would touch the machine. Only what our Dockerfile uses is known;
anything else is an error.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
# A path starts where a word starts or after "=": not inside a URL or a relative path.
ABSOLUTE_PATH = re.compile(r"""(?:(?<=[\s"'=])|^)(?=/\w)""")
WITHOUT_EFFECT = "useradd() { :; }; chown() { :; }; "


@dataclass(slots=True)
class Stage:
    """A stage while it is built, and the image that it becomes."""

    root: Path
    """Stands for "/"."""
    environment: dict[str, str]
    working_folder: Path
    build_arguments: dict[str, str] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    """The RUN lines as written."""
    user: str = "root"
    volumes: list[str] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    stop_signal: signal.Signals = signal.SIGTERM
    healthcheck: list[str] = field(default_factory=list)
    entrypoint: list[str] = field(default_factory=list)

    def mapped(self, text: str) -> str:
        """`text` with the absolute paths in it below `root`."""
        return ABSOLUTE_PATH.sub(lambda _: str(self.root), text)

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Start a command as `docker run` or `docker exec` would; output goes to a pipe."""
        # Popen looks for the program in this process's PATH and not in the one that it passes on.
        program = shutil.which(command[0], path=self.environment["PATH"])
        assert program, f"{command[0]} isn't installed in the image"
        return subprocess.Popen(
            [program, *map(self.mapped, command[1:])],
            cwd=self.working_folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )


def build(
    dockerfile: Path, *, context: Path, folder: Path, pip_options: dict[str, str], **arguments: str
) -> Stage:
    """Build every stage below `folder` and return the last one.

    Args:
        dockerfile: The file to carry out.
        context: What COPY copies from, less what its .dockerignore excludes.
        folder: Where stages are made; its path has no spaces, since RUN lines contain it.
        pip_options: Environment of pip, which sees no other configuration.
        arguments: Build arguments.

    Raises:
        subprocess.CalledProcessError: A RUN line failed.
    """
    stages: dict[str, Stage] = {}
    defaults: dict[str, str] = {}
    stage: Stage | None = None
    for keyword, rest in _instructions(dockerfile):
        if keyword == "FROM":
            name = rest.split()[-1]
            stage = stages[name] = _new_stage(folder / name, pip_options)
        elif stage is None:
            assert keyword == "ARG", f"{keyword} before the first FROM"
            defaults.update(_argument(rest, arguments))
        elif keyword == "ARG":
            stage.build_arguments.update(_argument(rest, defaults | arguments))
        elif keyword == "COPY":
            _copy(stage, rest, context=context, stages=stages)
        else:
            _apply(stage, keyword, rest)
    assert stage is not None, f"{dockerfile} has no stage"
    return stage


def _instructions(dockerfile: Path) -> list[tuple[str, str]]:
    lines = dockerfile.read_text(encoding="utf-8").splitlines()
    text = "\n".join(line for line in lines if line.strip() and not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [(keyword, rest) for keyword, rest in (s.split(None, 1) for s in joined.splitlines())]


def _argument(rest: str, given: dict[str, str]) -> dict[str, str]:
    name, _, default = rest.partition("=")
    return {name: given.get(name, default)}


def _new_stage(root: Path, pip_options: dict[str, str]) -> Stage:
    for name in ("root", "tmp"):
        (root / name).mkdir(parents=True)
    venv = root / "usr" / "local"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    environment = {
        "PATH": f"{venv / 'bin'}:{SYSTEM_PATH}",
        "HOME": str(root / "root"),
        "TMPDIR": str(root / "tmp"),
        "LANG": "C.UTF-8",
        "PIP_CONFIG_FILE": os.devnull,
        **pip_options,
    }
    return Stage(root, environment, working_folder=root)


def _apply(stage: Stage, keyword: str, rest: str) -> None:
    match keyword:
        case "RUN":
            command = re.sub(r"^(--mount=\S+\s+)+", "", rest)
            stage.commands.append(command)
            subprocess.run(
                ["/bin/sh", "-e", "-c", WITHOUT_EFFECT + stage.mapped(command)],
                cwd=stage.working_folder,
                env=stage.environment | stage.build_arguments,
                check=True,
            )
        case "WORKDIR":
            stage.working_folder = Path(stage.mapped(rest))
            stage.working_folder.mkdir(parents=True, exist_ok=True)
        case "ENV":
            name, _, value = rest.partition("=")
            stage.environment[name] = stage.mapped(value)
        case "USER":
            stage.user = rest
        case "VOLUME":
            stage.volumes.append(rest)
        case "EXPOSE":
            stage.ports += map(int, rest.split())
        case "STOPSIGNAL":
            stage.stop_signal = signal.Signals[rest]
        case "HEALTHCHECK":
            stage.healthcheck = json.loads(rest.partition("CMD ")[2])
        case "ENTRYPOINT":
            stage.entrypoint = json.loads(rest)
        case _:
            raise AssertionError(f"{keyword}: not known here; add what it does")


def _copy(stage: Stage, rest: str, *, context: Path, stages: dict[str, Stage]) -> None:
    *sources, target = rest.split()
    destination = stage.working_folder / target
    if target.startswith("/"):
        destination = Path(stage.mapped(target))
    if sources[0].startswith("--from="):
        other = stages[sources.pop(0).removeprefix("--from=")]
        paths, patterns = [Path(other.mapped(source)) for source in sources], []
    else:
        paths = [context / source for source in sources]
        patterns = (context / ".dockerignore").read_text(encoding="utf-8").splitlines()

    def excluded(parent: str, names: list[str]) -> list[str]:
        return [n for n in names if patterns and not _included(Path(parent, n), context, patterns)]

    for path in paths:
        if path.is_dir():
            shutil.copytree(path, destination, ignore=excluded, dirs_exist_ok=True)
        else:
            assert not excluded(str(path.parent), [path.name]), f"{path} isn't in the context"
            destination.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, destination)


def _included(path: Path, context: Path, patterns: list[str]) -> bool:
    """Whether the .dockerignore `patterns` leave `path` in the context; the last match decides."""
    relative = PurePosixPath(path.relative_to(context))
    prefixes = [str(relative), *map(str, relative.parents)][:-1]
    included = True
    for pattern in patterns:
        glob = pattern.removeprefix("!").removeprefix("**/")
        depth_free = "**/" in pattern
        names = [PurePosixPath(p).name for p in prefixes] if depth_free else prefixes
        if any(fnmatch.fnmatchcase(name, glob) for name in names):
            included = pattern.startswith("!")
    return included
