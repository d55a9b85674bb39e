from tests.approval.conftest import key, run, store

__all__ = ["key", "run", "store"]
