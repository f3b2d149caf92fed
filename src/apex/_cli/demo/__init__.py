"""`apex demo`: the same models trained at every opt level.

`models` and `data` are what is trained and on what, `tasks` puts them together in sizes for a device, `training` runs
one opt level, `report` and `plot` show the outcome, `command` runs the parts in order.
"""
