"""Prefect tasks: retries, timeouts and run logging around one call into the package.

None is cached: to find a result again Prefect hashes all inputs of every call, plans and reports too, and what a run has
measured is in its folder.
"""
