"""`apex build`: kernels compiled before a job starts."""
