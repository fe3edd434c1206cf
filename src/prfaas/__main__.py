"""`python -m prfaas`: the command where its script is not on the PATH."""

from prfaas.cli.main import main

if __name__ == "__main__":
    main()
