"""Traces: the arrivals, lengths and shared prefixes of requests, as they were in production, without their texts."""
