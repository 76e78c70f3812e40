"""`python -m experience_buffer_server` is the command line."""

from experience_buffer_server.commands.cli import main

if __name__ == "__main__":
    main()
