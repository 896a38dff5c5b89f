"""``python -m p2pavg``."""

from p2pavg.tools.cli.main import main

if __name__ == "__main__":
    main()
