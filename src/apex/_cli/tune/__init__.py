"""`apex tune`: a search for quicker launch configurations before a job starts."""
