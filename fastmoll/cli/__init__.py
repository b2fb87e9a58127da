"""The ``fastmoll`` command: one file a subcommand that has options of its own."""
