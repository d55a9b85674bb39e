"""What all processes of a test run share: the first one forks for them, and its environment names the folder of its sockets."""

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.warm import commands, lm_eval
from tests.warm.forks import answering, put_rules


def pytest_configure(config: pytest.Config) -> None:
    if lm_eval.FOLDER in os.environ:
        return
    stack = ExitStack()
    config.add_cleanup(stack.close)
    # A short name: a path of a socket has at most 107 letters.
    folder = Path(stack.enter_context(TemporaryDirectory(prefix="vq-warm-")))
    for name, forks in commands.forks().items():
        stack.enter_context(answering(forks, folder / name, lambda *_: None))
    stack.enter_context(answering(lm_eval.forks(), folder / lm_eval.SOCKET, put_rules))
    stack.enter_context(pytest.MonkeyPatch.context()).setenv(lm_eval.FOLDER, str(folder))
