"""What every other package may use: errors, packaged data, host lists, names in a run folder."""
