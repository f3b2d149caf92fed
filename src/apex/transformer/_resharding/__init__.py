"""What `apex.transformer.checkpoint` is made of: names and places in the whole model, state of optimizers."""
