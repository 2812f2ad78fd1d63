"""Tables of published runs: read, predicted without their measured columns, scored, fitted."""
