"""The API's contract: each check is asked for, kept as requests and replies, and judged from these alone."""
