"""Make the sync client of the async one: `python scripts/generate_sync.py [--check]`.

Each module is rewritten word by word: `await` goes, `async def` becomes `def`, `AsyncBatch` becomes
`Batch`. What the two clients do differently stands behind the names of `_async/primitives.py` and
`_sync/primitives.py`; what they say differently is in TEXTS. `ruff`, from the environment that this
runs in, sorts the imports and breaks the lines. With `--check` nothing is written, and the exit status
is 1 when a file isn't what would be.
"""

from __future__ import annotations

import difflib
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT = "client/experience_buffer"
FILES = {
    f"{CLIENT}/_async/{name}.py": f"{CLIENT}/_sync/{name}.py"
    for name in (
        *("background_push", "batch", "buffer_verbs", "content_verbs", "delivery_verbs"),
        *("history_verbs", "listing", "policy_watch", "reconnecting", "scanning"),
        *("stream", "transfer_verbs"),
    )
}
"""From which file which one is made."""

TEXTS = {
    "The async client's": "The sync client's",
    "the async client": "the sync client",
    "An endless async iterator": "An endless iterator",
    """
    It belongs to one event loop; several tasks may share it, each batch goes to one of them. A
    task reads ahead. When the stream breaks it reconnects; batches that were read ahead are then
    dropped here, since the server delivers them again. A rank goes on after the last shared batch
    that was taken here.
""": """
    It can be shared between threads: each batch goes to one of them. A thread reads ahead. When
    the stream breaks it reconnects; batches that were read ahead are then dropped here, since
    the server delivers them again. A rank goes on after the last shared batch that was taken here.
""",
    "as an asynchronous iterator": "as an iterator",
    """may miss all but the newest. It reconnects when the connection breaks. One task iterates; any
    of the same loop may close it.
""": """may miss all but the newest. It reconnects when the connection breaks. One thread iterates;
    any may close it.
""",
    "It belongs to one event loop.": "It can be shared between threads.",
}
"""What is said of the async client, and what of the sync one instead. Each is needed by some file."""

WORDS = (
    (r"\basync (def|with|for)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAwaitable\[([^\[\]]*)\]", r"\1"),
    (r"\bStopAsyncIteration\b", "StopIteration"),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\b_async\b", "_sync"),
    (r"\b__a(enter|exit|iter|next)__\b", r"__\1__"),
    (r"\ba(iter|next)\(", r"\1("),
)


def generated(source: str, text: str, used: set[str]) -> str:
    """The sync module of an async one, as it is written before ruff looks at it."""
    for ours, theirs in TEXTS.items():
        if ours in text:
            used.add(ours)
            text = text.replace(ours, theirs)
    for pattern, replacement in WORDS:
        text = re.sub(pattern, replacement, text)
    origin = source.removeprefix(f"{CLIENT}/")
    return f"# Generated from {origin} by scripts/generate_sync.py; edit that file.\n{text}"


def formatted(text: str, path: str) -> str:
    """What ruff makes of a module: no import that isn't needed any more, in order, lines that fit."""
    fixed = _ruff("check", "--fix-only", "--select=I,F401,UP028", "--unsafe-fixes", text, path)
    return _ruff("format", fixed, path)


def _ruff(command: str, *rest: str) -> str:
    *options, text, path = rest
    done = subprocess.run(
        [sys.executable, "-m", "ruff", command, "-q", *options, "--stdin-filename", path, "-"],
        input=text,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"ruff {command} of {path}: {done.stderr}")
    return done.stdout


def main(arguments: list[str]) -> int:
    """Write the files, or say which are out of date; return the exit status."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: generate_sync.py [--check]\n")
        return 2
    used: set[str] = set()
    is_stale = False
    for source, target in FILES.items():
        text = generated(source, (ROOT / source).read_text(encoding="utf-8"), used)
        wanted, path = formatted(text, target), ROOT / target
        found = path.read_text(encoding="utf-8") if path.exists() else ""
        if wanted == found:
            continue
        if not arguments:
            path.write_text(wanted, encoding="utf-8")
            continue
        is_stale = True
        difference = difflib.unified_diff(
            found.splitlines(keepends=True),
            wanted.splitlines(keepends=True),
            target,
            f"made of {source}",
        )
        sys.stderr.writelines(difference)
    if unused := TEXTS.keys() - used:
        sys.stderr.write(f"nothing says any more: {sorted(unused)}\n")
        return 1
    if is_stale:
        sys.stderr.write("out of date; run: make sync\n")
    return int(is_stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
