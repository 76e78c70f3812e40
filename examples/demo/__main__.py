"""The demo's command line: `python -m examples.demo`.

Exit status 0 if the held-out accuracy reached its target and everything that the server
acknowledged was trained exactly once or is still in the buffer; 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from examples.demo.display import Display
from examples.demo.processes import DemoError
from examples.demo.report import summary
from examples.demo.runner import Runner
from examples.demo.server import Server, ServerError
from examples.demo.settings import DemoSettings


def main() -> int:
    """Run the demo; the exit status."""
    arguments = _parse()
    signal.signal(signal.SIGTERM, _terminate)
    output: Path = arguments.output.resolve()
    output.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="run-", dir=output))
    plot_path = output / "demo.png"
    server = Server(folder)
    settings = DemoSettings(
        address=server.address, folder=folder, seed=arguments.seed, num_updates=arguments.updates
    )
    with Display(num_updates=settings.num_updates) as display:
        try:
            outcome = Runner(settings, server, kills=arguments.kill).run(
                display, plot_path=plot_path
            )
        except (DemoError, ServerError) as error:
            display.say(f"demo: {error}; the files of this run are in {folder}")
            return 1
        except KeyboardInterrupt:
            display.say(f"demo: interrupted; the files of this run are in {folder}")
            return 130
    for line in summary(outcome):
        print(line)
    print(f"curves: {plot_path}")
    if not outcome.is_success:
        print(f"journals, weights, and the server's log and store: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def _parse() -> argparse.Namespace:
    defaults = DemoSettings.__dataclass_fields__
    parser = argparse.ArgumentParser(prog="python -m examples.demo", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="same seed, similar curve [0]")
    parser.add_argument(
        "--updates",
        type=int,
        default=defaults["num_updates"].default,
        help="policy updates of the run [%(default)s]",
    )
    parser.add_argument(
        "--kill",
        action="store_true",
        default=os.environ.get("DEMO_KILL", "") not in ("", "0"),
        help="kill the server, then the trainer, with SIGKILL and restart them; also DEMO_KILL=1",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("demo-output"), help="folder of the PNG [%(default)s]"
    )
    return parser.parse_args()


def _terminate(signum: int, _frame: object) -> NoReturn:
    """End like an exception, so that no process stays behind."""
    sys.exit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
