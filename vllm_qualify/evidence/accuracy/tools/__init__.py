"""Tasks of calling tools, in the format of the Berkeley Function Calling Leaderboard (BFCL)."""
