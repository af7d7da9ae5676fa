"""What a user can cause, told apart from what is a defect of the program."""


class UserError(ValueError):
    """A configuration or an input that a user can mend.

    The message is one line: the key (or the file and its row), what was expected, and what to do. The command
    line prints it without a traceback and exits with 2.
    """
