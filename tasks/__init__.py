"""Prefect tasks: retries, timeouts and run logging around one call into the package."""
