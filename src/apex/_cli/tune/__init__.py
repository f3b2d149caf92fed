"""`apex tune`: launch configurations that are measured before a job starts."""
