"""The tools of operators: the command line, the daemon, its control, the doctor, the monitor."""
