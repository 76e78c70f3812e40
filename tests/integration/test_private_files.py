"""What is pushed is private: nobody but the server's user can read it on the machine."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from experience_buffer import Client
from tests.integration.server import MakeServer, command


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def open_to_others(folder: Path) -> list[str]:
    """What others could read of a folder if they could enter it, the folder included."""
    paths = [folder, *folder.rglob("*")]
    return [
        f"{stat.filemode(path.stat().st_mode)} {path.name}"
        for path in paths
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)
        and path.name not in ("manifest.json",)
    ]


def test_store_snapshots_and_restored_stores(
    usual_umask: None, make_server: MakeServer, tmp_path: Path
) -> None:
    snapshots, restored = tmp_path / "snapshots", tmp_path / "restored"
    server = make_server(toml=f'[snapshots]\npath = "{snapshots}"\n')
    with Client(server.address) as client:
        client.snapshot()
    assert not open_to_others(server.data)
    assert not open_to_others(snapshots)
    [snapshot] = snapshots.glob("snapshot-*")
    done = command("restore", snapshot, "--data", restored)
    assert done.returncode == 0, done.stderr
    assert not open_to_others(restored)
    assert not any("every user" in line for line in server.log)


def test_a_folder_that_others_may_enter_stays_as_it_is_with_a_warning(
    usual_umask: None, make_server: MakeServer, tmp_path: Path
) -> None:
    folder = tmp_path / "server-0" / "data"
    folder.mkdir(parents=True)
    folder.chmod(0o755)
    server = make_server()
    assert server.data == folder
    assert any(f"may enter the store's folder {folder}" in line for line in server.log)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert stat.S_IMODE((folder / "data.mdb").stat().st_mode) == 0o600


def test_a_token_file_that_others_may_read_is_used_with_a_warning(
    usual_umask: None, make_server: MakeServer, tmp_path: Path
) -> None:
    server = make_server(toml=f'[snapshots]\npath = "{tmp_path / "snapshots"}"\n')
    token = tmp_path / "token"
    token.write_text("secret\n", encoding="ascii")
    for mode, is_warned in ((0o644, True), (0o600, False)):
        token.chmod(mode)
        done = command("snapshot", "--address", server.address, "--token-file", token)
        assert done.returncode == 0, done.stderr
        assert (f"--token-file {token} can be read by every user" in done.stderr) is is_warned
