"""`apex migrate`: scripts rewritten between apex.amp, torch.amp and the Booster."""
