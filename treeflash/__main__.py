"""`python -m treeflash`: the command line, for launchers that start modules."""

from treeflash.cli import main

if __name__ == "__main__":
    main()
