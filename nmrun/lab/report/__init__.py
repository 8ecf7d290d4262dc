"""From run folders to tables and plots. Reads ``result.json`` alone."""
