"""Whoever follows a page of the documentation from top to bottom sees what it shows.

`tests/pages.py` says which pages these are, and which have a test of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.pages import Reader
from tests.integration.server import MakeServer
from tests.pages import blocks, followed


def follow(page: Path, folder: Path, make_server: MakeServer) -> int:
    """With a server of the page's own, of the settings that it shows as `server.toml`."""
    settings = [block.text for block in blocks(page) if block.title == "server.toml"]
    server = make_server(toml="\n".join(settings))
    folder = folder / "reader"
    folder.mkdir()
    with Reader(page, folder, server) as reader:
        return reader.follow()


@pytest.mark.parametrize("page", followed(), ids=lambda page: page.stem)
def test_what_the_page_shows_happens(page: Path, tmp_path: Path, make_server: MakeServer) -> None:
    assert follow(page, tmp_path, make_server) > 0


_GOOD = """
```toml title="server.toml"
[buffers.math]
group_size = 3
```

```python title="hello.py"
print("hello from 127.0.0.1:50051")
```

```python
>>> from experience_buffer import Client
>>> client = Client("127.0.0.1:50051")
>>> client.get_buffer("math").config.group_size
3

```

```console
$ python hello.py
hello from 127.0.0.1:50051
$ experience-buffer health
127.0.0.1:50051: SERVING
$ sleep 1000 &
$ cat nothing  # ends with 1
cat: nothing...
```

```python
print(2 * client.get_buffer("math").config.group_size)  # 6
```
"""


def test_all_kinds_of_blocks_are_run(tmp_path: Path, make_server: MakeServer) -> None:
    page = tmp_path / "page.md"
    page.write_text(_GOOD, "utf-8")
    assert follow(page, tmp_path, make_server) == 8


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("config.group_size\n3", "config.group_size\n4"),
        ("hello.py\nhello", "hello.py\nhullo"),
        ("# ends with 1", "# ends with 0"),
        ("# 6", "# 7"),
    ],
)
def test_what_happens_otherwise_is_told(
    tmp_path: Path, make_server: MakeServer, text: str, wrong: str
) -> None:
    page = tmp_path / "page.md"
    assert text in _GOOD
    page.write_text(_GOOD.replace(text, wrong), "utf-8")
    with pytest.raises(AssertionError):
        follow(page, tmp_path, make_server)
