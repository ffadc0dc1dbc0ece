"""The programs that a person starts: the command line and the demo; and helper processes of the job."""
