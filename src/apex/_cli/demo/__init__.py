"""`apex demo`: train the same models at every opt level.

`models` and `data` define the models and their data, `tasks` combines them in sizes for a device, `training` runs one
opt level, `report` and `plot` show the results, `command` runs these parts in order.
"""
