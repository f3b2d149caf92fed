"""`apex doctor`: `facts` collects, `report` prints."""
