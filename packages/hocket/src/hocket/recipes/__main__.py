"""`python -m hocket.recipes`: the `hocket` command."""

from hocket.recipes.cli import main

if __name__ == "__main__":
    main()
