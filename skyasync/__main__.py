"""``python -m skyasync key=value ...`` runs the base experiment."""

from skyasync.main import main

if __name__ == "__main__":
    main()
