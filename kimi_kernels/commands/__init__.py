"""One module per subcommand of `kimi-kernels`."""

PROGRAM = "kimi-kernels"


class UsageError(ValueError):
    """Arguments that do not fit together or do not fit the model."""
