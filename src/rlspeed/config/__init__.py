"""What a run is: the schema of the YAML, its loader and its cross-part rules. No torch."""
