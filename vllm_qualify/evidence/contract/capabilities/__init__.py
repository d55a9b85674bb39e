"""The checks of each capability that a recipe can promise."""
