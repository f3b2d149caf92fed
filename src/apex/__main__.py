"""`python -m apex` is the `apex` command."""

from ._cli import main

if __name__ == "__main__":
    main()
