"""The logs of real servers that started, when they were launched and how long they took."""

from datetime import UTC, datetime

from tests.builders.loads import CAPTURED_FOLDER

CAPTURED = CAPTURED_FOLDER / "startup"
CPU_LOG, H200_LOG = ((CAPTURED / name).read_text() for name in ("cpu-cold.log", "h200-cold.log"))
LAUNCHED, CPU_STARTUP_S = 1795221204.23, 114.0
H200_LAUNCHED, H200_STARTUP_S = datetime(2026, 11, 22, 13, 33, 53, tzinfo=UTC).timestamp(), 69.0
