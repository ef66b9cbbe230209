"""Returns what a person is told where something is refused."""

from typing import Any

import pytest

from gpipe_cli.errors import ConfigurationError


def refusal_of(call: Any, *given: Any, error: type[Exception] = ConfigurationError, **named: Any) -> str:
    """Returns the message of the error with which a call must end."""
    with pytest.raises(error) as caught:
        call(*given, **named)
    return str(caught.value)
