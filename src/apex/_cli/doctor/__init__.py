"""`apex doctor`: `facts` collects the facts, `report` prints them."""
