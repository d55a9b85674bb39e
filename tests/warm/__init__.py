"""What takes seconds to import is imported once, and forked for each program that needs it: `fork` forks, `forks` asks it to.

`engine` has vLLM's programs, `commands` our own command, `flows` Prefect's flow runs.
"""
