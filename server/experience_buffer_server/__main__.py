"""`python -m experience_buffer_server` is the command line, and so is `experience-buffer`.

The command is there, too, where only the client was installed: this imports nothing that the client
doesn't need.
"""

from __future__ import annotations

import sys

import experience_buffer_server


def main() -> None:
    """Run the command line; where the server isn't installed, say what to install."""
    if sys.argv[1:] == ["--version"]:  # The client's, too; and at once.
        sys.stdout.write(f"{experience_buffer_server.__version__}\n")
        return
    try:
        from experience_buffer_server.commands.cli import main as run

        run()
    except ModuleNotFoundError as error:
        name = (error.name or "").partition(".")[0]
        if not name or name.startswith("experience_buffer"):
            raise
        sys.exit(
            f"experience-buffer: the server isn't installed here, only the client: {name} is missing; "
            "pip install 'experience-buffer[server]'"
        )


if __name__ == "__main__":
    main()
