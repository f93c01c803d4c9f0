"""`python -m hocket.ckpt`: the `hocket-ckpt` command."""

from hocket.ckpt.cli.app import main

if __name__ == "__main__":
    main()
