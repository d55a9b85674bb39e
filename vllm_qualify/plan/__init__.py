"""Plans: all that determines how a cell is served, measured and judged, decided before anything starts."""
