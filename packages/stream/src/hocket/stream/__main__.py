"""`python -m hocket.stream`: the `hocket-stream` command."""

from hocket.stream.cli.app import main

if __name__ == "__main__":
    main()
