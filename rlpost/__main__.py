"""`python -m rlpost` and `rlpost` are one command."""

from rlpost.commands.run import main

if __name__ == "__main__":
    main()
