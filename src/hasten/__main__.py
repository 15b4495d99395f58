"""`python -m hasten` is `hasten`."""

from hasten.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
