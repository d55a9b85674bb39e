"""The command `vllm-qualify`.

Exit codes: 0 passed (or done), 1 not passed, 2 the caller's mistake, 3 the world's fault.
"""

from vllm_qualify.cli.commands import app, main

__all__ = ["app", "main"]
