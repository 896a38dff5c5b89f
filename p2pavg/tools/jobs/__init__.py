"""Jobs: what a run trains. A folder with a manifest and a program, and the one file that carries it to the members."""
