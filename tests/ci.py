"""Whether the tests run in CI, where what is missing is an error."""

import os

IN_CI = bool(os.environ.get("CI"))
