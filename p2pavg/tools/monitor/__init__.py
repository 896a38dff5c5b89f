"""A web page and a terminal view of a run, made of the statuses that its peers publish."""
