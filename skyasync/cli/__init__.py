"""The command ``skyasync`` and its subcommands."""
