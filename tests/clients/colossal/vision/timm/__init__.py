"""A stand-in for timm, whose vision transformer would be too slow on a CPU."""
