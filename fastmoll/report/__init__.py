"""Reports on finished evaluations: the paper's tables and figures, and one HTML page with all of it."""
