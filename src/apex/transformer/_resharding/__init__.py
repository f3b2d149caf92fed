"""Parts of `apex.transformer.checkpoint`: names and locations of parameters in the whole model, and optimizer state."""
