"""Layout and creation of the process groups of a model that is split over processes."""
