"""What a replay bundle is: the files of it, what its manifest says, and that they are as they were written.

A folder, or the same as one `.zip`: `manifest.json`, and `experiences.parquet` with a row for each
experience in the order of its delivery.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from experience_buffer import errors

MANIFEST: Final = "manifest.json"
ROWS: Final = "experiences.parquet"
KIND: Final = "experience-buffer replay bundle"
FORMAT: Final = 1
_MOST_MANIFEST_BYTES: Final = 256 << 20
_PIECE_BYTES: Final = 1 << 20


def digest_of(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            hashed.update(piece)
    return {"num_bytes": path.stat().st_size, "sha256": hashed.hexdigest()}


@contextmanager
def writing(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder to write a bundle into; it has its name, or becomes one file, at the end of the block.

    Raises:
        FileExistsError: There is something of that name.
    """
    if out.exists() and not force:
        raise FileExistsError(f"{out} is there already; take another name or give --force")
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        made = Path(folder) / "bundle"
        made.mkdir()
        yield made
        if out.suffix == ".zip":
            packed = Path(folder) / "bundle.zip"
            with zipfile.ZipFile(packed, "w", zipfile.ZIP_STORED) as archive:
                for name in (MANIFEST, ROWS):
                    archive.write(made / name, name)
            made = packed
        if out.is_dir():
            shutil.rmtree(out)
        made.replace(out)


@contextmanager
def reading(bundle: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The file of rows of a bundle, and its manifest; both compared with their checksums.

    Raises:
        InvalidRequestError: It isn't a bundle, or isn't as it was written.
        FileNotFoundError: There is none.
    """
    if bundle.is_dir():
        yield bundle / ROWS, _checked(bundle)
        return
    with tempfile.TemporaryDirectory(prefix="bundle-") as folder:
        _unpack(bundle, Path(folder))
        yield Path(folder) / ROWS, _checked(Path(folder))


def _unpack(bundle: Path, folder: Path) -> None:
    """Take the two files out of a zip: by their names alone, whatever else is in it."""
    try:
        with zipfile.ZipFile(bundle) as archive:
            for name in (MANIFEST, ROWS):
                if archive.getinfo(name).file_size > _most_bytes(bundle, name):
                    raise _bad(bundle, f"{name} would be far larger than the file that holds it")
                with archive.open(name) as packed, (folder / name).open("wb") as file:
                    shutil.copyfileobj(packed, file, _PIECE_BYTES)
    except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError) as error:
        raise _bad(bundle, str(error)) from error


def _most_bytes(bundle: Path, name: str) -> int:
    # What `writing` makes isn't compressed.
    return _MOST_MANIFEST_BYTES if name == MANIFEST else bundle.stat().st_size


def _checked(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    if path.stat().st_size > _MOST_MANIFEST_BYTES:
        raise _bad(folder, f"{MANIFEST} has {path.stat().st_size} bytes")
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise _bad(folder, f"{MANIFEST} isn't JSON: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("kind") != KIND:
        raise _bad(folder, f"{MANIFEST} is of something else")
    if manifest.get("format") != FORMAT:
        raise _bad(folder, f"format {manifest.get('format')!r}; this version reads {FORMAT}")
    said = manifest.get("files", {}).get(ROWS)
    found = digest_of(folder / ROWS)
    if said != found:
        raise _bad(folder, f"{ROWS} isn't as it was written: {found}, and {said} was said")
    return manifest


def _bad(bundle: Path, why: str) -> errors.InvalidRequestError:
    return errors.InvalidRequestError(
        f"{bundle} isn't a whole replay bundle: {why}", subject="bundle"
    )
