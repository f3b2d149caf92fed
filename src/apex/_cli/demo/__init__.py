"""`apex demo`: `training` is what is trained, `report` and `plot` show it, `command` runs the parts in order."""
