"""Following what the pages of the documentation show, against a real server."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.integration.server import Server
from tests.pages import ROOT, Block, blocks

DOCS = ROOT / "docs"
_ADDRESS = "127.0.0.1:50051"
_METRICS = "127.0.0.1:9464"
_FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_SECONDS = 60.0


class Reader:
    """Follows a page in a folder of its own, with a server where the page has one."""

    def __init__(self, page: Path, folder: Path, server: Server) -> None:
        self._page = page
        self._folder = folder
        self._places = {
            _ADDRESS: server.address,
            _METRICS: f"127.0.0.1:{server.metrics_port}",
        }
        self._names: dict[str, Any] = {}
        self._groups: list[subprocess.Popen[str]] = []
        # A terminal of a width, without colours: what is compared is text.
        self._environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "EXPERIENCE_BUFFER_ADDRESS": server.address,
            **{"COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"},
            **{"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        }

    def __enter__(self) -> Reader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End what the page's commands have left running."""
        for started in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)
        client = self._names.get("client")
        if client is not None:
            client.close()

    def follow(self) -> int:
        """Do all of it; how many examples and commands there were.

        Raises:
            AssertionError: One ends, or prints something else, than the page says.
        """
        return sum(self._do(block) for block in blocks(self._page))

    def _do(self, block: Block) -> int:
        if block.title:
            self._save(block)
            return 0
        match block.kind:
            case "python" if block.text.startswith(">>> "):
                return self._session(block)
            case "python":
                return self._program(block)
            case "console":
                return self._commands(block)
        return 0

    def _save(self, block: Block) -> None:
        place = self._folder / block.title
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(self._ours(block.text), "utf-8")

    def _session(self, block: Block) -> int:
        """A session of Python, whose names go on from one to the next."""
        code = self._ours(block.text)
        name = f"{self._page.name}, line {block.line}"
        examples = doctest.DocTestParser().get_doctest(code, self._names, name, name, block.line)
        examples.globs = self._names
        report: list[str] = []
        runner = doctest.DocTestRunner(verbose=False, optionflags=_FLAGS)
        # What commands have written is read here, too.
        with contextlib.chdir(self._folder):
            failed = runner.run(examples, out=report.append, clear_globs=False).failed
        assert not failed, self._theirs("".join(report))
        return len(examples.examples)

    def _program(self, block: Block) -> int:
        """A piece of a program; what its calls of print say has to be what their comments say."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(self._ours(block.text), f"{self._page}:{block.line}", "exec"), self._names)
        shown = re.findall(r"^ *print\(.+\)  # (.+)$", block.text, re.MULTILINE)
        if shown:
            assert self._theirs(printed.getvalue()).splitlines() == shown
        return 1

    def _commands(self, block: Block) -> int:
        """Commands, each a line that begins with `$`, and below it what it prints."""
        shown = re.split(r"^\$ ", block.text, flags=re.MULTILINE)
        assert not shown[0].strip(), f"{self._page.name}, line {block.line}: begin with `$ `"
        for text in shown[1:]:
            command, _, expected = re.split(r"(?<!\\)(\n)", text, maxsplit=1)
            status, printed = self._run(command)
            wanted = re.search(r"  # ends with (\d+)$", command)
            where = f"{self._page.name}, line {block.line}: $ {command}"
            assert status == int(wanted[1] if wanted else 0), f"{where}\n{printed}"
            matches = doctest.OutputChecker().check_output(
                expected.strip(), printed.strip(), _FLAGS
            )
            assert matches, f"{where}\nexpected:\n{expected}\ngot:\n{printed}"
        return len(shown) - 1

    def _run(self, command: str) -> tuple[int, str]:
        """Exit status and output, in the page's addresses; what it leaves running is ended at the end."""
        output = self._folder / ".output"
        with output.open("w", encoding="utf-8") as file:
            started = subprocess.Popen(
                ["/bin/sh", "-c", self._ours(command)],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            self._groups.append(started)
            status = started.wait(_SECONDS)
        return status, self._theirs(output.read_text("utf-8"))

    def _ours(self, text: str) -> str:
        for shown, real in self._places.items():
            text = text.replace(shown, real)
        return text

    def _theirs(self, text: str) -> str:
        for shown, real in self._places.items():
            text = text.replace(real, shown)
        return text.replace(str(self._folder), "~")


def run_examples(page: Path, address: str) -> int:
    """Run a page's sessions of Python, one after the other, against a server; how many there are.

    Raises:
        AssertionError: One prints something else than the page says.
    """
    code = "\n".join(block.text for block in blocks(page) if block.kind == "python")
    assert _ADDRESS in code
    code = code.replace(_ADDRESS, address)
    examples = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), 0)
    report: list[str] = []
    runner = doctest.DocTestRunner(verbose=False, optionflags=_FLAGS)
    try:
        failed = runner.run(examples, out=report.append, clear_globs=False).failed
    finally:
        if "client" in examples.globs:
            examples.globs["client"].close()
    assert not failed, "".join(report)
    return len(examples.examples)
