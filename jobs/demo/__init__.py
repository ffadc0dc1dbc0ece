"""The demo: a plan of messages, the job that delivers them, and what checks each of them."""
