"""What the first command trains: a tiny chat model and its instructions. Part of the package, so
that it trains wherever the package is installed; the other examples are in the repository."""
