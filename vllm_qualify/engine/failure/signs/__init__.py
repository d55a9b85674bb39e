"""The signs of failures in a server's log, the more specific ones first.

The log may be hostile: each pattern is bounded, or begins only once in a line. Else the work grows with the log's square. If
several signs are in the same line, the first one here wins.
"""

from vllm_qualify.engine.failure.signs import (
    classes,
    ends,
    gpus,
    host,
    memory,
    models,
    options,
    own_code,
    remains,
    support,
    surroundings,
    system,
    wide,
)
from vllm_qualify.engine.failure.signs.sign import Sign

SIGNS: list[Sign] = [
    *own_code.SIGNS,
    *options.SIGNS,
    *models.SIGNS,
    *surroundings.SIGNS,
    *support.SIGNS,
    *memory.SIGNS,
    *gpus.SIGNS,
    *system.SIGNS,
    *host.SIGNS,
    *ends.SIGNS,
]
GENERAL_SIGNS = [
    *classes.FIRST_SIGNS,
    *surroundings.GENERAL_SIGNS,
    *ends.GENERAL_SIGNS,
    *system.GENERAL_SIGNS,
    *wide.GENERAL_SIGNS,
    *classes.GENERAL_SIGNS,
]
LAST_SIGNS = [*ends.LAST_SIGNS, *system.LAST_SIGNS, *remains.LAST_SIGNS, *wide.LAST_SIGNS]
# Where nothing else tells, and no frame of a traceback does.
SIGNS_OF_CLASSES = classes.LAST_SIGNS
