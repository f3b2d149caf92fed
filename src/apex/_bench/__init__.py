"""`apex bench`: the registered cases, ours and the peers side by side in one run."""
