"""`python -m flatbed` is the `flatbed` command."""

from flatbed.cli import main

if __name__ == "__main__":
    main()
