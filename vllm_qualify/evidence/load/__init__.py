"""Loads: `vllm bench serve` runs them, and its files and counters become measurements."""
