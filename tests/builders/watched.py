"""What was watched of real servers: the captured files, and the times of the loads in them."""

from tests.builders.loads import CAPTURED_FOLDER

CAPTURED = CAPTURED_FOLDER / "watched"
ENOUGH, QUEUED = (1795221538.0, 1795221558.4), (1795221773.0, 1795221792.6)
