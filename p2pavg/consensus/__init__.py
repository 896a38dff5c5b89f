"""Agreement of the members of a group on the result of a round, by signed votes. No I/O, no clock."""
