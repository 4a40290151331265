"""What is measured. Each module has `CASES`: from a name to a function of the settings."""
