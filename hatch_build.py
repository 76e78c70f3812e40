"""Compile `proto/` into `client/experience_buffer/v1/`.

Hatchling runs this for `pip install .` and `pip install -e .`; after editing a .proto file,
`make proto` runs it again in the same isolated build environment.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib import resources
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent.resolve()
PROTO_ROOT = ROOT / "proto"
PYTHON_ROOT = ROOT / "client"


def compile_protos() -> list[Path]:
    """Generate `_pb2` and `_pb2_grpc` modules with their stubs; return the files written.

    Raises:
        RuntimeError: protoc reported an error (printed on stderr).
    """
    from grpc_tools import protoc

    protos = sorted(PROTO_ROOT.rglob("*.proto"))
    out = str(PYTHON_ROOT)
    code = protoc.main(
        [
            "protoc",
            f"--plugin={_find_plugin('protoc-gen-mypy')}",
            f"--plugin={_find_plugin('protoc-gen-mypy_grpc')}",
            f"-I{PROTO_ROOT}",
            f"-I{resources.files('grpc_tools') / '_proto'}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_out=quiet:{out}",
            f"--mypy_grpc_out=quiet:{out}",
            *map(str, protos),
        ]
    )
    if code != 0:
        raise RuntimeError(f"protoc exited with status {code}")

    written = []
    for proto in protos:
        stem = PYTHON_ROOT / proto.relative_to(PROTO_ROOT).with_suffix("")
        written += sorted(stem.parent.glob(f"{stem.name}_pb2*"))
    return written


def _find_plugin(name: str) -> str:
    """Locate a protoc plugin: pip's build environment is on PATH, a bare venv is not."""
    search = os.pathsep.join([os.environ.get("PATH", ""), sysconfig.get_path("scripts")])
    path = shutil.which(name, path=search)
    if path is None:
        raise RuntimeError(f"{name} not found; is mypy-protobuf installed?")
    return path


class CompileProtos(BuildHookInterface[Any]):
    """Generates the code before hatchling collects the wheel's files."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name == "wheel":
            build_data["artifacts"] += [str(path.relative_to(ROOT)) for path in compile_protos()]
