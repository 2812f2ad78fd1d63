"""Watches a running attempt: progress, hangs and who caused them, nodes before the first step, odd losses."""
