"""Errors that are the user's to fix: shown as one line, exit code 2."""


class UserError(Exception):
    """Something in the input, the config or the call is wrong. The message says what, where and how to fix it."""


class RunFailed(Exception):
    """A run refused to publish (too many rejected rows, a failed validation, ...). The message says why. Exit 1."""
