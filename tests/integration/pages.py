"""Running what the pages of the documentation show."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_ADDRESS = "127.0.0.1:50051"


def run_examples(page: Path, address: str) -> int:
    """Run a page's examples, one after the other, against a server; how many there are.

    Raises:
        AssertionError: One prints something else than the page says.
    """
    code = "\n".join(
        re.findall(r"^```python\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.M)
    )
    assert _ADDRESS in code
    code = code.replace(_ADDRESS, address)
    examples = doctest.DocTestParser().get_doctest(code, {}, page.name, str(page), 0)
    report: list[str] = []
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(verbose=False, optionflags=flags)
    try:
        failed = runner.run(examples, out=report.append, clear_globs=False).failed
    finally:
        if "client" in examples.globs:
            examples.globs["client"].close()
    assert not failed, "".join(report)
    return len(examples.examples)
