"""Defines the errors whose message is all that the user needs, so that no traceback is printed."""

import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
OF_PATHS = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.ELOOP)  # whoever typed the path must type another
NOT_THE_USERS = frozenset({*sys.stdlib_module_names, "hydra", "omegaconf", "torch", "numpy", "gpipe_cli"})


class PlainError(Exception):
    """Raised when the message alone explains the failure; it is printed without a traceback."""


class ConfigurationError(PlainError, ValueError):
    """Raised when a request cannot be fulfilled; the message names the key, the value, and the words to type instead.

    The command ends with exit code 2, also when a worker raises it.
    """


def refuses(error: BaseException | None) -> bool:
    """Returns whether the cause of an error is what was typed: a ConfigurationError, or a path that cannot be used."""
    named = isinstance(error, OSError) and error.filename is not None and error.errno in OF_PATHS
    return named or isinstance(error, ConfigurationError)


class Problems(list[str]):
    """Collects everything that is wrong with a request, so that one message lists it.

    Example:
        problems = Problems()
        with problems.collected():
            check_one_thing()
        with problems.collected():
            check_another()
        problems.refuse()
    """

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Adds the message of a ConfigurationError that the block raises."""
        try:
            yield
        except ConfigurationError as error:
            self.append(str(error))

    def refuse(self) -> None:
        """Raises a ConfigurationError with a line for each different message, if there are any."""
        if self:
            raise ConfigurationError("\n".join(dict.fromkeys(self)))


def visible(text: str) -> str:
    """Returns the text with control characters written out, so that no file's content can act on a terminal."""
    return text.translate(_CONTROLS)


def in_utf8(name: object) -> str:
    """Returns a text whose bytes that are no UTF-8, as in names of files, are written out: caf\\xe9.txt."""
    return str(name).encode(errors="surrogateescape").decode(errors="backslashreplace")


def place_in_users_code(error: BaseException | None) -> str | None:
    """Returns file and line of the innermost call in the user's own code; None if there is none.

    Args:
        error: exception whose traceback is searched; None: the calls that run now are.
    """
    now = traceback.walk_stack(sys._getframe(1))
    for frame, line in now if error is None else reversed([*traceback.walk_tb(error.__traceback__)]):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        if module.partition(".")[0] not in NOT_THE_USERS and not file.startswith("<"):  # <…>: made by a library
            return f"{file}, line {line}"
    return None
