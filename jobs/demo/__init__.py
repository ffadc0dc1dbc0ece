"""The demo: plans messages, runs the job that delivers them, and checks each of them."""
