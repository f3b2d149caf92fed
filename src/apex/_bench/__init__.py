"""`apex bench`: runs the registered cases, ours beside the peers."""
