"""What is said when a checkpoint cannot be written or read?"""


class CheckpointError(ValueError):
    """A checkpoint or its folder cannot be used; says which file or leaf, and why.

    Example:
      >>> issubclass(CheckpointError, ValueError)
      True
    """
