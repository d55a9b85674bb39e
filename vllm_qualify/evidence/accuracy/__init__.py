"""Accuracy: lm-eval asks the server the questions of tasks, and its answers are read, checked and measured."""
