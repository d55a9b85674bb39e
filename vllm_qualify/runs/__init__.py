"""Runs on this machine: their folders, what judges and publishes them, and the baselines they are compared with."""
