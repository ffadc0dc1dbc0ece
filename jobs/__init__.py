"""The programs that a person starts: the command line, the demo, and what runs beside the job."""
